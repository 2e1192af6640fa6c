"""Inference of the label counts of a client's shard from one update of several local steps.

Reads no transcript. The inputs are one client's update, which the server receives without secure
aggregation, and the client's broadcast. The bias of the output layer changes by -lr times the sum
over steps of mean(p_c) - n_c / batch. The probabilities p change with every step. The server
therefore simulates clients: it trains the broadcast model on shards of its own examples with known
label counts, and fits a regression from updates to label counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import RidgeCV
from torch import Tensor, nn

from dbcl.engines import LocalTraining
from dbcl.errors import ConfigError
from dbcl.protocol import Broadcast, blinded, make_update
from dbcl_audit.attacks.first_layer import dense_first_layer, metric_root
from dbcl_audit.attacks.roc import Array
from dbcl_audit.attacks.span import first_layer_change
from dbcl_audit.findings import Finding, Measure
from dbcl_audit.numerics import spread_floor

PENALTIES = 10.0 ** np.arange(-5.0, 2.5, 0.5)  # of the regression, in units of a group's variance times the samples
Counts = NDArray[np.int64]


class Answered(NamedTuple):
    """Broadcast a client received and the update it returned.

    `rows` holds the indices of the client's training examples (ground truth, used only to score the
    attack).
    """

    broadcast: Broadcast
    tensors: Mapping[str, Tensor]
    rows: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LabelReader:
    """Regression from updates to label counts, trained on simulated updates.

    Half of the simulated shards have label shares drawn uniformly (Dirichlet 1). The other half are
    drawn around the first estimate. The features are the change of the output layer and, for a
    dense first layer, the energy of each class in the row space of its change.

    Args:
        template: network of the run.
        training: local training of the clients.
        own: examples of the server, with their labels.
        simulations: number of simulated updates.
        seed: seed of the simulated shards.

    >>> from dbcl import Server, SketchConfig
    >>> x, y = torch.eye(3).repeat(8, 1), torch.arange(3).repeat(8)
    >>> net = nn.Linear(3, 3)
    >>> broadcast = Server(net, SketchConfig(veil=0, coverage="all", sketch="identity-v1")).open_round()
    >>> local, training = blinded(net, broadcast), LocalTraining(lr=0.1, batch_size=4)
    >>> rows = [0, 3, 6, 9, 12, 1, 4, 2]
    >>> _ = training.train(local, (x[rows], y[rows]), seed=bytes(32), round=0, client=0)
    >>> sent = make_update(local, broadcast, examples=8).tensors
    >>> LabelReader(net, training, (x, y), simulations=40).counts(broadcast, sent, 8).tolist()
    [5, 2, 1]
    """

    template: nn.Module
    training: LocalTraining
    own: tuple[Tensor, Tensor]
    simulations: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        if self.simulations < 4:
            raise ConfigError(f"simulations must be 4 or more, got {self.simulations}")
        if len(self.own[0]) != len(self.own[1]) or len(self.own[1]) < 2:
            raise ConfigError(
                f"the server's own examples must be 2 or more with a label each, got {len(self.own[0])} examples and "
                f"{len(self.own[1])} labels"
            )

    def counts(self, broadcast: Broadcast, tensors: Mapping[str, Tensor], examples: int) -> Counts:
        """Return the number of a client's `examples` with each label, estimated from its update
        `tensors`.
        """
        if not _finite(tensors):
            raise ConfigError("the update holds values that are not finite, and no label can be read from it")
        rng = np.random.default_rng(self.seed)
        look = _Look.from_broadcast(broadcast, self.own)
        seen = look.features(tensors)
        simulated = list[list[Array]]()
        shares, known = np.ones(look.classes), list[Counts]()
        for number in range(self.simulations):
            if number == self.simulations // 2:
                estimate = _regressed(simulated, known, seen)
                shares = np.maximum(estimate, 0) + 0.5  # so that no label is ruled out
            counts = rng.multinomial(examples, rng.dirichlet(shares))
            rows = look.shard(counts, rng)
            answer = self._update(broadcast, rows, rng)
            if _finite(answer):  # a shard on which training diverges teaches nothing
                simulated.append(look.features(answer))
                known.append(np.bincount(self.own[1][rows].numpy(), minlength=look.classes))
        return _whole(_regressed(simulated, known, seen), examples)

    def _update(self, broadcast: Broadcast, rows: NDArray[np.int64], rng: np.random.Generator) -> dict[str, Tensor]:
        """Return the update of a simulated client with these rows of the server's examples."""
        local = blinded(self.template, broadcast)
        examples = tuple(part[rows] for part in self.own)
        self.training.train(local, examples, seed=rng.bytes(32), round=broadcast.round, client=0)
        return dict(make_update(local, broadcast, examples=len(rows)).tensors)


