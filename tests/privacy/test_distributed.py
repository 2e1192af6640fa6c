"""Noise shares: the theorem's numbers, the rounding term against exact values, and the stream itself."""

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from dbcl import seeds
from dbcl.errors import ConfigError, ProtocolError
from dbcl.privacy import Mechanism, Workload, banded, epsilon_of
from dbcl.privacy.distributed import MIN_SCALE, NoiseShares, NoiseStream, total_variation

Matrix = NDArray[np.float64]


def shares(*, rounds: int = 12, separation: int = 3, **changes: object) -> NoiseShares:
    mechanism = Mechanism(Workload(), banded(separation), rounds, separation, math.ceil(rounds / separation))
    given: dict[str, object] = {
        "epsilon": 2.0,
        "delta": 1e-5,
        "mechanism": mechanism,
        "clients": 5,
        "colluders": 2,
        "values": 50,
        "steps": 1 << 16,
    }
    return NoiseShares(**{**given, **changes})  # type: ignore[arg-type]


def exact_distance(K: Matrix, points: int) -> float:
    """Total variation between a Gaussian of covariance K, wrapped to the unit cube, and the uniform distribution."""
    grid = np.meshgrid(*[(np.arange(points) + 0.5) / points] * len(K), indexing="ij")
    density = np.ones_like(grid[0])
    for L in itertools.product(range(-5, 6), repeat=len(K)):
        weight = math.exp(-2 * math.pi**2 * np.array(L) @ K @ np.array(L)) if any(L) else 0.0
        if weight > 1e-16:
            density += weight * np.cos(2 * math.pi * sum(own * each for own, each in zip(L, grid, strict=True)))
    return float(np.abs(density - 1).mean() / 2)


@pytest.mark.parametrize("scale", [0.3, 0.5, 0.7])
@pytest.mark.parametrize(("honest", "rounds", "points"), [(2, 1, 400), (3, 1, 60), (2, 2, 60), (3, 2, 14)])
def test_the_bound_on_the_rounding_is_above_the_exact_distance_and_near_it(
    scale: float, honest: int, rounds: int, points: int
) -> None:
    c = banded(2).coefficients(rounds)
    C = np.array([[c[row - column] if row >= column else 0.0 for column in range(rounds)] for row in range(rounds)])
    among = np.eye(honest - 1) - np.ones((honest - 1, honest - 1)) / honest
    exact = exact_distance(np.kron(among, scale**2 * np.linalg.inv(C.T @ C)), points)
    bound = total_variation(scale, honest, rounds)
    assert exact <= bound
    if scale == 0.7:
        assert bound < 20 * exact


def test_the_rounding_costs_what_was_computed_by_hand() -> None:
    """Ten silos, 1,000 rounds, 10 million values, epsilon 8."""
    found = [(1 + math.exp(8)) * 1e7 * total_variation(scale, 10, 1000) for scale in (2, 2.5, 3)]
    assert found == pytest.approx([2.134e-4, 4.842e-14, 7.90e-26], rel=1e-3)


def test_one_honest_silo_needs_no_bound() -> None:
    """Its rounded sum is a function of q + nu: nothing that others round is needed for that."""
    assert total_variation(0.1, honest=1, rounds=1000) == 0.0


def test_shares_that_are_hardly_noise_have_no_bound() -> None:
    assert total_variation(1e-3, honest=10, rounds=1000) == math.inf


def test_the_noise_of_the_honest_silos_is_that_of_the_central_mechanism() -> None:
    own = shares()
    grid = 0.1 / own.steps  # of a clip of 0.1
    central = own.mechanism.mu(sigma=own.scale * math.sqrt(own.honest) * grid, clip=0.1, per_round=1)
    assert central * (1 + math.sqrt(own.values) / own.steps) == pytest.approx(own.mu, rel=1e-12)
    assert epsilon_of(own.mu, own.delta) <= own.epsilon
    assert own.epsilon_against(2) == pytest.approx(2.0, rel=2e-3)
    assert own.epsilon_against(0) < own.epsilon_against(2) < own.epsilon_against(4)


