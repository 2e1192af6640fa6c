"""Messages between a server and its clients, and the report of a round."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from dbcl.errors import ProtocolError, plain
from dbcl.protocol.rejection import Rejection
from dbcl.round_plan import RoundPlan, mismatches
from dbcl.sketch import Sketch


@dataclass(frozen=True, eq=False)
class Broadcast:
    """Message from the server to a client: the round's plan with its seed, and the compact weights.

    A sketched tensor must have the compact shape; the constructor rejects full-size weights.

    >>> import torch, dbcl
    >>> broadcast = dbcl.Server(torch.nn.Linear(6, 2), dbcl.SketchConfig(coverage="all")).open_round()
    >>> {name: tuple(tensor.shape) for name, tensor in broadcast.tensors.items()}
    {'weight': (2, 3), 'bias': (2,)}
    """

    plan: RoundPlan
    tensors: Mapping[str, Tensor]
    veil: float = 0.0
    """Smallest noise on any tensor relative to the weights, as stated by the server."""

    def __post_init__(self) -> None:
        problems = mismatches({tensor.name: tensor.sent_shape for tensor in self.plan.tensors}, self.tensors)
        if problems:
            raise ProtocolError(f"broadcast: {plain('; '.join(problems[:5]))}")

    @property
    def round(self) -> int:
        return self.plan.round

    def sketches(self) -> dict[str, Sketch]:
        """Return the sketch of every sketched parameter, by name.

        >>> import torch, dbcl
        >>> dbcl.Server(torch.nn.Linear(6, 2), dbcl.SketchConfig(coverage="all")).open_round().sketches()
        {'weight': LaneSketch(6 -> 3, lane 0 of 2)}
        """
        return dict(self.plan.sketches)


@dataclass(frozen=True, eq=False)
class Base:
    """One-time message from the server to each client: frozen parameters under constant noise.

    >>> import torch, dbcl
    >>> model = torch.nn.Sequential(torch.nn.Linear(6, 6).requires_grad_(False), torch.nn.Linear(6, 2))
    >>> list(dbcl.Server(model, dbcl.SketchConfig(coverage="all", send_frozen=True)).base().tensors)
    ['0.weight', '0.bias']
    """

    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Update:
    """Message from a client to the server: the change of every received tensor.

    Args:
        round: Number of the round.
        plan: Digest of the round's plan.
        tensors: Changes by tensor name. For normalisation statistics, the client's own values.
        examples: Number of training examples.
        metrics: Training metrics of the client.

    >>> import torch
    >>> Update(round=0, plan="ab12", tensors={"bias": torch.zeros(2)}, examples=600).examples
    600
    """

    round: int
    plan: str
    tensors: Mapping[str, Tensor]
    examples: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class UpdateStack(Mapping[str, Update]):
    """Updates of many clients, by sender, as tensors with a leading client axis.

    Engines that train clients in batches return a stack, to avoid copies during validation,
    averaging and lifting. `stack[sender]` is a view of one client's update.

    >>> import torch
    >>> stack = UpdateStack(0, ("ann", "bob"), ("ab", "ab"), {"bias": torch.eye(2)}, (6, 7), ({}, {}))
    >>> stack["bob"].tensors["bias"], stack["bob"].examples
    (tensor([0., 1.]), 7)
    """

    round: int
    senders: tuple[str, ...]
    plans: tuple[str, ...]
    """Digest of each client's plan; clients of different lanes have different plans."""
    tensors: Mapping[str, Tensor]
    examples: tuple[int, ...]
    metrics: tuple[Mapping[str, float], ...]

    def __post_init__(self) -> None:
        counts = {len(set(self.senders)), *map(len, (self.senders, self.plans, self.examples, self.metrics))}
        counts |= {len(tensor) for tensor in self.tensors.values()}
        if len(counts) > 1 or not self.senders:
            raise ProtocolError(
                "a stack has one update or more, each of a different sender, with one row in every tensor"
            )

    def __getitem__(self, sender: str) -> Update:
        return self.at(self._places[sender])

    @cached_property
    def _places(self) -> dict[str, int]:
        return {sender: place for place, sender in enumerate(self.senders)}

    def at(self, place: int) -> Update:
        """Return the update at an index of the stack."""
        tensors = _Slices(self.tensors, place)
        return Update(self.round, self.plans[place], tensors, self.examples[place], self.metrics[place])

    def norms(self, names: Iterable[str]) -> Tensor:
        """Return the norm of every update over the named tensors, in float64.

        >>> import torch
        >>> sent = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0], [1.0]])}
        >>> UpdateStack(0, ("ann", "bob"), ("ab", "ab"), sent, (6, 7), ({}, {})).norms(sent)
        tensor([5., 1.], dtype=torch.float64)
        """
        flat = [self.tensors[name].unsqueeze(-1).flatten(1) for name in sorted(names)]
        parts = torch.stack([torch.linalg.vector_norm(each, dim=1, dtype=torch.float64) for each in flat])
        norms: Tensor = torch.linalg.vector_norm(parts, dim=0)
        return norms

    def subset(self, senders: Sequence[str]) -> "UpdateStack":
        """Return the updates of the given senders, in the given order.

        >>> import torch
        >>> stack = UpdateStack(0, ("ann", "bob"), ("ab", "ab"), {"bias": torch.eye(2)}, (6, 7), ({}, {}))
        >>> stack.subset(["bob"]).examples
        (7,)
        """
        if tuple(senders) == self.senders:
            return self
        rows = [self._places[sender] for sender in senders]
        return UpdateStack(
            self.round,
            tuple(senders),
            tuple(self.plans[row] for row in rows),
            self.only(senders),
            tuple(self.examples[row] for row in rows),
            tuple(self.metrics[row] for row in rows),
        )

    def only(self, senders: Sequence[str]) -> Mapping[str, Tensor]:
        """Return the stacked tensors of the given senders."""
        if tuple(senders) == self.senders:
            return self.tensors
        rows = [self._places[sender] for sender in senders]
        return {name: tensor[rows] for name, tensor in self.tensors.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self.senders)

    def __len__(self) -> int:
        return len(self.senders)