class ClassEnergies:
    """Energy of each class in the row space of an update: the mean of |P c|^2 / |c|^2 over the
    class's examples.

    P projects onto the row space, in the metric of `span_scores`. Each of a client's examples adds
    one direction to the row space, even if the example changed the model little. Examples of the
    same class have larger projections than examples of other classes.

    >>> from dbcl import Server, SketchConfig
    >>> broadcast = Server(nn.Linear(4, 8), SketchConfig(sketch="identity-v1")).open_round()
    >>> energies = ClassEnergies(broadcast, [torch.eye(4)[:2], torch.eye(4)[2:]])
    >>> delta = torch.rand(8, 1, generator=torch.Generator().manual_seed(0))
    >>> one, other = energies({"weight": delta * torch.tensor([0.5, 0.5, 0.0, 0.0]), "bias": delta[:, 0]})
    >>> bool(one > other)
    True
    """

    def __init__(self, broadcast: Broadcast, examples: Sequence[Tensor]) -> None:
        self.broadcast, self.shape = broadcast, tuple(examples[0].shape[1:])
        change = first_layer_change(broadcast, broadcast.tensors, self.shape)
        if change is None:
            raise ConfigError("the network has no dense first layer with a bias, whose change spans examples")
        seen = change.sees(torch.cat(list(examples)))
        self.root = metric_root(seen)
        c = seen @ self.root
        c /= np.linalg.norm(c, axis=1, keepdims=True)
        self.c = np.split(c, np.cumsum([len(each) for each in examples])[:-1])

    def __call__(self, tensors: Mapping[str, Tensor]) -> Array:
        """Return the energy of each class in an update, or zeros if the first layer did not
        change.
        """
        change = first_layer_change(self.broadcast, tensors, self.shape)
        assert change is not None
        if not change.bias.any():
            return np.zeros(len(self.c))
        y = change.rows() @ self.root
        squares, vectors = np.linalg.eigh(y @ y.T)
        clear = squares > torch.finfo(change.weight.dtype).eps * squares[-1]
        basis = y.T @ (vectors[:, clear] / np.sqrt(squares[clear]))
        return np.array([np.square(c @ basis).sum() / max(len(c), 1) for c in self.c])


@dataclass(frozen=True, eq=False)
class _Look:
    """Features of an update, and the server's examples of each class, from which shards are
    drawn.
    """

    output: Sequence[str]
    energies: ClassEnergies | None
    pools: Sequence[NDArray[np.int64]]

    @staticmethod
    def from_broadcast(broadcast: Broadcast, own: tuple[Tensor, Tensor]) -> "_Look":
        x, y = own
        names = [part.name for part in broadcast.plan.tensors if not part.measured]
        layer = names[-1].removesuffix("weight").removesuffix("bias")
        labels = y.numpy()
        pools = [np.flatnonzero(labels == label) for label in range(int(labels.max()) + 1)]
        energies = None
        if dense_first_layer(broadcast, x.shape[1:]) is not None:
            # Shards are drawn from the one half and compared with the other: an example lies in its own span.
            compared = [pool[1::2] if len(pool) > 1 else pool for pool in pools]
            energies = ClassEnergies(broadcast, [x[rows] for rows in compared])
            pools = [pool[::2] for pool in pools]
        return _Look([name for name in names if name.startswith(layer)], energies, pools)

    @property
    def classes(self) -> int:
        return len(self.pools)

    def shard(self, counts: Counts, rng: np.random.Generator) -> NDArray[np.int64]:
        """Draw `counts` examples of each class, with replacement if there are too few. A class
        without examples is replaced by other classes.
        """
        every = np.concatenate(self.pools)
        pools = [pool if len(pool) else every for pool in self.pools]
        drawn = [rng.choice(p, c, replace=len(p) < c) for p, c in zip(pools, counts, strict=True)]
        return np.concatenate(drawn)

    def features(self, tensors: Mapping[str, Tensor]) -> list[Array]:
        """Return groups of features. The groups have equal weight in the regression."""
        groups = [tensors[name].detach().cpu().double().flatten().numpy() for name in self.output]
        return groups if self.energies is None else [*groups, self.energies(tensors)]


