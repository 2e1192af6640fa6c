"""All clients of a round at once: one set of batched operations instead of a loop over clients.

Give every parameter a leading client axis, add up the clients' losses, and one backward pass gives each client its own
gradient. The answers are those of `LocalEngine`, up to the order of additions.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from dbcl import seeds
from dbcl.engines.engine import Engine
from dbcl.engines.local import LocalEngine
from dbcl.engines.stacked.layers import NotStackable, Params
from dbcl.engines.stacked.loop import Captured, Schedule, Trainer, schedule
from dbcl.engines.stacked.stage_path import Stack, StageStack, VmapStack
from dbcl.protocol import Broadcast, Update

log = logging.getLogger(__name__)


class StackedEngine(Engine):
    """Trains the cohort together, in chunks that fit the cache on a CPU and all at once on a GPU.

    It takes every model that `LocalEngine` takes, by the fastest way that is exact for it, and `path` says which:
    "stages" for a plain stack of known layers, "vmap" for anything that `torch.func` can batch, "loop" for the rest.

    >>> import copy, dbcl
    >>> from dbcl.engines import LocalTraining
    >>> x, y = torch.randn(40, 8), torch.arange(40) % 2
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> shards = np.array_split(np.arange(40), 4)
    >>> engine = StackedEngine(dbcl.Server(net), copy.deepcopy(net), x, y, shards, LocalTraining(), seed=bytes(32))
    >>> engine.play_round().report.accepted, engine.path
    (4, 'stages')
    """

    path: str = "not chosen yet"
    why: str = "the first round decides"
    chunk: int | None = None
    """How many clients are trained together; chosen from the size of the model and its activations if not set."""
    precision: str = "float32"
    """What a GPU may do to float32 products: "float32" nothing, "tf32" round their inputs to 10 bits, "bf16" to 7."""
    _held: Stack | None = None
    _captured: Captured | None = None

    def train_cohort(self, broadcast: Broadcast, cohort: list[int]) -> list[Update] | list[bytes]:
        with products(self.precision):
            stack = self._stack(broadcast)
            if stack is None:
                return LocalEngine.train_cohort(self, broadcast, cohort)  # type: ignore[arg-type]
            return self._train_stacked(stack, broadcast, cohort)

    def _train_stacked(self, stack: Stack, broadcast: Broadcast, cohort: list[int]) -> list[Update]:
        stack.load(broadcast)
        done: dict[int, Update] = {}
        # Clients of similar size share a chunk, so that little of it is padding.
        queue = sorted(cohort, key=lambda client: -len(self.shards[client]))
        size = self.chunk or stack.fitting_chunk(self.training, len(queue))
        for start in range(0, len(queue), size):
            members = queue[start : start + size]
            done |= dict(zip(members, self._train(stack, broadcast, members), strict=True))
        return [done[client] for client in cohort]

    def _stack(self, broadcast: Broadcast) -> Stack | None:
        if self.path == "loop" or (self._held is not None and self._held.fits(broadcast)):
            return self._held
        example = self.x[:1]
        try:
            made: Stack = StageStack(self.template, broadcast, example, bf16=self.precision == "bf16")
            self.path, self.why = "stages", "a plain stack of known layers"
        except NotStackable as reason:
            general = VmapStack(self.template, broadcast, example)
            self.path, self.why, made = "vmap", str(reason), general
            problem = general.problem(broadcast, self.x[:2], self.y[:2])
            if problem:
                self.path, self.why = "loop", f"{reason}; and torch.func cannot batch it: {problem}"
        log.info("the stacked engine takes the path %r: %s", self.path, self.why)
        self._held = None if self.path == "loop" else made
        return self._held

    def _train(self, stack: Stack, broadcast: Broadcast, members: list[int]) -> list[Update]:
        device, training = self.x.device, self.training
        shards = [self.shards[client] for client in members]
        sizes = [len(shard) for shard in shards]
        offsets = np.cumsum([0, *sizes[:-1]]).tolist()
        plan = schedule(sizes, offsets, members, training, seed=self.seed, round=broadcast.round)
        rows = torch.from_numpy(np.concatenate(shards))
        if not self.x.is_cuda and plan.index.numel() <= len(rows):  # none twice: lay them out in the steps' order
            rows, plan = rows[plan.index.flatten()], plan.in_order()
        rows = rows.to(device)
        x, y = stack.examples(self.x, rows), self.y.index_select(0, rows)
        words = [int(seeds.words(self.seed, "torch", broadcast.round, c, n=1)[0] >> np.uint64(1)) for c in members]
        params, losses = self._descend(stack, training.rate(broadcast.round), x, y, plan, words)
        steps = (plan.counts > 0).sum(dim=0)
        means = (losses.sum(dim=0).cpu() / steps).tolist()
        changes = stack.changes(params, broadcast)
        return [
            Update(
                broadcast.round,
                broadcast.plan.digest,
                {name: tensor[place] for name, tensor in changes.items()},
                training.counted(size),
                {"loss": mean},
            )
            for place, (size, mean) in enumerate(zip(sizes, means, strict=True))
        ]

    def _descend(
        self, stack: Stack, rate: float, x: Tensor, y: Tensor, plan: Schedule, words: list[int]
    ) -> tuple[Params, Tensor]:
        if x.is_cuda and isinstance(stack, StageStack):
            if self._captured is None or not self._captured.fits(stack, self.training, x, plan):
                self._captured = Captured(stack, self.training, x, y, plan)
            return self._captured.replay(rate, y, plan, words)
        trainer = Trainer(stack, self.training, rate, stack.fresh(plan.index.shape[1]), x, y, plan)
        return trainer.params, trainer.run(plan, words)


@contextmanager
def products(precision: str) -> Iterator[None]:
    """Allow or forbid TF32 in matrix products and convolutions for a while; bf16 allows neither."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