@dataclass(frozen=True, eq=False)
class _Slices(Mapping[str, Tensor]):
    """One client's tensors in a stack, sliced on access."""

    stacked: Mapping[str, Tensor]
    place: int

    def __getitem__(self, name: str) -> Tensor:
        return self.stacked[name][self.place]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stacked)

    def __len__(self) -> int:
        return len(self.stacked)


@dataclass(frozen=True)
class AggregationStats:
    """Statistics of the updates in an aggregate.

    Args:
        rejected: The rejections by client.
        capped: Clients whose weight is below their number of examples.
        clipped: Clients whose updates were scaled down.
        examples: Number of examples of the accepted updates.
        metrics: The clients' metrics, averaged over examples.
        influence: Influence of the median client, a reference for later rounds.
        senders: Clients whose updates were used.
        lanes: Number of accepted updates in each lane.
        agreement: Mean cosine of each client's update with the others.
        noisy: The aggregate is a sum that includes the clients' noise shares.

    >>> AggregationStats(capped=("ann",), examples=9).examples
    9
    """

    rejected: Mapping[str, Rejection] = field(default_factory=dict)
    capped: tuple[str, ...] = ()
    clipped: tuple[str, ...] = ()
    examples: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    influence: float = 0.0
    senders: tuple[str, ...] = ()
    lanes: tuple[int, ...] = ()
    agreement: Mapping[str, float] = field(default_factory=dict)
    noisy: bool = False

    def report(self, round: int, accepted: int, size: float) -> "RoundReport":
        """Return the report of a round.

        Args:
            round: Number of the round.
            accepted: Number of accepted updates.
            size: Norm of the average update.
        """
        clipped = len({*self.capped, *self.clipped})
        return RoundReport(round, accepted, self.rejected, clipped, self.examples, size, self.metrics, self.lanes)


@dataclass(frozen=True)
class RoundReport:
    """Outcome of a round.

    Args:
        round: Number of the round.
        accepted: Number of accepted updates.
        rejected: The rejections by client.
        clipped: Number of updates that were scaled down or had their weight reduced.
        examples: Number of examples of the accepted updates.
        norm: Norm of the average update over all tensors.
        metrics: The clients' metrics, averaged over examples.
        lanes: Number of accepted updates in each lane; empty if unknown.

    >>> from dbcl.protocol.rejection import Reason, Rejection
    >>> RoundReport(3, 1, {"bob": Rejection(Reason.NOT_FINITE, "bias holds NaN")}, 0, 9, 0.1).refused
    ('bob: bias holds NaN',)
    """

    round: int
    accepted: int
    rejected: Mapping[str, Rejection] = field(default_factory=dict)
    clipped: int = 0
    examples: int = 0
    norm: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    lanes: tuple[int, ...] = ()

    @property
    def refused(self) -> tuple[str, ...]:
        """Each rejected client with the reason, one line per client."""
        return tuple(f"{who}: {rejection}" for who, rejection in self.rejected.items())

    @property
    def unanswered(self) -> tuple[int, ...]:
        """Lanes without accepted updates. The other lanes receive their weight.

        >>> RoundReport(3, accepted=2, lanes=(2, 0)).unanswered
        (1,)
        """
        return tuple(lane for lane, count in enumerate(self.lanes) if count == 0)
