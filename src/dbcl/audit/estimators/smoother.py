"""What a client can work out about the others' updates from what it received: the paper's estimators, and better ones.

A client knows every sketch R_t and its own part of every update. With W's rows as unknown states it sees

    V_t = W_t R_t + tau Z_t            W_(t+1) = W_t + (own part) + U_t R_t^T

and estimates U_t. All estimators give the change of W from one seen round to the next *without* the client's own part,
since that part is no secret to it. Rows of W obey the same equations independently, so one covariance serves all.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from dbcl.errors import AuditError
from dbcl.sketch import Identity, Sketch
from dbcl.sketch.buckets import BucketSketch
from dbcl.transcripts import Transcript

SEGMENT = 16
"""The smoother keeps its covariance every so many rounds and computes the ones between again on its way back."""
SINGLE = 1024
"""Layers with more inputs than this are smoothed in single precision, if there is a veil."""
STRIP = 384
"""The covariance is updated in strips of so many columns."""
Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class View:
    """One tensor over all rounds that a client saw, as matrices; `own` is its own part of each update, in V's space.

    `gaps` says how many rounds lie from each seen round to the next.
    """

    name: str
    rounds: tuple[int, ...]
    gaps: tuple[int, ...]
    sketches: tuple[Sketch, ...]
    seen: tuple[Tensor, ...]  # (rows, width) each
    own: tuple[Tensor, ...]
    momentum: float = 0.0
    lr: float = 1.0

    @property
    def dim(self) -> int:
        return self.sketches[0].dim

    def rows(self, which: slice | Tensor) -> "View":
        """The same view of some rows only."""
        return replace(self, seen=tuple(v[which] for v in self.seen), own=tuple(u[which] for u in self.own))

    def first(self, count: int) -> "View":
        """The same view of the first rounds only."""
        parts = ("rounds", "gaps", "sketches", "seen", "own")
        return replace(self, **{part: getattr(self, part)[:count] for part in parts})


def views(transcript: Transcript, names: Sequence[str] | None = None) -> dict[str, View]:
    """Gather what a client saw, tensor by tensor. Its share of an average is taken to be one part in all chosen."""
    if transcript.client is None:
        raise AuditError(f"{transcript.party}: updates are estimated from a client's seat; the server knows them")
    if len(transcript) < 3:
        raise AuditError(f"{transcript.party} saw {len(transcript)} rounds; estimating takes 3 or more")
    setting, client = transcript.setting, transcript.client
    if setting.optimizer == "adam":
        raise AuditError(
            "the server's optimiser is Adam: its steps are no sums of updates, and no attack here undoes it"
        )
    gathered: dict[str, list[tuple[Sketch, Tensor, Tensor]]] = {}
    for each in transcript:
        sketches = each.broadcast.sketches()
        for name, tensor in each.broadcast.tensors.items():
            if names is None or name in names:
                own = each.updates[client].tensors[name] / setting.cohort
                seen = tensor.double()
                matrix = seen.reshape(len(seen), -1) if seen.ndim > 1 else seen.reshape(1, -1)
                sketch = sketches.get(name) or Identity(matrix.shape[1])
                gathered.setdefault(name, []).append((sketch, matrix, own.double().reshape(matrix.shape)))
    rounds = tuple(transcript.rounds)
    gaps = (*(int(gap) for gap in np.diff(rounds)), 1)
    found = {}
    for name, entries in gathered.items():
        maps, matrices, parts = zip(*entries, strict=True)
        found[name] = View(name, rounds, gaps, maps, matrices, parts, setting.momentum, setting.server_lr)
    return found


def option_1(view: View) -> Iterator[Tensor]:
    """The paper's first estimate of a change: the difference of two effective weights, V_new D R^T - V_old D R^T."""
    return _difference(view, lambda sketch, seen: sketch.expand(seen))


def option_2(view: View) -> Iterator[Tensor]:
    """The paper's second estimate: the same without the gain, V_new R^T - V_old R^T."""
    return _difference(view, lambda sketch, seen: sketch.lift(seen))


