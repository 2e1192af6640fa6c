"""The mechanism against dense matrices and brute force."""

import itertools
import math
import time
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dbcl import optim
from dbcl.errors import ConfigError
from dbcl.privacy import (
    Mechanism,
    Memory,
    Strategy,
    Workload,
    banded,
    independent,
    sensitivity,
    white,
)
from dbcl.privacy.factorization import BLOCK, quotient

MIXED = Strategy("mixed", numerator=(1.0, -0.5), denominator=(1.0, -0.9))
"""A strategy with both polynomials."""


def dense(column: NDArray[np.float64]) -> NDArray[np.float64]:
    """The lower triangular Toeplitz matrix with this first column."""
    n = len(column)
    return np.array([[column[t - s] if s <= t else 0.0 for s in range(n)] for t in range(n)])


def optimiser_matrix(momentum: float, lr: float, n: int) -> NDArray[np.float64]:
    """A by what PyTorch's own optimiser does with one update at a time: column s is the path after an update in s."""
    paths = []
    for s in range(n):
        parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = optim.momentum(momentum, lr)([parameter])
        path = []
        for t in range(n):
            parameter.grad = torch.full((1,), -float(t == s), dtype=torch.float64)
            optimizer.step()
            path.append(parameter.item())
        paths.append(path)
    return np.array(paths).T


def strategies(workload: Workload) -> list[Strategy]:
    return [
        independent(),
        banded(1),
        banded(4),
        banded(4, workload.momentum),
        banded(30),
        MIXED,
        white(workload),
    ]


@pytest.mark.parametrize(("momentum", "lr"), [(0.0, 1.0), (0.0, 0.3), (0.5, 1.0), (0.9, 2.0)])
def test_the_workload_is_the_optimisers_own(momentum: float, lr: float) -> None:
    workload = Workload(momentum, lr)
    np.testing.assert_allclose(dense(workload.coefficients(12)), optimiser_matrix(momentum, lr, 12), rtol=1e-12)


