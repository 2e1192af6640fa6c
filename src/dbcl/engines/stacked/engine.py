"""Engine that trains all clients of a round at once with batched operations.

Every parameter gets a leading client axis. One backward pass through the sum of the clients' losses
gives each client's gradient. The updates equal those of `LocalEngine` up to the order of
floating-point additions.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dbcl._torch import queued
from dbcl.data.examples import TensorExamples
from dbcl.data.trees import join
from dbcl.engines.engine import Engine, RoundResult, client_name, reported
from dbcl.engines.local import train_in_turn
from dbcl.engines.stacked.batch import Params
from dbcl.engines.stacked.cuda_graph import CudaGraphLoop
from dbcl.engines.stacked.layers import NotStackable
from dbcl.engines.stacked.loop import TrainingLoop
from dbcl.engines.stacked.path import Stack
from dbcl.engines.stacked.schedule import Schedule
from dbcl.engines.stacked.stage_path import StageStack
from dbcl.engines.stacked.vmap_path import VmapStack
from dbcl.engines.training import LocalTraining, dropout_seed
from dbcl.objective import name_of
from dbcl.protocol import Broadcast, Update, UpdateStack

log = logging.getLogger(__name__)


class StackedEngine(Engine):
    """Engine that trains the cohort in batches: in chunks that fit the cache on a CPU, or all at
    once on a GPU.

    Supports every model that `LocalEngine` supports, and selects the fastest path with exact
    results. The attribute `path` is "stages" for a sequential network of supported layers, "vmap"
    for other models that `torch.func` can batch, or "loop" for sequential training of the clients.
    The attribute `why` gives the reasons against faster paths.

    Args:
        arguments: Positional arguments of `Engine`.
        precision: Precision of float32 products on a GPU: "float32", "tf32" (inputs rounded to 10
            bits) or "bf16" (inputs rounded to 7 bits).
        chunk: Number of clients trained together. None selects a number based on the sizes of the
            model and its activations.
        settings: Keyword arguments of `Engine`.

    >>> import copy, dbcl
    >>> from dbcl.engines import LocalTraining
    >>> clients = [(torch.randn(10, 8), torch.arange(10) % 2) for _ in range(4)]
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> engine = StackedEngine(dbcl.Server(net), copy.deepcopy(net), clients, LocalTraining(), seed=bytes(32))
    >>> engine.play_round().report.accepted, engine.path
    (4, 'stages')
    """

    path: str = "not chosen yet"
    why: str = "the first round decides"
    shards: Sequence[NDArray[np.int64]] = ()
    """Row indices of each client's examples in the pooled tensors `x` and `y`, set in the first
    round.
    """
    x: Tensor
    y: Tensor
    _stack: Stack | None = None
    _cuda_graph: CudaGraphLoop | None = None
    _ahead: "dict[tuple[int, ...], _Layout]" = {}  # noqa: RUF012  replaced, never changed in place

    def __init__(self, *arguments: Any, precision: str = "float32", chunk: int | None = None, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.precision, self.chunk = precision, chunk

    def play_round(self) -> RoundResult:
        with one_thread(isinstance(self._stack, StageStack) and self._stack.small):
            return super().play_round()

    def train_cohort(self, sent: Mapping[int, Broadcast]) -> Mapping[str, Update | bytes]:
        with allow_tf32(self.precision == "tf32"):
            first = next(iter(sent.values()))
            stack = self._stack_for(first)
            if stack is None:
                return train_in_turn(self, sent)
            size = self.chunk or stack.chunk_size(self.training, sent)
            trained = [self._train_chunk(stack, chunk, sent) for chunk in self._chunks(stack, sent, size)]
            return self._updates(sent, trained)

    def _chunks(self, stack: Stack, sent: Mapping[int, Broadcast], size: int) -> list[list[int]]:
        """Divide the clients into chunks of similar dataset size, which minimises padding."""
        together: dict[object, list[int]] = {}
        for client in self._by_size(sent):
            together.setdefault(stack.shares(sent[client]), []).append(client)
        return [queue[start : start + size] for queue in together.values() for start in range(0, len(queue), size)]

    def _stack_for(self, broadcast: Broadcast) -> Stack | None:
        """Return the stack of the fastest supported path; None for the sequential loop."""
        if self.path == "loop" or (self._stack is not None and self._stack.fits(broadcast)):
            return self._stack
        self._stack, self.path, self.why = self._choose(broadcast)
        log.info("the stacked engine takes the path %r: %s", self.path, self.why)
        return self._stack

    def _choose(self, broadcast: Broadcast) -> tuple[Stack | None, str, str]:
        """Return the stack of the fastest exact path, the path's name, and the reasons against
        faster paths.
        """
        reason = self._pool_examples()
        if reason:
            return None, "loop", reason
        clips, privacy = self.training.example_clip is not None, self.server.privacy
        if clips and privacy is not None and privacy.shared:
            return None, "loop", "sums of clipped gradients in float64 are made for one client after another"
        try:
            stages = StageStack(self.template, broadcast, self.x[:1], bf16=self.precision == "bf16")
            if not clips or stages.clips_examples(self.training):
                return stages, "stages", "a plain stack of known layers"
            reason = "only stacks of dense layers that all train clip examples for many clients at once"
        except NotStackable as error:
            reason = str(error)
        general = VmapStack(self.template, broadcast)
        if clips and not general.clips_examples(self.training):
            return None, "loop", f"{reason}; so examples are clipped for one client at a time"
        problem = general.problem(broadcast, self.x[:2], self.y[:2])
        if problem:
            return None, "loop", f"{reason}; and torch.func cannot batch it: {problem}"
        return general, "vmap", reason

    def _pool_examples(self) -> str:
        """Pool the clients' examples in two tensors, or return the reason why only the loop can
        train them.
        """
        if not self.training.is_sgd:
            return f"{name_of(self.training.optimizer)} is stepped for one client at a time"
        if not self.objective.classifies:
            return f"the loss {name_of(self.objective.loss)} is computed for one client at a time"
        if self.shards:
            return ""
        sets = [client for client in self.clients if isinstance(client, TensorExamples)]
        plain = all(isinstance(each.inputs, Tensor) and isinstance(each.targets, Tensor) for each in sets)
        if len(sets) < len(self.clients) or not plain:
            return "the examples are not two tensors"
        bases = {_base(each): each for each in sets}
        if len({(base.inputs.shape[1:], base.inputs.dtype, base.targets.dtype) for base in bases.values()}) > 1:
            return "the clients' examples differ in shape or type"
        if any(base.targets.ndim != 1 for base in bases.values()):
            return "an example has more than one class"
        starts, start = {}, 0
        for key, base in bases.items():
            starts[key], start = start, start + len(base.inputs)
        self.x = join([base.inputs for base in bases.values()]) if len(bases) > 1 else sets[0].inputs
        self.y = join([base.targets for base in bases.values()]) if len(bases) > 1 else sets[0].targets
        if not self.y.is_floating_point() and bool((self.y < 0).any()):
            return "the loss leaves out examples whose class is below 0"
        self.shards = [np.asarray(each.rows + starts[_base(each)]) for each in sets]
        return ""

    def _train_chunk(self, stack: Stack, clients: list[int], sent: Mapping[int, Broadcast]) -> "_Trained":
        stack.load([sent[client] for client in clients])
        round = sent[clients[0]].round
        layout = self._ahead.get((round, *clients)) or self._lay_out(round, clients)
        schedule, rows = layout.schedule, layout.rows
        x, y = stack.examples(self.x, rows, layout.whose), self.y.index_select(0, rows)
        params, losses = self._take_steps(stack, round, clients, x, y, schedule)
        stack.check(schedule.counts)
        steps = (schedule.counts > 0).sum(dim=0).to(losses.device)
        changes = stack.changes(params, steps)
        if self.x.is_cuda:  # which takes its steps by itself, so there is time
            self._look_ahead(round + 1)
        return _Trained(clients, changes, (losses.sum(dim=0) / steps.clamp(min=1)).tolist())

    def _lay_out(self, round: int, clients: list[int]) -> "_Layout":
        """Return the examples of a chunk's clients in the order of their use."""
        shards = [self.shards[client] for client in clients]
        sizes = list(map(len, shards))
        usual = type(self.training).batches is LocalTraining.batches and self.training.example_clip is None
        if self.x.is_cuda and usual:
            schedule = Schedule.together(
                clients, sizes, self.training, seed=self.seed, round=round, device=self.x.device
            )
        else:
            schedule = Schedule.for_clients(clients, sizes, self.training, seed=self.seed, round=round)
        rows = torch.from_numpy(np.concatenate(shards))
        whose = torch.from_numpy(np.repeat(np.arange(len(clients)), sizes))
        if self.x.is_cuda or schedule.index.numel() > len(rows):
            return _Layout(schedule, queued(rows, self.x.device), queued(whose, self.x.device))
        order = schedule.index.flatten()  # none twice: laid out in the order of the steps
        return _Layout(schedule.made_sequential(), rows[order], whose[order])

    def _look_ahead(self, round: int) -> None:
        """Lay out the next round's examples and draw its secret noise while the GPU is busy."""
        if any(laid_out[0] == round for laid_out in self._ahead):
            return
        self.server.prepare()
        clients = self._by_size(self.cohort(round))
        self._ahead = {(round, *clients): self._lay_out(round, clients)}

    def _by_size(self, clients: Iterable[int]) -> list[int]:
        return sorted(clients, key=lambda client: -len(self.clients[client]))

    def _take_steps(
        self, stack: Stack, round: int, clients: list[int], x: Tensor, y: Tensor, schedule: Schedule
    ) -> tuple[Params, Tensor]:
        rate = self.training.rate(round)
        dropout_seeds = [dropout_seed(self.seed, round, client) for client in clients]
        if x.is_cuda and isinstance(stack, StageStack):
            if self._cuda_graph is None or not self._cuda_graph.fits(stack, self.training, x, schedule):
                self._cuda_graph = CudaGraphLoop(stack, self.training, x, y, schedule)
            return self._cuda_graph.run(rate, y, schedule, dropout_seeds)
        loop = TrainingLoop(stack, self.training, rate, stack.start(), x, y, schedule)
        return loop.params, loop.run(schedule, dropout_seeds)

    def _updates(self, sent: Mapping[int, Broadcast], trained: "list[_Trained]") -> Mapping[str, Update]:
        """Return the updates of all chunks as one stack, or as separate updates if clients add
        noise.
        """
        shapes = {tuple(tensor.shape[1:] for tensor in chunk.changes.values()) for chunk in trained}
        if len(shapes) > 1:  # groups of clients whose sketches differ in width
            return {sender: update for chunk in trained for sender, update in self._updates(sent, [chunk]).items()}
        clients = [client for chunk in trained for client in chunk.clients]
        broadcast = sent[clients[0]]
        counted = [self.training.counted(len(self.shards[client])) for client in clients]
        losses = [loss for chunk in trained for loss in chunk.losses]
        told = [reported(n, {"loss": loss}, self.server.privacy) for n, loss in zip(counted, losses, strict=True)]
        stack = UpdateStack(
            broadcast.round,
            tuple(map(client_name, clients)),
            tuple(sent[client].plan.digest for client in clients),
            {name: joined([chunk.changes[name] for chunk in trained]) for name in trained[0].changes},
            tuple(examples for examples, _ in told),
            tuple(metrics for _, metrics in told),
        )
        if self.noise is None or self.noise.multiplier == 0:
            return stack if self.noise is None else clipped(stack, self.noise.clip, broadcast)
        weights = [tensor.name for tensor in broadcast.plan.tensors if not tensor.measured]
        noised = {}
        for client in clients:
            noise, update = replace(self.noise, client=client), stack[client_name(client)]
            changes = noise({name: update.tensors[name] for name in weights}, round=update.round)
            noised[client_name(client)] = replace(update, tensors=changes)
        return noised