def _difference(view: View, back: Callable[[Sketch, Tensor], Tensor]) -> Iterator[Tensor]:
    for t in range(len(view.rounds) - 1):
        new, old = (back(view.sketches[k], view.seen[k]) for k in (t + 1, t))
        yield new - old - view.lr * view.sketches[t].lift(view.own[t])


def rewind(view: View) -> list[Tensor]:
    """Go backward from a guess: W_t = W_(t+1) + (V_t - W_(t+1) R_t) R_t^T, exact after enough rounds with no veil.

    Outside the range of R_t nothing changed in round t, so there W_t is W_(t+1); inside it V_t says what it was.
    """
    weights = view.sketches[-1].expand(view.seen[-1])
    changes = []
    for t in range(len(view.rounds) - 2, -1, -1):
        sketch = view.sketches[t]
        moved = sketch.apply(weights) - view.seen[t]
        changes.append(sketch.lift(moved - view.lr * view.own[t]))
        weights = weights - sketch.lift(moved)
    return changes[::-1]


@dataclass(frozen=True)
class Noise:
    """The sizes that the smoother believes in: of the veil, of an entry of an update, and of an entry of W.

    >>> Noise(veil=0.1, update=0.01, weight=1.0).veil
    0.1
    """

    veil: float
    update: float
    weight: float


def believed(view: View, rho: float) -> Noise:
    """What an attacker believes who knows the veil's relative size: the rest follows from what it sees and sends."""
    size = _rms(view.seen)
    weight = size / (1 + rho**2) ** 0.5
    return Noise(max(rho * weight, 1e-7 * size), max(_rms(view.own), 1e-9 * size), weight)


def fitted(view: View, start: Noise, *, rounds: int = 24, rows: int = 64, steps: int = 40) -> Noise:
    """The sizes under which the first rounds are likeliest: for an attacker who knows none of them."""
    few = view.first(rounds).rows(slice(0, rows))

    def unlikely(logs: NDArray[np.float64]) -> float:
        veil, update = np.exp(logs)
        return -_Filter(few, Noise(veil, update, start.weight), _White(few, update)).likelihood()

    best = minimize(unlikely, np.log([start.veil, start.update]), method="Nelder-Mead", options={"maxfev": steps})
    veil, update = np.exp(best.x)
    return Noise(float(veil), float(update), start.weight)


def smoother(view: View, noise: Noise, *, known_range: bool = True, progress: Progress | None = None) -> list[Tensor]:
    """The best linear estimate of every change given all rounds: a Kalman filter and a backward pass.

    Updates are taken to be white with the variance `noise.update`^2 in V's space, in the range of R_t; or, without
    `known_range`, anywhere.
    """
    if all(isinstance(sketch, Identity) for sketch in view.sketches):
        shape = view.seen[0].shape
        entries = replace(  # every entry is a walk of its own
            view,
            sketches=(Identity(1),) * len(view.sketches),
            seen=tuple(v.reshape(-1, 1) for v in view.seen),
            own=tuple(u.reshape(-1, 1) for u in view.own),
        )
        return [change.reshape(shape) for change in _Filter(entries, noise, _White(entries, noise.update)).smooth()]
    return _Filter(view, noise, _White(view, noise.update, known_range=known_range), progress).smooth()


def shaped_smoother(view: View, noise: Noise, *, groups: int = 4, progress: Progress | None = None) -> list[Tensor]:
    """The smoother with updates shaped by rows and columns as the client's own are: vec(U) ~ N(0, A x C).

    Turned into the eigenvectors of A, rows are independent again, with variances that are A's eigenvalues: the veil is
    white and does not notice. Rows of similar variance share a filter.
    """
    lifted = [sketch.lift(own) for sketch, own in zip(view.sketches, view.own, strict=True)]
    columns = sum((each.T @ each for each in lifted), torch.zeros(view.dim, view.dim, dtype=torch.float64))
    rows = sum(
        (each @ each.T for each in view.own), torch.zeros(len(view.own[0]), len(view.own[0]), dtype=torch.float64)
    )
    columns, rows = _shrunk(columns), _shrunk(rows)
    sizes, axes = torch.linalg.eigh(rows)
    turned = replace(view, seen=tuple(axes.T @ v for v in view.seen), own=tuple(axes.T @ u for u in view.own))
    changes = [torch.zeros(len(axes), view.dim, dtype=torch.float64) for _ in view.rounds[:-1]]
    parts = torch.tensor_split(torch.arange(len(axes)), min(groups, len(axes)))
    for number, part in enumerate(parts):
        size = float(sizes[part].mean())
        some = _Filter(turned.rows(part), noise, _Shaped(view, noise.update * size**0.5, columns)).smooth()
        for change, found in zip(changes, some, strict=True):
            change[part] = found
        if progress is not None:
            progress(number + 1, len(parts))
    return [axes @ change for change in changes]