def _regressed(simulated: Sequence[Sequence[Array]], known: Sequence[Counts], seen: Sequence[Array]) -> Array:
    """Predict the label counts by ridge regression, with the penalty that minimises the
    leave-one-out error.
    """
    if len(simulated) < 2:
        raise ConfigError(f"{len(simulated)} of the server's simulations did not diverge, and 2 are needed; lower lr")
    rows, wanted = [], []
    for number, one in enumerate(seen):
        group = np.stack([each[number] for each in simulated])
        mean, size = group.mean(axis=0), np.sqrt(np.square(group - group.mean(axis=0)).sum() / len(group))
        if size > spread_floor(group):  # less is rounding, and tells nothing
            rows.append((group - mean) / size)
            wanted.append((one - mean) / size)
    if not rows:
        return np.asarray(np.mean(known, axis=0), dtype=np.float64)
    x = np.concatenate(rows, axis=1)
    fitted = RidgeCV(alphas=PENALTIES * len(x)).fit(x, np.stack(known))
    found: Array = fitted.predict(np.concatenate(wanted)[None])[0]
    return found


def _finite(tensors: Mapping[str, Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors.values())


def _whole(estimate: Array, examples: int) -> Counts:
    """Round an estimate to the nearest integer counts with sum `examples`."""
    counts = np.zeros(len(estimate), dtype=np.int64)
    for _ in range(examples):
        counts[int(np.argmax(estimate - counts))] += 1
    return counts


def named_correctly(guessed: Counts, true: Counts) -> float:
    """Fraction of correctly guessed labels, regardless of order: sum of min(guessed, true) /
    examples.

    >>> named_correctly(np.array([2, 2, 0]), np.array([1, 2, 1]))
    0.75
    """
    return float(np.minimum(guessed, true).sum() / true.sum())


def update_label_findings(updates: Sequence[Answered], labels: Tensor, reader: LabelReader) -> list[Finding]:
    """Infer the label counts of clients as the server, from one update each.

    `labels` holds the labels of all examples. Counts are compared by `named_correctly`. The chance
    level is the score of equal counts for all labels.

    >>> from dbcl import Server, SketchConfig
    >>> x, y = torch.eye(3).repeat(8, 1), torch.arange(3).repeat(8)
    >>> net = nn.Linear(3, 3)
    >>> broadcast = Server(net, SketchConfig(veil=0, coverage="all", sketch="identity-v1")).open_round()
    >>> local, training, rows = blinded(net, broadcast), LocalTraining(lr=0.1, batch_size=4), np.array([0, 3])
    >>> _ = training.train(local, (x[rows], y[rows]), seed=bytes(32), round=0, client=0)
    >>> sent = Answered(broadcast, make_update(local, broadcast, examples=2).tensors, rows)
    >>> (found,) = update_label_findings([sent], y, LabelReader(net, training, (x, y), simulations=20))
    >>> found.value, found.chance
    (1.0, 0.5)
    """
    began = perf_counter()
    right, chance = list[float](), list[float]()
    for broadcast, tensors, rows in updates:
        found = reader.counts(broadcast, tensors, len(rows))
        true = np.bincount(labels[rows].numpy(), minlength=len(found))
        right.append(named_correctly(np.pad(found, (0, len(true) - len(found))), true))
        chance.append(named_correctly(_whole(np.full(len(true), len(rows) / len(true)), len(rows)), true))
    budget = {
        "members": sum(len(each.rows) for each in updates), "clients": len(updates),
        "own examples": len(reader.own[1]), "simulations": reader.simulations,
        "seconds": round(perf_counter() - began, 1),
    }  # fmt: skip
    return [
        Finding(
            "labels of one update", "server", "adaptive", "label", Measure.ACCURACY, float(np.mean(right)),
            chance=float(np.mean(chance)), budget=budget,
            note="share of a client's examples whose labels are named, in no order; guessing: all labels equally often",
        )
    ]  # fmt: skip
