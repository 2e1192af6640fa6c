"""The smoothers beside the posterior written out in full, their scales, precision and steps."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from audit.estimators.systems import every, lane_system, median_cosine, system
from dbcl.errors import AuditError
from dbcl_audit.estimators.covariance import ShapedUpdates, WhiteUpdates
from dbcl_audit.estimators.kalman import KalmanSmoother, Scales
from dbcl_audit.estimators.observations import TensorObservations
from dbcl_audit.estimators.smoother import fitted_scales, known_scales, shaped_smoother, smoother

Array = NDArray[np.float64]


# --- the whole posterior, one row or all rows at once ---------------------------------------------------------------


def posterior(
    view: TensorObservations, scales: Scales, *, known_range: bool = True, shape: tuple[Array, Array] | None = None
) -> Array:
    """E[changes | all that was seen] from the joint normal of W_0 and every round's update: (seen - 1, rows, dim).

    Before them comes E[W_0 | ...]. Every round is there on its own, those between two seen ones too. `shape` is (A, C):
    vec(U) ~ N(0, A x C) by rows.
    """
    dim, rows, start = view.dim, len(view.seen[0]), view.rounds[0]
    last = view.rounds[-1] - start
    place = {round - start: k for k, round in enumerate(view.rounds)}
    A, C = shape or (np.eye(rows), np.eye(dim))
    size = rows * dim
    unknown = size * (last + 1)  # W_0, then the updates of rounds 0 to last - 1
    prior = np.zeros((unknown, unknown))
    prior[:size, :size] = scales.weight**2 * np.eye(size)
    # W and m of this round as (matrix on the unknowns, known part)
    W, W_known = np.eye(size, unknown), np.zeros(size)
    m, m_known = np.zeros((size, unknown)), np.zeros(size)
    maps, targets = [], []
    current = view.sketches[0]
    for round in range(last + 1):
        if round in place:
            current = view.sketches[place[round]]
            R = current.dense(torch.float64).numpy()
            see = np.kron(np.eye(rows), R.T)
            maps.append(see @ W)
            targets.append(view.seen[place[round]].numpy().ravel() - see @ W_known)
        if round == last:
            break
        if round in place and known_range:
            Q = np.zeros((dim, dim))
            for sketch, share in view.lanes(place[round]):
                lane = sketch.dense(torch.float64).numpy()
                inner = lane.T @ C @ lane
                Q += share * lane @ (inner / np.diag(inner).mean()) @ lane.T
        else:
            Q = C * current.width / dim
        entries = slice(size * (round + 1), size * (round + 2))
        prior[entries, entries] = scales.update**2 * np.kron(A, Q)
        m, m_known = view.momentum * m, view.momentum * m_known
        m[:, entries] += np.eye(size)
        if round in place:
            m_known = m_known + (view.own[place[round]].numpy() @ R.T).ravel()
        W, W_known = W + view.lr * m, W_known + view.lr * m_known
    H, v = np.vstack(maps), np.concatenate(targets)
    mean = prior @ H.T @ np.linalg.solve(H @ prior @ H.T + scales.veil**2 * np.eye(len(v)), v)
    updates = mean[size:].reshape(last, rows, dim)
    ends = [round - start for round in view.rounds]
    changes = [view.lr * updates[a:b].sum(axis=0) for a, b in pairwise(ends)]
    return np.stack([mean[:size].reshape(rows, dim), *changes])


SMALL: dict[str, dict[str, Any]] = {
    "plain": {},
    "half a veil": {"veil": 0.5},
    "gaps": {"seen": (0, 1, 4, 6, 7)},
    "a late start with gaps": {"seen": (2, 3, 5, 9, 10)},
    "server's step": {"lr": 0.5},
    "momentum": {"momentum": 0.6},
    "momentum and the server's step": {"momentum": 0.6, "lr": 0.5},
    "gaps and momentum": {"seen": (0, 1, 4, 6, 7), "momentum": 0.6},
    "uneven buckets": {"dim": 7},
    "hashed": {"scheme": "count-hashed-v1"},
    "sampling": {"scheme": "sampling-v1"},
    "identity": {"scheme": "identity-v1"},
}


@pytest.mark.parametrize("known_range", [True, False])
@pytest.mark.parametrize("case", SMALL)
def test_the_smoother_is_the_posterior_mean(case: str, known_range: bool) -> None:
    made = system(**{"dim": 6, "width": 3, "rows": 2, "seen": every(5), "update": 0.3, "veil": 0.1, **SMALL[case]})
    scales = Scales(veil=0.2, update=0.4, weight=0.9)
    found = torch.stack(smoother(made.view, scales, known_range=known_range)).numpy()
    exact = posterior(made.view, scales, known_range=known_range)[1:]
    assert np.abs(exact).max() > 0.05
    np.testing.assert_allclose(found, exact, atol=1e-6)


LANES: dict[str, dict[str, Any]] = {
    "two parties": {"others": (0, 1)},
    "five": {"others": (2, 2)},
    "uneven buckets": {"others": (1, 2), "dim": 7, "width": 3},
    "one of three": {"others": (1, 1, 0)},
    "two of three pool": {"others": (1, 1, 2), "watched": (0, 2)},
    "all pool": {"others": (1, 1), "watched": (0, 1)},
    "all pool, unevenly many others": {"others": (2, 1), "watched": (0, 1)},
    "all pool uneven buckets": {"others": (1, 1), "watched": (0, 1), "dim": 7, "width": 3},
}


@pytest.mark.parametrize("shaped", [False, True])
@pytest.mark.parametrize("case", LANES)
def test_with_lanes_it_is_the_posterior_mean_too_and_so_are_the_weights(case: str, shaped: bool) -> None:
    view = lane_system(**{"dim": 6, "rows": 2, "rounds": 5, "update": 0.3, "veil": 0.1, **LANES[case]}).view
    scales = Scales(veil=0.2, update=0.4, weight=0.9)
    C = np.eye(view.dim) + 0.3 * shaped
    updates = ShapedUpdates(view, scales.update, torch.from_numpy(C)) if shaped else WhiteUpdates(view, scales.update)
    exact = posterior(view, scales, shape=(np.eye(2), C))
    for found in (KalmanSmoother(view, scales, updates).smooth(), *([] if shaped else [smoother(view, scales)])):
        np.testing.assert_allclose(torch.stack(found).numpy(), exact[1:], atol=1e-6)
        lifted = [sketch.lift(own).numpy() for sketch, own in zip(view.sketches, view.own, strict=True)][:-1]
        weights = np.cumsum([exact[0], *(exact[1:] + lifted)], axis=0)
        np.testing.assert_allclose(torch.stack(list(found.weights(view))).numpy(), weights, atol=1e-6)


def test_with_momentum_the_weights_follow_from_the_changes_where_no_round_was_missed() -> None:
    made = system(dim=24, width=12, rows=8, seen=every(60), momentum=0.5)
    found = smoother(made.view, known_scales(made.view, 0.0))
    for t, W in list(enumerate(found.weights(made.view)))[:20]:
        assert float((made.view.sketches[t].apply(W) - made.view.seen[t]).norm()) < 1e-3
    gaps = system(dim=6, width=3, rows=2, seen=(0, 1, 4, 6), momentum=0.5).view
    with pytest.raises(AuditError, match="only where no round was missed"):
        list(smoother(gaps, Scales(0.1, 0.1, 1.0)).weights(gaps))


@pytest.mark.parametrize("segment", [1, 2, 5, 16, 100])
def test_it_is_so_where_covariances_are_computed_again_in_segments(segment: int) -> None:
    scales = Scales(veil=0.2, update=0.3, weight=1.0)
    view = system(dim=6, width=3, rows=1, seen=every(35), update=0.3, veil=0.2, momentum=0.4).view
    found = KalmanSmoother(view, scales, WhiteUpdates(view, scales.update), segment=segment).smooth()
    np.testing.assert_allclose(torch.stack(found).numpy(), posterior(view, scales)[1:], atol=1e-6)


@pytest.mark.parametrize("strip", [1, 4, 5, 12])
def test_it_is_so_where_covariances_are_updated_in_strips(strip: int) -> None:
    scales = Scales(veil=0.2, update=0.3, weight=1.0)
    view = system(dim=6, width=3, rows=1, seen=every(8), update=0.3, veil=0.2, momentum=0.4).view
    found = KalmanSmoother(view, scales, WhiteUpdates(view, scales.update), strip=strip).smooth()
    np.testing.assert_allclose(torch.stack(found).numpy(), posterior(view, scales)[1:], atol=1e-6)


def test_the_shaped_smoother_is_the_posterior_mean_under_the_shape_of_the_clients_own_updates() -> None:
    made = system(dim=6, width=3, rows=3, seen=(0, 1, 2, 4, 5), update=0.3, veil=0.2)
    view, scales = made.view, Scales(veil=0.2, update=0.3, weight=1.0)
    own = [u.numpy() for u in view.own]
    lifted = [u @ s.dense(torch.float64).numpy().T for u, s in zip(own, view.sketches, strict=True)]

    def pulled(matrix: Array) -> Array:  # mean variance 1, a tenth of the identity
        return 0.9 * matrix / np.diag(matrix).mean() + 0.1 * np.eye(len(matrix))

    shape = pulled(sum(u @ u.T for u in own)), pulled(sum(u.T @ u for u in lifted))
    found = torch.stack(shaped_smoother(view, scales, groups=3)).numpy()
    np.testing.assert_allclose(found, posterior(view, scales, shape=shape)[1:], atol=1e-6)
    white = torch.stack(smoother(view, scales)).numpy()
    assert np.abs(found - white).max() > 1e-2


def test_where_updates_have_a_strong_shape_the_shaped_smoother_sees_more() -> None:
    direction = torch.randn(24, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    columns = direction @ direction.T / 24 + 0.02 * torch.eye(24, dtype=torch.float64)
    made = system(dim=24, width=12, rows=16, seen=every(40), update=0.05, veil=0.2, columns=columns)
    scales = known_scales(made.view, 0.2)
    white = median_cosine(smoother(made.view, scales), made.changes)
    shaped = median_cosine(shaped_smoother(made.view, scales), made.changes)
    assert shaped > white + 0.1


# --- sizes, precision, progress -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("veil", "update", "dim"),
    [
        (0.2, 0.1, 24),
        (0.05, 0.05, 24),
        (0.3, 0.3, 24),
        (0.05, 0.05, 25),
        pytest.param(0.2, 0.1, 25, marks=pytest.mark.slow),
        pytest.param(0.3, 0.3, 25, marks=pytest.mark.slow),
    ],
)
def test_fitted_scales_are_near_those_that_nobody_told(veil: float, update: float, dim: int) -> None:
    made = system(dim=dim, width=12, rows=32, seen=every(24), update=update, veil=veil)
    found = fitted_scales(made.view, Scales(veil=3 * veil, update=update / 3, weight=1.0))
    assert veil / 1.5 < found.veil < veil * 1.5
    assert update / 1.5 < found.update < update * 1.5
    assert found.weight == 1.0


def test_known_scales_are_right_where_the_others_updates_are_like_the_clients_own() -> None:
    made = system(dim=40, width=20, rows=40, seen=every(20), update=0.02, veil=0.3, weight=1.0)
    scales = known_scales(made.view, 0.3)
    assert scales.veil == pytest.approx(0.3, rel=0.1)
    assert scales.update == pytest.approx(0.02, rel=0.1)
    assert scales.weight == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_single_precision_gives_the_same_answer(momentum: float) -> None:
    view = system(dim=40, width=20, rows=12, seen=every(40), update=0.05, veil=0.1, momentum=momentum).view

    def smooth(scales: Scales, single_above: int) -> list[Tensor]:
        return KalmanSmoother(view, scales, WhiteUpdates(view, scales.update), single_above=single_above).smooth()

    scales = Scales(veil=0.1, update=0.05, weight=1.0)
    exact, single = smooth(scales, 1024), smooth(scales, 16)
    assert single[0].dtype == torch.float64
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(single, exact, strict=True)]
    assert 0 < max(errors) < 1e-3
    tiny = Scales(veil=1e-6, update=0.05, weight=1.0)  # without a veil it stays in double precision
    assert all(torch.equal(a, b) for a, b in zip(smooth(tiny, 16), smooth(tiny, 1024), strict=True))


def test_progress_goes_from_the_first_round_forward_and_back_again() -> None:
    made = system(dim=6, width=3, rows=1, seen=every(20), veil=0.1)
    steps: list[tuple[int, int]] = []
    smoother(made.view, Scales(0.1, 0.01, 1.0), on_step=lambda done, total: steps.append((done, total)))
    assert steps == [(done, 40) for done in range(1, 41)]


def test_parts_of_a_view() -> None:
    made = system(dim=6, width=3, rows=4, seen=(0, 2, 3, 5))
    part = made.view.first(2).rows(slice(1, 3))
    assert (part.rounds, part.gaps) == ((0, 2), (2, 1))
    assert [v.shape for v in (*part.seen, *part.own)] == [(2, 3)] * 4
    assert torch.equal(part.seen[1], made.view.seen[1][1:3])