class _White:
    """Unknown updates that are white in the range of R_t, variance R R^T, and in missed rounds white everywhere."""

    def __init__(self, view: View, update: float, *, known_range: bool = True) -> None:
        self.view, self.variance, self.known_range = view, update**2, known_range

    def everywhere(self, t: int) -> float:
        """The variance of one missed round's update: as large as another's, in a range that nobody told."""
        return self.variance * self.view.sketches[t].width / self.view.dim

    def add(self, t: int, spread: Tensor, factor: float) -> None:
        """Add the covariance of a seen round's update to another."""
        if not self.known_range:
            return self.add_missed(t, spread, factor)
        for rows, columns, values in _range(self.view.sketches[t], spread):
            spread[rows, columns] += factor * self.variance * values
        return None

    def add_missed(self, t: int, spread: Tensor, factor: float) -> None:
        """Add the covariance of one missed round's update after the t-th seen one."""
        spread.diagonal().add_(factor * self.everywhere(t))

    def times(self, t: int, x: Tensor) -> Tensor:
        """x times the covariance of a seen round's update."""
        if not self.known_range:
            return self.times_missed(t, x)
        return self.variance * self.view.sketches[t].lift(self.view.sketches[t].apply(x))

    def times_missed(self, t: int, x: Tensor) -> Tensor:
        """x times the covariance of a missed round's update."""
        return self.everywhere(t) * x


class _Shaped(_White):
    """Updates whose columns vary together as a matrix C over W's columns says, seen through R_t."""

    def __init__(self, view: View, update: float, columns: Tensor) -> None:
        super().__init__(view, update)
        self.columns = columns

    def _dense(self, t: int) -> Tensor:
        sketch = self.view.sketches[t]
        compact = sketch.apply(sketch.apply(self.columns).T)
        return self.variance / compact.diagonal().mean() * sketch.lift(sketch.lift(compact).T)

    def add(self, t: int, spread: Tensor, factor: float) -> None:
        spread.add_(self._dense(t).to(spread), alpha=factor)

    def add_missed(self, t: int, spread: Tensor, factor: float) -> None:
        spread.add_(self.columns.to(spread), alpha=factor * self.everywhere(t))

    def times(self, t: int, x: Tensor) -> Tensor:
        return x @ self._dense(t).to(x)

    def times_missed(self, t: int, x: Tensor) -> Tensor:
        return self.everywhere(t) * (x @ self.columns.to(x))


