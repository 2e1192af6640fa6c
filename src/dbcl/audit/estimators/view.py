"""What one client saw of each tensor over all its rounds: the input of every estimator. Reads: client-N."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from dbcl.errors import AuditError
from dbcl.layout import Layout
from dbcl.sketch import Identity, Sketch
from dbcl.transcripts import Transcript


@dataclass(frozen=True, eq=False)
class View:
    """One tensor over all rounds that a client saw, as matrices; `own` is its own part of each update, in V's space.

    `gaps` says how many rounds lie from each seen round to the next. `momentum` and `lr` are the server's.

    >>> import torch
    >>> view = View("w", (0, 2), (2, 1), (Identity(3),) * 2, (torch.zeros(4, 3),) * 2, (torch.zeros(4, 3),) * 2)
    >>> view.dim, view.rows(slice(2)).seen[0].shape, view.first(1).rounds
    (3, torch.Size([2, 3]), (0,))
    """

    name: str
    rounds: tuple[int, ...]
    gaps: tuple[int, ...]
    sketches: tuple[Sketch, ...]
    seen: tuple[Tensor, ...]  # (rows, width) each
    own: tuple[Tensor, ...]
    momentum: float = 0.0
    lr: float = 1.0
    layout: Layout | None = None
    """How the tensor is a matrix, where it is sketched."""

    def matrix(self, weight: Tensor) -> Tensor:
        """A change of the tensor as the matrix that the view is of."""
        return weight.reshape(-1, self.dim) if self.layout is None else self.layout.matrix(weight)

    @property
    def dim(self) -> int:
        return self.sketches[0].dim

    @property
    def sketched(self) -> bool:
        """Whether the client received less than the whole tensor."""
        return self.sketches[0].width < self.dim

    def rows(self, which: slice | Tensor) -> "View":
        """The same view of some rows only."""
        return replace(self, seen=tuple(v[which] for v in self.seen), own=tuple(u[which] for u in self.own))

    def first(self, count: int) -> "View":
        """The same view of the first rounds only."""
        parts = ("rounds", "gaps", "sketches", "seen", "own")
        return replace(self, **{part: getattr(self, part)[:count] for part in parts})


def views(transcript: Transcript, names: Sequence[str] | None = None) -> dict[str, View]:
    """Gather what a client saw, tensor by tensor, or of the tensors in `names` only.

    The client's share of a round's average is taken to be 1 / cohort: it does not know how many examples others have.

    >>> import tempfile, dbcl, torch
    >>> from pathlib import Path
    >>> from dbcl.engines import LocalEngine, LocalTraining
    >>> from dbcl.transcripts import Recorder, Setting
    >>> net, folder, training = torch.nn.Linear(6, 2), Path(tempfile.mkdtemp()), LocalTraining()
    >>> server, clients = dbcl.Server(net, cover="all"), [(torch.ones(4, 6), torch.arange(4) % 2)] * 2
    >>> engine = LocalEngine(server, net, clients, training, seed=bytes(32))
    >>> setting = Setting("net", (1, 1, 6), 2, training.settings(), clients=2, cohort=2)
    >>> engine.observer = Recorder(folder, ["0"], engine.session, setting)
    >>> for _ in range(3):
    ...     report = engine.play_round()
    >>> {name: (view.rounds, view.dim) for name, view in sorted(views(Transcript(folder / "client-0")).items())}
    {'bias': ((0, 1, 2), 2), 'weight': ((0, 1, 2), 6)}
    """
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
    layouts: dict[str, Layout] = {}
    for each in transcript:
        sketches = each.broadcast.sketches()
        measured = {tensor.name for tensor in each.broadcast.plan.tensors if tensor.measured}
        layouts |= {tensor.name: tensor.layout for tensor in each.broadcast.plan.tensors if tensor.sketched}
        for name, tensor in each.broadcast.tensors.items():
            # Statistics do not move by updates: clients report values of their own.
            if name not in measured and (names is None or name in names):
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
        found[name] = View(
            name, rounds, gaps, maps, matrices, parts, setting.momentum, setting.server_lr, layouts.get(name)
        )
    return found
