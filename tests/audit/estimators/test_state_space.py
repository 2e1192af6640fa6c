"""The attacker's model of a tensor beside the same Gaussian written out in full, and beside the smoother."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import multivariate_normal
from torch import Tensor

from audit.estimators.systems import every, lane_system, median_cosine, system
from dbcl.errors import AuditError
from dbcl_audit.estimators.kalman import Scales
from dbcl_audit.estimators.observations import TensorObservations
from dbcl_audit.estimators.smoother import known_scales, smoother
from dbcl_audit.estimators.state_space import Observation, Posterior, StateSpaceModel

Array = NDArray[np.float64]

ROWS = 2
GAPS = (0, 1, 4, 6, 7)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- the same Gaussian as one matrix --------------------------------------------------------------------------------


@dataclass
class Dense:
    """What was seen, as one Gaussian vector for each row, round by round.

    The unknowns are W_0, the velocity from before, and every round's update; `maps` says how they make each W.
    """

    view: TensorObservations
    veil: Any
    update: Any
    weight: float
    drift: list[Tensor] | None = None
    start: Tensor | None = None
    more: tuple[Observation, ...] = ()

    def __post_init__(self) -> None:
        view, dim, rows = self.view, self.view.dim, len(self.view.seen[0])
        first, last = view.rounds[0], max([view.rounds[-1], *(max(each.shares) for each in self.more)])
        size = np.broadcast_to(np.asarray(self.update), len(view.rounds))
        self.ticks, count = list(range(first, last)), last - first
        unknown = dim * (2 + count)
        self.prior = np.zeros((unknown, unknown))
        self.prior[:dim, :dim] = self.weight**2 * np.eye(dim)
        beta, begun = view.momentum, first > 0
        W, m = np.eye(dim, unknown), beta * np.eye(dim, unknown, dim)  # (dim, unknowns): W^T as rows
        W_known = np.zeros((rows, dim)) if self.start is None else self.start.numpy().copy()
        m_known = np.zeros((rows, dim))
        self.by_round = {first: (W, W_known)}
        for tick in self.ticks:
            t = int(np.searchsorted(view.rounds, tick, side="right")) - 1  # the last seen one
            width = sum(share * sketch.width for sketch, share in view.lanes(t))
            anywhere = size[t] ** 2 * width / dim * np.eye(dim)
            if tick == first and begun:  # rounds like the first one went before, and none of them was seen
                self.prior[dim : 2 * dim, dim : 2 * dim] = anywhere / (1 - beta**2)
            Q = anywhere
            if tick in view.rounds:
                lanes = [(sketch.dense(torch.float64).numpy(), share) for sketch, share in view.lanes(t)]
                Q = size[t] ** 2 * sum(share * R @ R.T for R, share in lanes)
                m_known = m_known + view.own[t].numpy() @ view.sketches[t].dense(torch.float64).numpy().T
            if self.drift is not None:
                m_known = m_known + self.drift[t].numpy()
            here = slice(dim * (2 + tick - first), dim * (3 + tick - first))
            self.prior[here, here] = Q
            m = m + np.eye(dim, unknown, here.start)
            W, W_known = W + view.lr * m, W_known + view.lr * m_known
            self.by_round[tick + 1] = (W, W_known)
            m, m_known = beta * m, beta * m_known
        self._observe()

    def _observe(self) -> None:
        view, maps, left = self.view, [], []
        for t, round in enumerate(view.rounds):
            R = view.sketches[t].dense(torch.float64).numpy()
            maps.append(R.T @ self.by_round[round][0])
            left.append(view.seen[t].numpy() - self.by_round[round][1] @ R)
        for each in self.more:
            maps.append(sum(share * self.by_round[round][0] for round, share in each.shares.items()))
            left.append(
                each.value.numpy() - sum(share * self.by_round[round][1] for round, share in each.shares.items())
            )
        self.H, self.y = np.vstack(maps), np.hstack(left)
        over = np.eye(len(view.rounds)) * self.veil**2 if np.ndim(self.veil) == 0 else np.asarray(self.veil)
        shown = np.hstack([sketch.dense(torch.float64).numpy() for sketch in view.sketches])
        widths = [sketch.width for sketch in view.sketches]
        place = np.repeat(np.arange(len(widths)), widths)
        noise = over[np.ix_(place, place)] * (shown.T @ shown)  # N is over W's entries, and seen through the sketches
        whole = np.zeros((len(self.H), len(self.H)))
        whole[: len(noise), : len(noise)] = noise
        for number, each in enumerate(self.more):
            start = len(noise) + number * view.dim
            whole[start : start + view.dim, start : start + view.dim] = each.noise**2 * np.eye(view.dim)
        self.K = self.H @ self.prior @ self.H.T + whole
        self.e = np.linalg.solve(self.K, self.y.T).T  # (rows, observations)

    def _of_tick(self, tick: int) -> slice:
        place = 2 + self.ticks.index(tick)
        return slice(place * self.view.dim, (place + 1) * self.view.dim)

    def influence(self, tick: int) -> Array:
        found: Array = self.e @ self.H[:, self._of_tick(tick)]
        return found

    def changes(self) -> list[Array]:
        found = []
        for t, (one, other) in enumerate(pairwise(self.view.rounds)):
            total = np.zeros((len(self.y), self.view.dim))
            for tick in range(one, other):
                total += self.influence(tick) @ self.prior[self._of_tick(tick), self._of_tick(tick)]
                total += 0 if self.drift is None else self.drift[t].numpy()
            found.append(self.view.lr * total)
        return found

    def weights(self) -> list[Array]:
        mean = self.e @ self.H @ self.prior
        return [mean @ self.by_round[round][0].T + self.by_round[round][1] for round in self.view.rounds]

    def likelihood(self) -> float:
        """The logarithm of the density of all that was seen."""
        return float(sum(multivariate_normal.logpdf(row, cov=self.K, allow_singular=True) for row in self.y))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "half a veil": {"veil": 0.5},
    "gaps": {"seen": GAPS},
    "a late start with gaps": {"seen": (2, 3, 5, 9, 10)},
    "momentum and the server's step": {"momentum": 0.6, "lr": 0.5},
    "gaps and momentum": {"seen": GAPS, "momentum": 0.6},
    "a late start with gaps and momentum": {"seen": (2, 3, 5, 9, 10), "momentum": 0.6, "lr": 0.5},
    "uneven buckets": {"dim": 7},
    "hashed": {"scheme": "count-hashed-v1"},
    "sampling": {"scheme": "sampling-v1"},
    "identity": {"scheme": "identity-v1"},
    "identity, gaps and momentum": {"scheme": "identity-v1", "seen": GAPS, "momentum": 0.6},
}
LANES: dict[str, dict[str, Any]] = {
    "two parties in two lanes": {"others": (0, 1)},
    "five in two lanes": {"others": (2, 2)},
    "three lanes, one empty": {"others": (1, 1, 0)},
    "two of three lanes pool": {"others": (1, 1, 2), "watched": (0, 2)},
    "all lanes pool, unevenly many others": {"others": (2, 1), "watched": (0, 1)},
}


def made(case: str) -> TensorObservations:
    if case in LANES:
        return lane_system(dim=6, rows=ROWS, rounds=5, update=0.3, veil=0.1, **LANES[case]).view
    return system(
        **{"dim": 6, "width": 3, "rows": ROWS, "seen": every(5), "update": 0.3, "veil": 0.1, **CASES[case]}
    ).view


def correlated(view: TensorObservations) -> Tensor:
    """The covariance of noise that is left from round to round."""
    apart = np.abs(np.subtract.outer(view.rounds, view.rounds))
    return torch.from_numpy(0.3**2 * 0.7**apart)


def known(view: TensorObservations, what: str) -> dict[str, Any]:
    """What an attacker knows, from least to most."""
    rows, dim, last = len(view.seen[0]), view.dim, view.rounds[-1]
    settings: dict[str, Any] = {"veil": 0.25, "update": 0.4, "weight": 0.9}
    if what == "nothing":
        return settings
    settings["update"] = np.linspace(0.2, 0.6, len(view.rounds))
    settings["drift"] = [0.2 * random(rows, dim, seed=90 + t) for t in range(len(view.rounds))]
    if what == "drift":
        return settings
    settings["veil"] = correlated(view)
    if what == "correlated":
        return settings
    settings["start"] = random(rows, dim, seed=80)
    if what == "start":
        return settings | {"weight": 0.0}
    share = dict.fromkeys(range(view.rounds[0], last + 3), 1 / (last + 3 - view.rounds[0]))
    released = Observation({last + 2: 1.0}, random(rows, dim, seed=81), noise=0.2)
    mean = Observation(share, random(rows, dim, seed=82), noise=0.3)
    return settings | {"weight": 0.0 if what == "both" else 0.9, "more": (released, mean)}


MORE = ("nothing", "correlated", "start", "released")


def solved(view: TensorObservations, what: str) -> Posterior:
    return StateSpaceModel(view, **known(view, what)).solve(tolerance=1e-12)


@pytest.mark.parametrize(
    ("case", "what"),
    [
        *((case, what) for case in (*CASES, *LANES) for what in ("drift", "both")),
        *((case, what) for case in ("gaps and momentum", "five in two lanes") for what in MORE),
    ],
)
def test_it_is_the_gaussian_written_out_in_full(case: str, what: str) -> None:
    view = made(case)
    found, exact = solved(view, what), Dense(view, **known(view, what))
    for one, other in ((found.changes(), exact.changes()), (found.weights(), exact.weights())):
        assert max(np.abs(each).max() for each in other) > 0.05
        np.testing.assert_allclose(torch.stack(one).numpy(), np.stack(other), atol=1e-6)
    influences = found.influences()
    np.testing.assert_allclose(
        torch.stack(influences).numpy(), np.stack([exact.influence(t) for t in view.rounds[:-1]]), atol=1e-6
    )
    ends = [*view.rounds, exact.ticks[-1] + 1]
    for index in range(len(influences)):
        here, missed = found.influence(index)
        assert torch.equal(here, influences[index])
        between = sum((exact.influence(tick) for tick in range(ends[index] + 1, ends[index + 1])), np.zeros(here.shape))
        np.testing.assert_allclose(missed.numpy(), between, atol=1e-6)
        assert bool(np.abs(between).max() > 0) == (view.gaps[index] > 1)


@pytest.mark.parametrize("what", ["drift", *MORE, "both"])
@pytest.mark.parametrize("case", ["identity", "identity, gaps and momentum"])
def test_the_information_of_an_unsketched_entry_is_the_covariance_of_its_pulls(case: str, what: str) -> None:
    view = made(case)
    exact = Dense(view, **known(view, what))
    columns = [exact._of_tick(tick).start for tick in exact.ticks]  # the first entry's; all are alike
    H = exact.H[:, columns]
    np.testing.assert_allclose(
        StateSpaceModel(view, **known(view, what)).information, H.T @ np.linalg.solve(exact.K, H), atol=1e-9
    )


@pytest.mark.parametrize("case", ["gaps and momentum", "five in two lanes"])
def test_a_pull_is_the_slope_of_the_likelihood(case: str) -> None:
    """So <d, pull> is what an update d adds to it, to first order: here the drift is moved by a thousandth of d."""
    view = made(case)
    settings, (_, influence, *_) = known(view, "correlated"), solved(view, "correlated").influences()
    direction, ends = random(ROWS, view.dim, seed=3), []
    if view.gaps[1] > 1:  # the drift of a missed round is that of the last one
        influence = influence + solved(view, "correlated").influence(1)[1]
    for step in (1e-3, -1e-3):
        drift = [each + step * direction * (t == 1) for t, each in enumerate(settings["drift"])]
        ends.append(Dense(view, **{**settings, "drift": drift}).likelihood())
    assert (ends[0] - ends[1]) / 2e-3 == pytest.approx(float((direction * influence).sum()), rel=1e-5)


@pytest.mark.parametrize("case", [name for name in (*CASES, *LANES) if name != "a late start with gaps and momentum"])
def test_without_drift_it_is_the_smoother(case: str) -> None:
    view, scales = made(case), Scales(veil=0.25, update=0.4, weight=0.9)
    found = StateSpaceModel(view, veil=scales.veil, update=scales.update, weight=scales.weight).solve(tolerance=1e-12)
    torch.testing.assert_close(torch.stack(found.changes()), torch.stack(smoother(view, scales)), atol=1e-6, rtol=0)
    if not (view.momentum and max(view.gaps) > 1):
        weights = torch.stack(list(smoother(view, scales).weights(view)))
        torch.testing.assert_close(torch.stack(found.weights()), weights, atol=1e-6, rtol=0)


def test_a_client_that_was_only_shown_a_round_has_no_part_in_it() -> None:
    view = made("momentum and the server's step")
    shown = replace(view, own=(view.own[0], torch.zeros_like(view.own[1]), *view.own[2:]))
    found, exact = solved(shown, "drift").changes(), Dense(shown, **known(shown, "drift")).changes()
    np.testing.assert_allclose(torch.stack(found).numpy(), np.stack(exact), atol=1e-6)
    assert not torch.allclose(found[1], solved(view, "drift").changes()[1], atol=1e-3)


# --- what each piece of knowledge is worth --------------------------------------------------------------------------


def test_the_drift_of_a_walk_that_has_one_is_worth_much() -> None:
    """Others who do in every round half of what is expected, and half of it at random, under a strong veil."""
    one = system(dim=40, width=20, rows=12, seen=every(40), update=0.02, veil=0.4)
    expected = 0.02 * random(12, 40, seed=5)
    moved = [t * expected for t in range(40)]
    view = replace(
        one.view,
        seen=tuple(v + s.apply(each) for v, s, each in zip(one.view.seen, one.view.sketches, moved, strict=True)),
    )
    changes = [each + expected for each in one.changes]
    scales = known_scales(view, 0.4)
    named = {"veil": scales.veil, "update": scales.update, "weight": scales.weight}
    without = median_cosine(StateSpaceModel(view, **named).solve().changes(), changes)
    with_drift = median_cosine(StateSpaceModel(view, **named, drift=[expected] * 40).solve().changes(), changes)
    assert with_drift > without + 0.2
    wrong = [0.02 * random(12, 40, seed=6)] * 40
    assert median_cosine(StateSpaceModel(view, **named, drift=wrong).solve().changes(), changes) < with_drift - 0.2


def test_known_ends_show_more_and_wrong_ones_do_not() -> None:
    one = system(dim=40, width=20, rows=12, seen=every(30), update=0.05, veil=0.4)
    last = torch.stack(one.changes).sum(dim=0) + sum(
        sketch.lift(own) for sketch, own in zip(one.view.sketches[:-1], one.view.own[:-1], strict=True)
    )
    start = random(12, 40, seed=0)  # as `system` draws it
    named = {"veil": 0.4, "update": 0.05}
    plain = median_cosine(StateSpaceModel(one.view, **named, weight=1.0).solve().changes(), one.changes)
    begun = median_cosine(StateSpaceModel(one.view, **named, weight=0.0, start=start).solve().changes(), one.changes)
    more = (Observation({29: 1.0}, start + last),)
    both = median_cosine(
        StateSpaceModel(one.view, **named, weight=0.0, start=start, more=more).solve().changes(), one.changes
    )
    assert plain < begun < both
    other = (Observation({29: 1.0}, random(12, 40, seed=9)),)
    wrong = median_cosine(
        StateSpaceModel(one.view, **named, weight=0.0, start=start, more=other).solve().changes(), one.changes
    )
    assert wrong < plain


# --- how it is computed ---------------------------------------------------------------------------------------------


def test_many_columns_under_a_veil_are_solved_in_single_precision_and_others_are_not() -> None:
    view = system(dim=80, width=40, rows=6, seen=every(20), update=0.05, veil=0.2).view
    single = StateSpaceModel(view, veil=0.2, update=0.05, weight=1.0)
    assert (single.dtype, StateSpaceModel(view, veil=1e-6, update=0.005, weight=1.0).dtype) == (
        torch.float32,
        torch.float64,
    )
    found = single.solve(tolerance=1e-6).changes()
    exact = smoother(view, Scales(veil=0.2, update=0.05, weight=1.0))
    assert found[0].dtype == torch.float64
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
    assert 0 < max(errors) < 1e-3


@pytest.mark.parametrize("what", ["nothing", "start", "released", "both"])
def test_it_ends_where_there_is_next_to_no_noise(what: str) -> None:
    """As if there were a tenth of an update of it: then the estimates are those of the smoother, which takes longer."""
    one = system(dim=60, width=30, rows=4, seen=every(60), update=0.01)
    scales, start = Scales(1e-7, 0.01, 1.0), random(4, 60, seed=0)
    put_in = [
        change + s.lift(own) for change, s, own in zip(one.changes, one.view.sketches, one.view.own, strict=False)
    ]
    settings: dict[str, Any] = {"veil": 1e-7, "update": 0.01, "weight": 1.0}
    if what in ("start", "both"):
        settings |= {"weight": 0.0, "start": start}
    if what in ("released", "both"):
        settings["more"] = (Observation({59: 1.0}, start + torch.stack(put_in).sum(dim=0)),)
    old = slice(0, 20)  # with forty rounds after them
    assert median_cosine(smoother(one.view, scales), one.changes, old) > 0.99
    found = StateSpaceModel(one.view, **settings).solve().changes()
    assert median_cosine(found, one.changes, old) > 0.98


def test_rows_are_solved_in_parts_where_there_are_many_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    view = system(dim=6, width=3, rows=7, seen=every(6), update=0.3, veil=0.1, momentum=0.5).view
    model = StateSpaceModel(view, veil=0.25, update=0.4, weight=0.9)
    whole = model.solve(tolerance=1e-12).changes()
    monkeypatch.setattr("dbcl_audit.estimators.state_space.MAX_STACK_VALUES", 6 * 6 * 3)  # three rows
    calls = []
    conjugate = StateSpaceModel._conjugate
    monkeypatch.setattr(StateSpaceModel, "_conjugate", lambda *given: calls.append(1) or conjugate(*given))
    torch.testing.assert_close(torch.stack(model.solve(tolerance=1e-12).changes()), torch.stack(whole))
    assert len(calls) == 3


def test_nothing_to_explain_is_no_error() -> None:
    view = made("plain")
    silent = replace(view, seen=tuple(map(torch.zeros_like, view.seen)), own=tuple(map(torch.zeros_like, view.own)))
    assert not torch.stack(StateSpaceModel(silent, veil=0.1, update=0.1, weight=1.0).solve().changes()).any()


def test_too_little_drift_is_refused() -> None:
    view = made("plain")
    with pytest.raises(AuditError, match="w: 2 rounds of drift, and 5 were seen"):
        StateSpaceModel(view, veil=0.1, update=0.1, weight=1.0, drift=[torch.zeros(ROWS, 6)] * 2)
