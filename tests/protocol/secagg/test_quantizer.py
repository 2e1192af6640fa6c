"""Fixed point in the quantizer: no overflow, no bias, a bounded length, and words that look random under masks."""

import hashlib
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbcl.errors import ConfigError, ProtocolError
from dbcl.protocol.secagg import GroupRound, SecAggConfig, WeightedMean, groups, keys
from dbcl.protocol.secagg.quantizer import LEVELS, Quantizer, packed, unpacked
from protocol.secagg.conftest import BROADCAST, PLAN, ROUND, Fleet, names


@pytest.mark.parametrize("clients", range(2, 65))
def test_no_overflow_where_all_are_at_the_bound(clients: int) -> None:
    quantizer, encoding = Quantizer(clip=4.0, clients=clients), WeightedMean(SecAggConfig(clip=4.0, weight_cap=10))
    for sign in (1.0, -1.0):
        total = np.zeros(2, dtype=np.uint32)
        for _ in range(clients):
            total += encoding.words(np.array([sign * 4.0]), 10, clients)
        assert quantizer.values(total[:1])[0] == sign * clients * LEVELS * quantizer.step
        assert int(total[1] & quantizer.mask) == clients * LEVELS
    assert 4 * clients * LEVELS <= 1 << quantizer.bits < 8 * clients * LEVELS  # room to fold, and no bit more


def test_sixteen_bits_and_those_of_the_sum() -> None:
    assert [Quantizer(1.0, clients).bits for clients in (1, 2, 3, 32, 33, 64)] == [17, 18, 19, 22, 23, 23]
    for bound, clients in ((0.0, 4), (-1.0, 4), (float("nan"), 4), (float("inf"), 4), (1.0, 0), (1.0, 1025)):
        with pytest.raises(ConfigError, match="a quantizer has a bound above 0"):
            Quantizer(bound, clients)


def test_rounding_is_unbiased() -> None:
    """The mean of 4,000 draws of 64 values lies within five standard deviations of each, and of all."""
    quantizer, rng = Quantizer(clip=1.0, clients=8), np.random.default_rng(0)
    values = np.random.default_rng(1).uniform(-0.12, 0.12, size=64)
    draws = np.array([quantizer.values(quantizer.quantized(values, rng)) for _ in range(4000)])
    deviation = quantizer.step / 2 / np.sqrt(4000)  # a coin's standard deviation is at most a half
    assert np.abs(draws.mean(axis=0) - values).max() < 5 * deviation
    assert abs((draws.mean(axis=0) - values).mean()) < 5 * deviation / np.sqrt(64)
    assert np.abs(draws - values).max() < quantizer.step
    assert len(np.unique(draws, axis=0)) == 4000  # it is drawn anew each time


@given(length=st.integers(1, 3000), scale=st.sampled_from([1.0, 0.5, 1e-3, 1e-6]), seed=st.integers(0, 1000))
@settings(max_examples=150, deadline=None)
def test_rounding_is_never_longer_than_it_says(length: int, scale: float, seed: int) -> None:
    quantizer, rng = Quantizer(clip=2.0, clients=5), np.random.default_rng(seed)
    values = rng.standard_normal(length)
    values *= 2.0 * scale / np.linalg.norm(values)
    rounded = quantizer.values(quantizer.quantized(values, rng))
    assert np.linalg.norm(rounded) <= quantizer.longest(length)
    assert np.abs(rounded).max() <= 2.0


def test_the_longest_is_a_real_bound() -> None:
    """Half a step on each of many values: the worst rounding is drawn again, and 2^20 values stretch by 0.03 %."""
    quantizer = Quantizer(clip=1.0, clients=5)
    values = np.full(1 << 16, quantizer.step / 2)
    for seed in range(20):
        rounded = quantizer.values(quantizer.quantized(values, np.random.default_rng(seed)))
        assert np.linalg.norm(rounded) <= quantizer.longest(len(values))
    assert quantizer.longest(1 << 20) < 1.0003


