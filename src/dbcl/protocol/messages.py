"""The only two messages, and the report of a round."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from dbcl.errors import ProtocolError, plain
from dbcl.round_plan import RoundPlan, mismatches
from dbcl.sketch import Sketch


@dataclass(frozen=True, eq=False)
class Broadcast:
    """Server to every client: the round's seed and plan, and the compact weights. All that leaves the server.

    A tensor that the plan calls sketched must have the shape of a compact weight: a covered weight does not fit.

    >>> import torch, dbcl
    >>> broadcast = dbcl.Server(torch.nn.Linear(6, 2), cover="all").open_round()
    >>> {name: tuple(tensor.shape) for name, tensor in broadcast.tensors.items()}
    {'weight': (2, 3), 'bias': (2,)}
    """

    plan: RoundPlan
    tensors: Mapping[str, Tensor]
    veil: float = 0.0
    """The least noise that the server says it has put on any of the tensors, relative to the weights."""

    def __post_init__(self) -> None:
        problems = mismatches({tensor.name: tensor.sent_shape for tensor in self.plan.tensors}, self.tensors)
        if problems:
            raise ProtocolError(f"broadcast: {plain('; '.join(problems[:5]))}")

    @property
    def round(self) -> int:
        return self.plan.round

    def sketches(self) -> dict[str, Sketch]:
        """The sketch of every covered parameter by its name: what a client needs, and all that an attacker has.

        >>> import torch, dbcl
        >>> dbcl.Server(torch.nn.Linear(6, 2), cover="all").open_round().sketches()
        {'weight': LaneSketch(6 -> 3, lane 0 of 2)}
        """
        return dict(self.plan.sketches)


@dataclass(frozen=True, eq=False)
class Base:
    """Server to a client, once: frozen parameters under a noise that never changes. The same for every client.

    >>> import torch, dbcl
    >>> model = torch.nn.Sequential(torch.nn.Linear(6, 6).requires_grad_(False), torch.nn.Linear(6, 2))
    >>> list(dbcl.Server(model, cover="all", send_frozen=True).base().tensors)
    ['0.weight', '0.bias']
    """

    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Update:
    """Client to server: how what it holds has changed, and how many examples it learned from.

    >>> import torch
    >>> Update(round=0, plan="ab12", tensors={"bias": torch.zeros(2)}, examples=600).examples
    600
    """

    round: int
    plan: str  # the digest of the plan that it answers
    tensors: Mapping[str, Tensor]
    examples: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class UpdateStack(Mapping[str, Update]):
    """The updates of many clients, by sender, whose tensors lie together: each has a leading client axis.

    What an engine that trains clients together hands to the server, so that all are checked, averaged and lifted where
    they are. Whoever asks for one client's update gets a view of its slice.

    >>> import torch
    >>> stack = UpdateStack(0, ("ann", "bob"), ("ab", "ab"), {"bias": torch.eye(2)}, (6, 7), ({}, {}))
    >>> stack["bob"].tensors["bias"], stack["bob"].examples
    (tensor([0., 1.]), 7)
    """

    round: int
    senders: tuple[str, ...]
    plans: tuple[str, ...]
    """The digest of the plan that each of them answers: clients of different lanes have different plans."""
    tensors: Mapping[str, Tensor]
    examples: tuple[int, ...]
    metrics: tuple[Mapping[str, float], ...]

    def __post_init__(self) -> None:
        counts = {len(set(self.senders)), *map(len, (self.senders, self.plans, self.examples, self.metrics))}
        counts |= {len(tensor) for tensor in self.tensors.values()}
        if len(counts) > 1 or not self.senders:
            raise ProtocolError(
                "a stack has one update or more, each of another sender, and a row of each tensor for it"
            )

    def __getitem__(self, sender: str) -> Update:
        return self.at(self._places[sender])

    @cached_property
    def _places(self) -> dict[str, int]:
        return {sender: place for place, sender in enumerate(self.senders)}

    def at(self, place: int) -> Update:
        """The update at a place of the stack."""
        tensors = _Slices(self.tensors, place)
        return Update(self.round, self.plans[place], tensors, self.examples[place], self.metrics[place])

    def lengths(self, names: Iterable[str]) -> Tensor:
        """The length of every update over the tensors of these names, as `dbcl.privacy.norm` has it, in float64.

        >>> import torch
        >>> sent = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0], [1.0]])}
        >>> UpdateStack(0, ("ann", "bob"), ("ab", "ab"), sent, (6, 7), ({}, {})).lengths(sent)
        tensor([5., 1.], dtype=torch.float64)
        """
        flat = [self.tensors[name].unsqueeze(-1).flatten(1) for name in sorted(names)]
        parts = torch.stack([torch.linalg.vector_norm(each, dim=1, dtype=torch.float64) for each in flat])
        lengths: Tensor = torch.linalg.vector_norm(parts, dim=0)
        return lengths

    def only(self, senders: Sequence[str]) -> Mapping[str, Tensor]:
        """The stacked tensors of some senders."""
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
    """One client's tensors in a stack; cut out when somebody looks."""

    stacked: Mapping[str, Tensor]
    place: int

    def __getitem__(self, name: str) -> Tensor:
        return self.stacked[name][self.place]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stacked)

    def __len__(self) -> int:
        return len(self.stacked)


@dataclass(frozen=True)
class Tally:
    """What is known of the updates behind an aggregate, for the round's report.

    >>> Tally(refused=("update 1: bias holds NaN",), examples=9).clipped
    0
    """

    refused: tuple[str, ...] = ()
    """Who was refused, and why."""
    clipped: int = 0
    examples: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The clients' metrics, averaged over examples."""
    pull: float = 0.0
    """The median client's pull on the average, with which later rounds bound each client's."""
    senders: tuple[str, ...] = ()
    """Whose updates were used."""
    lanes: tuple[int, ...] = ()
    """How many updates were accepted in each lane."""


@dataclass(frozen=True)
class RoundReport:
    """What became of a round.

    >>> RoundReport(round=3, accepted=1, refused=("update 1: bias holds NaN",), clipped=0, examples=9, norm=0.1).refused
    ('update 1: bias holds NaN',)
    """

    round: int
    accepted: int
    refused: tuple[str, ...]
    clipped: int
    examples: int
    norm: float
    """The length of the average update, all tensors together."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The clients' metrics, averaged over examples."""
    lanes: tuple[int, ...] = ()
    """How many updates were accepted in each lane; empty where that is not known."""

    @property
    def unanswered(self) -> tuple[int, ...]:
        """The lanes without an answer: their weight went to the others.

        >>> RoundReport(3, accepted=2, refused=(), clipped=0, examples=9, norm=0.1, lanes=(2, 0)).unanswered
        (1,)
        """
        return tuple(lane for lane, count in enumerate(self.lanes) if count == 0)
