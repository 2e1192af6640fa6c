"""A canary client against the guarantee: the best test for its participation does as well as mu says, and no better.

The canary sends an update of norm `clip` whenever it may take part. Every coordinate of the model is a run of its own,
so that one pass through the real noise mechanism, tracker and optimiser plays thousands of runs. The adversary knows
everything but the noise and whether the canary was there, and applies the matched filter, whitened with the noise that
it measures where the canary is absent. Its AUC is Phi(mu / sqrt 2) where the mechanism is what it claims to be.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dbcl import optim, seeds
from dbcl.privacy import (
    CorrelatedNoise,
    Mechanism,
    ParticipationTracker,
    Strategy,
    Workload,
    banded,
    clip_factor,
    share,
)
from dbcl.sketch import CountSketch

RUNS = 20_000
CLIP, COHORT, SEPARATION, TURNS, ROUNDS = 0.5, 10, 3, 4, 15
Vector = NDArray[np.float64]


def mechanism(strategy: Strategy, momentum: float = 0.0) -> Mechanism:
    return Mechanism(Workload(momentum), strategy, ROUNDS, SEPARATION, TURNS)


@dataclass(frozen=True)
class Parts:
    """What the guarantee rests on; a mutant replaces one of them."""

    tracker: Callable[[], ParticipationTracker] = lambda: ParticipationTracker(
        rounds=ROUNDS, separation=SEPARATION, participations=TURNS, clients=9
    )
    share: Callable[[float], float] = lambda weight: share(weight, weight_cap=60, per_round=COHORT)
    factor: Callable[[float], float] = lambda length: clip_factor(length, CLIP)
    veil: Callable[[Mechanism, float], CorrelatedNoise] = CorrelatedNoise


def play(own: Mechanism, sigma: float, parts: Parts, world: int, *, canary: bool, runs: int = RUNS) -> Vector:
    """What everybody sees, round by round and of the released model: W_t + N_t for t from 0 to n. (n + 1, runs)"""
    layer = nn.Linear(runs, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(layer.weight, 0.1)
    optimizer = optim.momentum(own.workload.momentum, own.workload.lr)(layer.parameters())
    tracker, veil, seen = parts.tracker(), parts.veil(own, sigma), []
    for round in range(own.rounds + 1):
        veil.begin(round, seeds.derive(bytes(32), "canary", world, round), layer)
        seen.append((layer.weight.detach() + veil.noise(round, "weight", (1, runs))).flatten().numpy())
        veil.end(round)
        if round == own.rounds:
            break
        update = torch.zeros(1, runs, dtype=torch.float64)
        if tracker.refusal(round, "canary") is None:
            tracker.use(round, ["canary"])
            sent = 3 * CLIP  # longer than it may be, and with twice the weight that counts
            update += canary * sent * parts.factor(sent) * parts.share(120)
        layer.weight.grad = -update
        optimizer.step()
    return np.stack(seen)


def auc(present: Vector, absent: Vector) -> tuple[float, float]:
    """The area under the curve, and its standard error (DeLong)."""
    won = np.searchsorted(np.sort(absent), present) / len(absent)
    lost = np.searchsorted(np.sort(present), absent) / len(present)
    return float(won.mean()), math.sqrt(won.var() / len(won) + lost.var() / len(lost))


def matched_filter(present: Vector, absent: Vector, difference: Vector) -> tuple[float, float]:
    """The AUC of the best linear test for a known difference: features x runs."""
    centred = absent - absent.mean(axis=1, keepdims=True)
    covariance = centred @ centred.T / centred.shape[1]
    weights = np.linalg.lstsq(covariance + 1e-12 * np.trace(covariance) * np.eye(len(covariance)), difference)[0]
    return auc(weights @ present, weights @ absent)


def measured(own: Mechanism, sigma: float, parts: Parts) -> tuple[float, float]:
    present, absent = (play(own, sigma, parts, world, canary=canary) for world, canary in ((1, True), (2, False)))
    quiet = [play(own, 1e-12, parts, 0, canary=canary, runs=1) for canary in (True, False)]
    return matched_filter(present, absent, (quiet[0] - quiet[1])[:, 0])


def claimed(mu: float) -> float:
    """Phi(mu / sqrt 2)."""
    return 0.5 * math.erfc(-mu / 2)


@pytest.mark.parametrize("mu", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    "own",
    [
        mechanism(banded(SEPARATION)),
        mechanism(banded(SEPARATION, 0.5), 0.5),
    ],
    ids=["banded", "banded-momentum"],
)
def test_the_canary_is_found_as_often_as_mu_says(own: Mechanism, mu: float) -> None:
    """From both sides: more would break the guarantee, less would be noise for nothing."""
    sigma = own.mu(sigma=mu, clip=CLIP, per_round=COHORT)
    found, error = measured(own, sigma, Parts())
    assert own.mu(sigma=sigma, clip=CLIP, per_round=COHORT) == pytest.approx(mu)
    assert abs(found - claimed(mu)) < 3 * error
    assert error < 0.003


class Replayed(CorrelatedNoise):
    """z of the first two rounds, again and again."""

    first: bytes | None = None

    def _drawn(self, key: bytes, round: int, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        self.first = self.first or key
        return super()._drawn(self.first, round % 2, name, shape, device)


class White(CorrelatedNoise):
    """The noise of every round by itself, in the size that is meant for correlated noise."""

    def noise(self, round: int, name: str, shape: tuple[int, ...]) -> Tensor:
        begun = self._opened(round)
        return self._drawn(begun.key, round, name, shape, begun.devices[name])


class Late(CorrelatedNoise):
    """The noise of a round comes one round late."""

    def noise(self, round: int, name: str, shape: tuple[int, ...]) -> Tensor:
        now = super().noise(round, name, shape)
        before = self._memory[name].total if name in self._memory else None
        return torch.zeros_like(now) if before is None else before


MUTANTS = {
    "a separation that is one too short": {
        "tracker": lambda: ParticipationTracker(
            rounds=ROUNDS, separation=SEPARATION - 1, participations=TURNS, clients=9
        )
    },
    "one turn too many": {
        "tracker": lambda: ParticipationTracker(
            rounds=ROUNDS, separation=SEPARATION, participations=TURNS + 1, clients=9
        )
    },
    "weights without a cap": {"share": lambda weight: weight / 60 / COHORT},
    "divided by who answered": {"share": lambda weight: min(weight / 60, 1) / (COHORT - 2)},
    "no clip": {"factor": lambda length: 1.0},
    "z replayed": {"veil": Replayed},
    "white noise": {"veil": White},
    "noise that comes a round late": {"veil": Late},
    "half the noise": {"veil": lambda own, sigma: CorrelatedNoise(own, sigma / 2)},
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_canary_finds_every_mutant(mutant: str) -> None:
    own = mechanism(banded(SEPARATION))
    sigma = own.mu(sigma=1.0, clip=CLIP, per_round=COHORT)
    found, error = measured(own, sigma, replace(Parts(), **MUTANTS[mutant]))
    assert found > claimed(1.0) + 6 * error


DIM, WIDTH, ROWS = 6, 3, 4_000


def sketched_play(own: Mechanism, sigma: float, world: int, *, canary: bool, rows: int, sketched_noise: bool) -> Vector:
    """What is seen through a new sketch in every round: (W_t + N_t) R_t. (rounds * width, rows)

    The canary's update is in V's space, and lifted. The mutant draws its noise there, too.
    """
    veil, layer = CorrelatedNoise(own, sigma), nn.Linear(DIM, rows, bias=False, dtype=torch.float64)
    W, seen = torch.full((rows, DIM), 0.1, dtype=torch.float64), []
    tracker = Parts().tracker()
    for round in range(own.rounds + 1):
        sketch = CountSketch(DIM, WIDTH, seed=bytes(32), round=round)
        veil.begin(round, seeds.derive(bytes(32), "sketched", world, round), layer)
        if sketched_noise:
            seen.append(sketch.apply(W) + veil.noise(round, "weight", (rows, WIDTH)))
        else:
            seen.append(sketch.apply(W + veil.noise(round, "weight", (rows, DIM))))
        veil.end(round)
        if canary and tracker.refusal(round, "canary") is None:
            tracker.use(round, ["canary"])
            sent = torch.zeros(rows, WIDTH, dtype=torch.float64)
            sent[:, 0] = CLIP / COHORT
            W = W + sketch.lift(sent)
    return torch.cat(seen, dim=1).T.numpy()


def sketched_canary(*, sketched_noise: bool) -> tuple[float, float]:
    own = mechanism(banded(SEPARATION))
    sigma = own.mu(sigma=1.0, clip=CLIP, per_round=COHORT)
    worlds = [
        sketched_play(own, sigma, world, canary=canary, rows=ROWS, sketched_noise=sketched_noise)
        for world, canary in ((1, True), (2, False))
    ]
    quiet = [sketched_play(own, 1e-12, 0, canary=each, rows=1, sketched_noise=sketched_noise) for each in (True, False)]
    return matched_filter(worlds[0], worlds[1], (quiet[0] - quiet[1])[:, 0])


def test_behind_sketches_the_canary_is_found_no_more_often_than_mu_says() -> None:
    found, error = sketched_canary(sketched_noise=False)
    assert 0.55 < found < claimed(1.0) + 3 * error


def test_noise_in_the_sketched_space_would_show_the_canary() -> None:
    """Sketched coordinates mean something else in every round: their noise must not be correlated."""
    found, error = sketched_canary(sketched_noise=True)
    assert found > claimed(1.0) + 6 * error