def test_no_rounding_is_short_enough() -> None:
    class Always:
        def random(self, count: int, dtype: type) -> np.ndarray:
            return np.zeros(count, dtype)

    quantizer = Quantizer(clip=1.0, clients=2)
    values = np.full(1 << 16, 127.99 * quantizer.step)  # all rounded up they are 256 * 128 steps long
    assert quantizer.longest(1 << 16) < 256 * 128 * quantizer.step
    with pytest.raises(ProtocolError, match="no rounding of this update is short enough"):
        quantizer.quantized(values, Always())  # type: ignore[arg-type]


@given(bits=st.integers(1, 32), numbers=st.lists(st.integers(0, 2**32 - 1), max_size=70))
@settings(max_examples=300, deadline=None)
def test_packing_comes_back(bits: int, numbers: list[int]) -> None:
    words = np.array([number & ((1 << bits) - 1) for number in numbers], dtype=np.uint32)
    data = packed(words, bits)
    whole = sum(int(word) << (bits * place) for place, word in enumerate(words))
    assert data == whole.to_bytes(-(-len(words) * bits // 8), "little")
    assert np.array_equal(unpacked(data, bits, len(words)), words)
    with pytest.raises(ProtocolError, match="bytes are not"):
        unpacked(data + b"\0", bits, len(words))


# What the server sees


def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are the same in every run."""
    number = count()

    def token_bytes(length: int) -> bytes:
        return hashlib.sha256(b"test_ring" + next(number).to_bytes(8, "big")).digest()[:length]

    monkeypatch.setattr(keys, "secrets", SimpleNamespace(token_bytes=token_bytes))


def statistic(parts: np.ndarray) -> float:
    """Chi-square of 64 values against the uniform distribution."""
    seen = np.bincount(parts, minlength=64)
    return float(((seen - len(parts) / 64) ** 2 / (len(parts) / 64)).sum())


CHI_SQUARE = 131.0
"""With 63 degrees of freedom, above it one time in a million."""


def test_a_masked_update_is_uniform_over_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded(monkeypatch)
    length = 1 << 15
    fleet = Fleet.made(4)
    fleet.server = GroupRound(ROUND, BROADCAST, PLAN, length, fleet.server.config)
    fleet.numbers = {name: np.arange(length) % 40 for name in names(4)}
    fleet.mask(fleet.deliveries())
    quantizer = Quantizer(fleet.server.config.clip, 4)
    clear = np.arange(length, dtype=np.uint32) % 40
    seen = {name: unpacked(own.packed, quantizer.bits, length + 1)[:-1] for name, own in fleet.masked.items()}
    for words in seen.values():
        for shift in range(0, quantizer.bits - 5, 4):  # six bits at each place, the lowest and the highest included
            assert statistic(words >> np.uint32(shift) & np.uint32(63)) < CHI_SQUARE
            assert statistic((words - clear & quantizer.mask) >> np.uint32(shift) & np.uint32(63)) < CHI_SQUARE
        assert statistic(words >> np.uint32(quantizer.bits - 6)) < CHI_SQUARE
        assert abs(np.corrcoef(words, clear)[0, 1]) < 5 / np.sqrt(length)
    first, second, *_ = seen.values()
    assert statistic((first - second & quantizer.mask) & np.uint32(63)) < CHI_SQUARE
    assert statistic(clear & np.uint32(63)) > 100 * CHI_SQUARE  # and the test can fail


def test_a_config_says_what_is_wrong_with_it() -> None:
    with pytest.raises(ConfigError) as error:
        SecAggConfig(clip=0.0, weight_cap=0, min_cohort=1, colluding=1.0)
    for reason in ("clip must be above 0", "weight_cap must be 1", "2 clients or more", "below 1, got 1.0"):
        assert reason in str(error.value)
    with pytest.raises(ConfigError, match="a sum of 2 clients"):
        WeightedMean(SecAggConfig(min_cohort=2))
    assert isinstance(SecAggConfig(clip=4).clip, float)  # 4 and 4.0 are written differently


@given(clients=st.integers(0, 300), most=st.integers(1, 64))
def test_groups_hold_everybody_once(clients: int, most: int) -> None:
    own = sorted(names(clients))
    made = groups(own, largest=most)
    assert sorted(name for group in made for name in group) == own
    assert max(map(len, made)) <= most
    assert max(map(len, made)) - min(map(len, made)) <= 1