def test_more_colluders_need_more_noise_of_each() -> None:
    scales = [shares(colluders=colluders).scale for colluders in range(5)]
    assert np.array(scales) ** 2 * (5 - np.arange(5)) == pytest.approx([5 * scales[0] ** 2] * 5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"colluders": 5}, "0 to 4 may collude"),
        ({"steps": 0}, "1 or more"),
        ({"steps": 1, "epsilon": 60.0}, f"{MIN_SCALE:g} are needed"),
    ],
)
def test_what_gives_no_guarantee_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        shares(**changes)  # type: ignore[arg-type]


def test_a_stream_is_rounded_and_has_the_covariance_of_the_mechanism() -> None:
    own = shares(values=20_000, rounds=6)
    stream = NoiseStream(own, bytes(32))
    drawn = np.stack([stream.draw(round, bytes([round])) for round in range(6)])
    assert drawn.dtype == np.int64
    c = own.mechanism.strategy.coefficients(6)
    C = np.array([[c[row - column] if row >= column else 0.0 for column in range(6)] for row in range(6)])
    expected = own.scale**2 * np.linalg.inv(C) @ np.linalg.inv(C).T
    assert np.abs(drawn @ drawn.T / 20_000 - expected).max() < 5 * own.scale**2 / math.sqrt(20_000)


def test_a_restored_stream_goes_on() -> None:
    own = shares()
    whole, broken = NoiseStream(own, bytes(32)), NoiseStream(own, bytes(32))
    for round in range(2):
        whole.draw(round, b"sent")
        broken.draw(round, b"sent")
    again = NoiseStream(own, bytes(32))
    again.load_state(broken.state())
    for round in range(2, 6):
        assert (again.draw(round, b"sent") == whole.draw(round, b"sent")).all()


def test_another_broadcast_gives_other_noise_from_there_on() -> None:
    """So a disk that was rolled back never adds noise to other data that was shown already."""
    one, other = NoiseStream(shares(), bytes(32)), NoiseStream(shares(), bytes(32))
    assert (one.draw(0, b"a") == other.draw(0, b"a")).all()
    assert (one.draw(1, b"b") != other.draw(1, b"c")).mean() > 0.9
    assert (one.draw(2, b"d") != other.draw(2, b"d")).mean() > 0.9


def test_rounds_are_drawn_once() -> None:
    stream = NoiseStream(shares(), bytes(32))
    stream.draw(0, b"")
    with pytest.raises(ProtocolError, match="noise is drawn for round 1"):
        stream.draw(0, b"")
    for round in range(1, 12):
        stream.draw(round, b"")
    with pytest.raises(ProtocolError, match="round 12 of 12"):
        stream.draw(12, b"")


def test_the_noise_of_a_round_without_an_answer_is_part_of_the_correlation() -> None:
    """So sums of later rounds keep the covariance that the guarantee counts on, whoever took part before."""
    own = shares(values=20_000, rounds=6)
    stream = NoiseStream(own, bytes(32))
    drawn = np.stack([stream.draw(round, bytes([round])) for round in (0, 3, 4)])
    c = own.mechanism.strategy.coefficients(6)
    C = np.array([[c[row - column] if row >= column else 0.0 for column in range(6)] for row in range(6)])
    expected = (own.scale**2 * np.linalg.inv(C) @ np.linalg.inv(C).T)[np.ix_([0, 3, 4], [0, 3, 4])]
    assert np.abs(drawn @ drawn.T / 20_000 - expected).max() < 5 * own.scale**2 / math.sqrt(20_000)


@pytest.mark.parametrize("state", ["empty", "another model"])
def test_a_state_that_is_none_is_refused(state: str) -> None:
    stream = NoiseStream(shares(values=50), bytes(32))
    other = NoiseStream(shares(values=40), bytes(32))
    other.draw(0, b"")
    kept = other.state() if state == "another model" else other.state()._replace(values={})
    with pytest.raises(ProtocolError, match="the state of a client's noise"):
        stream.load_state(kept)


def test_the_tail_of_a_share_is_that_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest word of a radius gives 9.4 standard deviations; of 32 bits it would be 6.7."""
    monkeypatch.setattr(seeds, "words", lambda *labels, n: np.zeros(n, dtype=np.uint64))
    own = shares()
    assert NoiseStream(own, bytes(32)).draw(0, b"").max() > 9 * own.scale