@pytest.mark.parametrize(("momentum", "lr"), [(0.0, 1.0), (0.0, 0.3), (0.5, 1.0), (0.9, 2.0)])
@pytest.mark.parametrize("number", range(7))
def test_the_stream_is_a_times_the_inverse_of_c_times_z(momentum: float, lr: float, number: int) -> None:
    n, workload = 20, Workload(momentum, lr)
    strategy = strategies(workload)[number]
    mechanism = Mechanism(workload, strategy, n, 4, 5)
    z = torch.randn(n, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    A, C = dense(workload.coefficients(n)), dense(strategy.coefficients(n))
    memory, streamed = Memory(), []
    for row in z:
        memory = mechanism.step(memory, row)
        assert memory.total is not None
        assert len(memory.past) <= strategy.memory
        streamed.append(memory.total)
    B = A @ np.linalg.inv(C)
    np.testing.assert_allclose(torch.stack(streamed).numpy(), B @ z.numpy(), rtol=0, atol=1e-12 * lr * n**2)
    np.testing.assert_allclose(mechanism.growths, np.linalg.norm(B, axis=1), rtol=1e-10)
    assert mechanism.growth == pytest.approx(np.linalg.norm(B) / math.sqrt(n), rel=1e-10)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_square_root_squared_is_the_workload(momentum: float) -> None:
    c = banded(12, momentum).coefficients(12)
    np.testing.assert_allclose(dense(c) @ dense(c), dense(Workload(momentum).coefficients(12)), rtol=1e-12)
    assert (np.diff(c) <= 0).all()


def test_a_step_writes_to_nothing_that_is_remembered() -> None:
    mechanism = Mechanism(Workload(0.5), banded(3), 9, 3, 3)
    memory = Memory()
    for number in range(4):
        z = torch.full((2,), float(number))
        before = (memory.past, memory.velocity, memory.total)
        copies = [None if each is None else each.clone() for each in (*memory.past, memory.velocity, memory.total)]
        after = mechanism.step(memory, z)
        for old, copy in zip((*before[0], *before[1:]), copies, strict=True):
            assert old is None if copy is None else torch.equal(old, copy)
        assert torch.equal(z, torch.full((2,), float(number)))
        memory = after


def patterns(n: int, separation: int, participations: int) -> list[tuple[int, ...]]:
    """Every set of rounds that a client may take part in."""
    return [
        rounds
        for size in range(1, participations + 1)
        for rounds in itertools.combinations(range(n), size)
        if all(later - earlier >= separation for earlier, later in itertools.pairwise(rounds))
    ]


def brute_force(c: NDArray[np.float64], separation: int, participations: int) -> float:
    C = dense(c)
    return max(float(np.linalg.norm(C[:, list(p)].sum(axis=1))) for p in patterns(len(c), separation, participations))


@pytest.mark.parametrize("n", [1, 5, 12])
@pytest.mark.parametrize("separation", [1, 2, 3, 5])
@pytest.mark.parametrize("participations", [1, 2, 4, 12])
def test_sensitivity_is_that_of_the_worst_pattern(n: int, separation: int, participations: int) -> None:
    for momentum in (0.0, 0.5, 0.9):
        workload = Workload(momentum)
        for strategy in (*strategies(workload), banded(separation, momentum)):
            found = Mechanism(workload, strategy, n, separation, participations).sensitivity
            expected = brute_force(strategy.coefficients(n), separation, participations)
            assert found == pytest.approx(expected, rel=1e-12), strategy


@given(
    coefficients=st.lists(st.floats(0, 3), min_size=1, max_size=9),
    separation=st.integers(1, 4),
    participations=st.integers(1, 9),
)
def test_sensitivity_of_any_diagonals_that_are_not_negative(
    coefficients: list[float], separation: int, participations: int
) -> None:
    found = sensitivity(coefficients, rounds=9, separation=separation, participations=participations)
    padded = np.pad(coefficients, (0, 9 - len(coefficients)))
    assert found == pytest.approx(brute_force(padded, separation, participations), rel=1e-9, abs=1e-150)


def test_no_signs_are_worse_than_all_alike() -> None:
    """A client may send any vector of length 1 in each round. Where C has no negative entry, all the same is worst."""
    C = dense(banded(8).coefficients(8))
    for p in patterns(8, 2, 4):
        lengths = [np.linalg.norm(C[:, list(p)] @ signs) for signs in itertools.product((-1.0, 1.0), repeat=len(p))]
        assert max(lengths) == pytest.approx(np.linalg.norm(C[:, list(p)].sum(axis=1)))


def test_banded_with_bands_up_to_the_separation_has_the_closed_form() -> None:
    c = np.array(banded(10).numerator)
    mechanism = Mechanism(Workload(), banded(10), rounds=150, separation=10, participations=15)
    assert mechanism.sensitivity == pytest.approx(math.sqrt(15) * np.linalg.norm(c), rel=1e-14)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ((150, 10, 15), (111.4, 33.7, 19.5, 13.9)),
        ((600, 10, 60), (859, 134, 81, 52)),
        ((200, 50, 4), (38.7, 20.1, 6.5, 5.4)),
    ],
)
def test_how_good_a_factorisation_is(setting: tuple[int, int, int], expected: tuple[float, ...]) -> None:
    """Sensitivity times the noise on W: white, DP-FedAvg, full and banded square root."""
    n, separation, _ = setting
    kinds = (white(Workload()), independent(), banded(n), banded(separation))
    mechanisms = [Mechanism(Workload(), kind, *setting) for kind in kinds]
    for mechanism, figure in zip(mechanisms, expected, strict=True):
        digits = len(str(figure).partition(".")[2]) if isinstance(figure, float) else 0
        assert mechanism.sensitivity * mechanism.growth == pytest.approx(figure, abs=0.51 * 10**-digits)