def _range(sketch: Sketch, like: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The entries of R R^T, which joins the inputs of one bucket: (rows, columns, values), no place twice."""
    if not isinstance(sketch, BucketSketch):
        every = torch.arange(sketch.dim)
        yield every, every, like.new_ones(sketch.dim)
        return
    tables = sketch.tables(like)
    pairs = list(zip(tables.layers, tables.apply_weights, strict=True))
    for one, weight in pairs:
        for other, factor in pairs:
            count = min(len(one), len(other))
            yield one[:count], other[:count], weight[:count] * factor[:count]


def _down(sketch: Sketch, matrix: Tensor) -> Tensor:  # (dim, n) -> (width, n)
    """R^T M by whole rows of memory."""
    if not isinstance(sketch, BucketSketch):
        return matrix.clone()
    tables = sketch.tables(matrix)
    out = matrix.index_select(0, tables.layers[0]).mul_(tables.apply_weights[0][:, None])
    for layer, weight in zip(tables.layers[1:], tables.apply_weights[1:], strict=True):
        out[: len(layer)].addcmul_(matrix.index_select(0, layer), weight[:, None])
    return out


class _Filter:
    """A Kalman filter over the seen rounds for all rows at once, and the disturbance smoother behind it.

    With momentum m on the server the state is (W, m): m' = beta m + u, W' = W + lr m'. The covariance P is that of one
    row's state. G = P Z^T with Z = (R^T, 0), F = Z G + tau^2 I, and e = v F^-1 for the surprise v = V - W R.
    """

    def __init__(self, view: View, noise: Noise, changes: _White, progress: Progress | None = None) -> None:
        # Where the veil is not tiny, single precision is as exact as the noise allows, and fast.
        single = view.dim > SINGLE and noise.veil > 1e-3 * noise.weight
        self.dtype = torch.float32 if single else torch.float64
        self.view, self.noise, self.changes, self.progress = view, noise, changes, progress
        beta, lr = view.momentum, view.lr
        self.blocks = 2 if beta else 1
        self.step = torch.tensor([[1.0, lr * beta], [0.0, beta]], dtype=self.dtype)[: self.blocks, : self.blocks]
        self.enter = torch.tensor([lr, 1.0], dtype=self.dtype)[: self.blocks]
        self.total = len(view.rounds)

    def likelihood(self) -> float:
        """The log-likelihood of all that was seen, up to a constant."""
        total = 0.0
        state, spread = self._start()
        for t in range(self.total):
            gain, factor = self._gain(t, spread)
            surprise = self._surprise(t, state)
            scaled = torch.linalg.solve_triangular(factor, surprise.T, upper=False)
            total -= len(surprise) * float(factor.diagonal().log().sum()) + 0.5 * float(scaled.square().sum())
            state, spread = self._forward(t, state, spread, gain, factor, torch.cholesky_solve(surprise.T, factor).T)
        return total

    def smooth(self) -> list[Tensor]:
        """The expected change of W from each seen round to the next, less the client's own part."""
        kept: dict[int, Tensor] = {}
        errors = []
        state, spread = self._start()
        for t in range(self.total):
            if t % SEGMENT == 0:
                kept[t] = spread.clone()
            gain, factor = self._gain(t, spread)
            errors.append(torch.cholesky_solve(self._surprise(t, state).T, factor).T)
            state, spread = self._forward(t, state, spread, gain, factor, errors[-1])
            self._tell(t + 1)
        found: list[Tensor] = []
        r = torch.zeros_like(state)
        for start in sorted(kept, reverse=True):
            steps = list(self._again(kept[start], start, min(start + SEGMENT, self.total)))
            for t, gain, factor in reversed(steps):
                change = torch.zeros(len(r), self.view.dim, dtype=self.dtype)
                for _ in range(self.view.gaps[t] - 1):
                    change += self.changes.times_missed(t, self._pull(r))
                    r = self._transposed_step(r)
                if t < self.total - 1:
                    found.append((self.view.lr * (change + self.changes.times(t, self._pull(r)))).double())
                back = self._transposed_step(r)
                lifted = self.view.sketches[t].lift(errors[t] - torch.cholesky_solve((back @ gain).T, factor).T)
                back.reshape(len(r), self.blocks, -1)[:, 0] += lifted
                r = back
                self._tell(2 * self.total - t)
        return found[::-1]

    def _start(self) -> tuple[Tensor, Tensor]:
        dim = self.view.dim
        state = torch.zeros(len(self.view.seen[0]), self.blocks * dim, dtype=self.dtype)
        spread = torch.zeros(self.blocks * dim, self.blocks * dim, dtype=self.dtype)
        spread[:dim, :dim].diagonal().fill_(self.noise.weight**2)
        return state, spread

    def _gain(self, t: int, spread: Tensor) -> tuple[Tensor, Tensor]:
        sketch = self.view.sketches[t]
        gain = _down(sketch, spread[: sketch.dim]).T  # (blocks * dim, width): P is symmetric
        inner = _down(sketch, gain[: sketch.dim].contiguous())
        inner.diagonal().add_(self.noise.veil**2)
        factor, failed = torch.linalg.cholesky_ex(inner)
        if failed:
            inner.diagonal().add_(1e-9 * float(inner.diagonal().mean()))
            factor = torch.linalg.cholesky(inner)
        return gain, factor

    def _surprise(self, t: int, state: Tensor) -> Tensor:
        sketch = self.view.sketches[t]
        return self.view.seen[t].to(self.dtype) - sketch.apply(state[:, : sketch.dim])

    def _forward(
        self, t: int, state: Tensor, spread: Tensor, gain: Tensor, factor: Tensor, error: Tensor
    ) -> tuple[Tensor, Tensor]:
        own = self.view.sketches[t].lift(self.view.own[t].to(self.dtype))
        parts = (state + error @ gain.T).reshape(len(state), self.blocks, -1)
        moved: Tensor = torch.einsum("ij,mjd->mid", self.step, parts) + self.enter[:, None] * own[:, None]
        for _ in range(self.view.gaps[t] - 1):
            moved = torch.einsum("ij,mjd->mid", self.step, moved)
        return moved.flatten(1), self._spread(t, spread, gain, factor)

    def _spread(self, t: int, spread: Tensor, gain: Tensor, factor: Tensor) -> Tensor:
        half = torch.linalg.solve_triangular(factor, gain.T, upper=False)
        spread = self._predict(t, _less_square(spread, half), self.changes.add)
        for _ in range(self.view.gaps[t] - 1):
            spread = self._predict(t, spread, self.changes.add_missed)
        return spread

    def _predict(self, t: int, spread: Tensor, add: Callable[[int, Tensor, float], None]) -> Tensor:
        """The covariance one round later."""
        if self.blocks == 1:
            add(t, spread, self.view.lr**2)
            return spread
        dim, step = self.view.dim, self.step
        parts: Tensor = torch.einsum("ij,jakb,lk->ialb", step, spread.reshape(2, dim, 2, dim), step).contiguous()
        for i in range(2):
            for j in range(2):
                block = parts[i, :, j].contiguous()
                add(t, block, float(self.enter[i] * self.enter[j]))
                parts[i, :, j] = block
        return parts.reshape(2 * dim, 2 * dim)

    def _again(self, spread: Tensor, start: int, end: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        for t in range(start, end):
            gain, factor = self._gain(t, spread)
            yield t, gain, factor
            if t + 1 < end:
                spread = self._spread(t, spread, gain, factor)

    def _pull(self, r: Tensor) -> Tensor:
        """How the rest of the rounds pulls at what enters the state."""
        pull: Tensor = torch.einsum("i,mid->md", self.enter, r.reshape(len(r), self.blocks, -1))
        return pull

    def _transposed_step(self, r: Tensor) -> Tensor:
        back: Tensor = torch.einsum("ij,mid->mjd", self.step, r.reshape(len(r), self.blocks, -1))
        return back.flatten(1)

    def _tell(self, done: int) -> None:
        if self.progress is not None:
            self.progress(done, 2 * self.total)


def _less_square(matrix: Tensor, half: Tensor) -> Tensor:
    """A symmetric matrix less half^T half: strips below the diagonal, mirrored, so that little is computed twice."""
    less = matrix.clone()
    for start in range(0, len(less), STRIP):
        end = min(start + STRIP, len(less))
        less[start:, start:end].addmm_(half[:, start:].T, half[:, start:end], alpha=-1)
        less[start:end, end:] = less[end:, start:end].T
    return less


def _shrunk(matrix: Tensor, weight: float = 0.1) -> Tensor:
    """A covariance with mean variance 1, pulled a little towards the identity."""
    eye = torch.eye(len(matrix), dtype=matrix.dtype)
    size = float(matrix.diagonal().mean())
    return torch.lerp(matrix / size, eye, weight) if size > 0 else eye


def _rms(tensors: Sequence[Tensor]) -> float:
    return float(torch.cat([tensor.flatten() for tensor in tensors]).square().mean().sqrt())