class _Layout(NamedTuple):
    """Layout of a chunk's examples: the schedule, the data rows, and the client of each row."""

    schedule: Schedule
    rows: Tensor
    whose: Tensor


class _Trained(NamedTuple):
    """Result of a chunk: its clients, the changes of their tensors, and their mean losses."""

    clients: list[int]
    changes: Params
    losses: list[float]


def clipped(stack: UpdateStack, clip: float, broadcast: Broadcast) -> UpdateStack:
    """Clip each update of a stack and remove its statistics, as `UpdateNoise` does."""
    names = [tensor.name for tensor in broadcast.plan.tensors if not tensor.measured]
    factor = (clip / stack.norms(names)).clamp(max=1.0)  # NaN stays: the validator refuses it
    shortened = {
        name: stack.tensors[name] * factor.to(stack.tensors[name]).view(-1, *(1,) * (stack.tensors[name].ndim - 1))
        for name in names
    }
    return replace(stack, tensors=shortened)


def joined(parts: list[Tensor]) -> Tensor:
    """Concatenate tensors along their client axis; return a single tensor uncopied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _base(examples: TensorExamples) -> tuple[int, int]:
    """Return a key that is equal for all subsets of the same tensors."""
    return id(examples.inputs), id(examples.targets)


@contextmanager
def one_thread(wanted: bool) -> Iterator[None]:
    """Limit PyTorch to one thread inside the context.

    For kernels of a few microseconds, a second thread has almost no benefit. If another process
    occupies a core, all threads wait for the slowest at the end of every kernel, and a round takes
    three times as long (`benchmarks/busy.py`).
    """
    before = torch.get_num_threads()
    if not wanted or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def allow_tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 in GPU matrix products and convolutions inside the context."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