@pytest.mark.parametrize(("momentum", "saved"), [(0.5, 0.07), (0.9, 0.14)])
def test_the_root_of_the_momentum_too_saves_noise(momentum: float, saved: float) -> None:
    plain, own = (Mechanism(Workload(momentum), banded(10, m), 150, 10, 15) for m in (0.0, momentum))
    ratio = own.sensitivity * own.growth / (plain.sensitivity * plain.growth)
    assert ratio == pytest.approx(1 - saved, abs=0.01)


def test_a_workload_is_read_off_the_servers_optimiser() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    assert Workload.from_optimizer(optim.fedavg(0.5)(parameters)) == Workload(0.0, 0.5)
    assert Workload.from_optimizer(optim.momentum(0.9)(parameters)) == Workload(0.9, 1.0)


@pytest.mark.parametrize(
    "make",
    [
        optim.adam(),
        partial(torch.optim.SGD, lr=1.0, momentum=0.9, nesterov=True),
        partial(torch.optim.SGD, lr=1.0, weight_decay=0.1),
        partial(torch.optim.SGD, lr=1.0, momentum=0.5, dampening=0.5),
        lambda parameters: torch.optim.SGD([{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:]}], lr=1.0),
        lambda parameters: torch.optim.SGD(
            [{"params": parameters[:1], "momentum": 0.1}, {"params": parameters[1:]}], lr=1.0
        ),
    ],
)
def test_an_optimiser_whose_noise_would_be_another_is_refused(make: optim.ServerOptimizer) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    with pytest.raises(ConfigError, match=r"linear in the updates.*dbcl\.optim\.fedavg or dbcl\.optim\.momentum"):
        Workload.from_optimizer(make(parameters))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Workload(1.0), r"momentum must be in \[0, 1\)"),
        (lambda: Workload(lr=0.0), "lr above 0"),
        (lambda: banded(0), "1 band or more"),
        (lambda: Strategy("own", (0.5,)), "start with 1"),
        (lambda: sensitivity([1.0, -0.5], rounds=4, separation=1, participations=1), "not negative"),
        (lambda: sensitivity([1.0], rounds=4, separation=0, participations=1), "1 or more"),
        (
            lambda: sensitivity([1.0, 0.5] * 20, rounds=60, separation=1, participations=60),
            "too many patterns",
        ),
    ],
)
def test_what_makes_no_mechanism_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match=message):
        make()


def one_by_one(numerator: tuple[float, ...], denominator: tuple[float, ...], n: int) -> list[float]:
    """A quotient of power series by its definition."""
    series: list[float] = []
    for t in range(n):
        known = sum(denominator[j] * series[t - j] for j in range(1, min(t, len(denominator) - 1) + 1))
        series.append((numerator[t] if t < len(numerator) else 0.0) - known)
    return series


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("bands", [1, 2, 10])
def test_a_long_quotient_is_that_of_the_definition(bands: int, momentum: float) -> None:
    denominator = tuple(np.convolve(banded(bands, momentum).numerator, Workload(momentum=momentum).inverse))
    n = 2 * BLOCK + 17
    expected = one_by_one((1.0, 0.25), denominator, n)
    assert quotient((1.0, 0.25), denominator, n) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_columns_that_do_not_overlap_are_added_as_if_they_might() -> None:
    for rounds, separation, participations in ((23, 4, 3), (23, 4, 9), (7, 9, 2), (12, 3, 4)):
        limits = {"rounds": rounds, "separation": separation, "participations": participations}
        c = dense(np.pad([1.0, 0.5, 0.25], (0, rounds))[:rounds])
        starts = range(0, rounds, separation)[:participations]
        expected = np.linalg.norm(sum(c[:, start] for start in starts))
        assert sensitivity([1.0, 0.5, 0.25], **limits) == pytest.approx(expected, rel=1e-12)


def test_a_million_rounds_are_planned_within_seconds() -> None:
    began = time.process_time()
    for rounds in (10**6, 10**6 + 1):
        mechanism = Mechanism(Workload(momentum=0.5), banded(10, 0.5), rounds, separation=10, participations=10**5)
        assert mechanism.growth > 0
        assert mechanism.sensitivity > 0
    assert time.process_time() - began < 5
