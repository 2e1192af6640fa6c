"""Observations of each tensor over all rounds by one or several clients: the input of every
estimator.

Reads: client-N.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dbcl.errors import AuditError, NotAttackableError
from dbcl.model.layout import Layout
from dbcl.sketch import Identity, Sketch
from dbcl.transcripts import RoundRecord, Transcript
from dbcl_audit.estimators.others import Lanes, lanes_of_others
from dbcl_audit.estimators.pooled import Part, pool


@dataclass(frozen=True, eq=False)
class TensorObservations:
    """Observations of one tensor in all observed rounds, as matrices.

    Args:
        name: name of the tensor.
        rounds: observed rounds.
        gaps: number of rounds from each observed round to the next.
        sketches: sketch of each observed round.
        seen: values of each broadcast, shape (rows, width).
        own: the client's own part of each round's update, in the space of V.
        momentum: momentum of the server.
        lr: learning rate of the server.
        layout: layout of the tensor as a matrix, if the tensor is sketched.
        others: sketches of the other clients' updates by round; empty if equal to `sketches`.

    >>> import torch
    >>> seen = (torch.zeros(4, 3),) * 2
    >>> view = TensorObservations("w", (0, 2), (2, 1), (Identity(3),) * 2, seen, seen)
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
    """Layout of the tensor as a matrix, if the tensor is sketched."""
    others: tuple[Lanes, ...] = ()
    """Sketches of the other clients' updates by round; empty if they equal the client's own
    sketches.
    """

    def matrix(self, weight: Tensor) -> Tensor:
        """Reshape a weight or weight change to the matrix layout of the observations."""
        return weight.reshape(-1, self.dim) if self.layout is None else self.layout.matrix(weight)

    def lanes(self, index: int) -> Lanes:
        """Return the sketches of the other clients' updates in an observed round, each with the
        fraction of clients.

        >>> import torch
        >>> TensorObservations("w", (0,), (1,), (Identity(3),), (torch.zeros(4, 3),), (torch.zeros(4, 3),)).lanes(0)
        ((Identity(3 -> 3), 1.0),)
        """
        return self.others[index] if self.others else ((self.sketches[index], 1.0),)

    def update_width(self, index: int) -> float:
        """Return the expected width, in the space of V, of another client's update in an observed
        round.

        >>> import torch
        >>> seen = (torch.zeros(4, 3),)
        >>> TensorObservations("w", (0,), (1,), (Identity(3),), seen, seen).update_width(0)
        3.0
        """
        return sum(share * sketch.width for sketch, share in self.lanes(index))

    @property
    def dim(self) -> int:
        return self.sketches[0].dim

    @property
    def sketched(self) -> bool:
        """True if the tensor is sent sketched, even if clients of all lanes together observe all of
        it.
        """
        return self.layout is not None or self.sketches[0].width < self.dim

    def rows(self, which: slice | Tensor) -> "TensorObservations":
        """Return the observations of some rows."""
        return replace(self, seen=tuple(v[which] for v in self.seen), own=tuple(u[which] for u in self.own))

    def first(self, count: int) -> "TensorObservations":
        """Return the observations of the first rounds."""
        parts = ("rounds", "gaps", "sketches", "seen", "own", "others")
        return replace(self, **{part: getattr(self, part)[:count] for part in parts})


def tensor_observations(
    transcript: Transcript, names: Sequence[str] | None = None, *, allies: Sequence[Transcript] = ()
) -> dict[str, TensorObservations]:
    """Gather a client's observations by tensor; by default of all tensors, otherwise of those in
    `names`.

    `allies` are clients that share their observations: the broadcasts V of all their lanes form one
    observation per round. Each client's weight in a round's average is assumed to be 1 / cohort,
    because the other clients' example counts are secret.

    >>> import tempfile, dbcl, torch
    >>> from pathlib import Path
    >>> from dbcl.engines import LocalEngine, LocalTraining
    >>> from dbcl.transcripts import Recorder, Setting
    >>> net, folder, training = torch.nn.Linear(6, 2), Path(tempfile.mkdtemp()), LocalTraining()
    >>> clients = [(torch.ones(4, 6), torch.arange(4) % 2)] * 3
    >>> server = dbcl.Server(net, dbcl.SketchConfig(coverage="all"))
    >>> engine = LocalEngine(server, net, clients, training, seed=bytes(32))
    >>> setting = Setting("net", (1, 1, 6), 2, training.settings(), clients=3, cohort=3)
    >>> engine.observer = Recorder(folder, ["0", "1"], server, setting)
    >>> for _ in range(3):
    ...     report = engine.play_round()
    >>> one, two = (Transcript(folder / f"client-{number}") for number in (0, 1))
    >>> {name: (view.rounds, view.dim) for name, view in sorted(tensor_observations(one).items())}
    {'bias': ((0, 1, 2), 2), 'weight': ((0, 1, 2), 6)}
    >>> [tensor_observations(one, allies=each)["weight"].sketches[0].width for each in ([], [two])]
    [3, 6]
    """
    pooled, setting = (transcript, *allies), transcript.setting
    for each in pooled:
        if each.client is None:
            raise AuditError(f"{each.party}: updates are estimated by a client; the server knows them")
    rounds = tuple(sorted({round for each in pooled for round in each.rounds}))
    if len(rounds) < 3:
        raise NotAttackableError(f"{transcript.party} saw {len(rounds)} rounds; estimating takes 3 or more")
    if setting.optimizer == "adam":
        raise NotAttackableError(
            "the server's optimiser is Adam: its steps are no sums of updates, and no attack here undoes it"
        )
    gathered: dict[str, list[_Entry]] = {}
    layouts: dict[str, Layout] = {}
    for round in rounds:
        present = [(each[round], each.client or "") for each in pooled if round in each.rounds]
        plan = present[0][0].broadcast.plan
        layouts |= {tensor.name: tensor.layout for tensor in plan.tensors if tensor.sketched}
        # Statistics do not move by updates: clients report values of their own.
        moving = [tensor.name for tensor in plan.tensors if not tensor.measured]
        wanted = [name for name in moving if names is None or name in names]
        known = [seen.broadcast.plan for seen, _ in present]
        lanes = lanes_of_others(known, wanted, setting.cohort)
        for name in wanted:
            parts = [_part(seen, client, name, setting.cohort) for seen, client in present]
            sketch, matrix, own = pool(parts)
            gathered.setdefault(name, []).append((sketch, matrix, own, lanes.get(name, ((sketch, 1.0),))))
    gaps = (*(int(gap) for gap in np.diff(rounds)), 1)
    found = {}
    for name, entries in gathered.items():
        maps, matrices, owns, others = zip(*entries, strict=True)
        layout = layouts.get(name)
        found[name] = TensorObservations(
            name, rounds, gaps, maps, matrices, owns, setting.momentum, setting.server_lr, layout, others
        )
    return found


_Entry = tuple[Sketch, Tensor, Tensor, Lanes]


def _part(seen: RoundRecord, client: str, name: str, cohort: int) -> Part:
    """Return a client's broadcast of a tensor in a round, and the client's own part of the round's
    change, as matrices.
    """
    tensor = seen.broadcast.tensors[name].double()
    matrix = tensor.reshape(len(tensor), -1) if tensor.ndim > 1 else tensor.reshape(1, -1)
    sent = seen.updates.get(client)  # none if the client only observed the round
    own = torch.zeros_like(matrix) if sent is None else (sent.tensors[name] / cohort).double().reshape(matrix.shape)
    return Part(seen.broadcast.plan.sketches.get(name) or Identity(matrix.shape[1]), matrix, own)
