"""Local SGD for all clients of a chunk at once: which examples each step takes, and the steps."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dbcl.engines.stacked.layers import Batch, Noise, Params
from dbcl.engines.stacked.stage_path import Stack, StageStack
from dbcl.engines.training import LocalTraining


@dataclass(frozen=True)
class Schedule:
    """Which examples every client of a chunk takes in every step.

    `index` is (steps, clients, batch) into the chunk's examples, `weight` the same with 1 / n for the n examples of a
    batch and 0 where it is padding; a client that has fewer steps than the others has weight 0 in the rest.
    """

    index: Tensor
    weight: Tensor
    counts: Tensor  # (steps, clients): how many examples each batch has
    full: bool
    ordered: bool = False

    def in_order(self) -> "Schedule":
        """The same steps for examples that lie in the order in which the steps take them."""
        return replace(self, index=torch.arange(self.index.numel()).view_as(self.index), ordered=True)

    @property
    def steps(self) -> int:
        return len(self.index)


def schedule(
    sizes: list[int], offsets: list[int], clients: list[int], training: LocalTraining, *, seed: bytes, round: int
) -> Schedule:
    """Lay out the batches that `LocalTraining.batches` gives each client, side by side."""
    plans = [
        list(training.batches(size, seed=seed, round=round, client=client))
        for size, client in zip(sizes, clients, strict=True)
    ]
    steps, width = max(map(len, plans)), max(len(plan[0]) for plan in plans)
    index = np.empty((steps, len(clients), width), dtype=np.int64)
    counts = np.zeros((steps, len(clients)), dtype=np.int64)
    for place, (plan, offset) in enumerate(zip(plans, offsets, strict=True)):
        index[:, place] = offset
        counts[: len(plan), place] = [len(batch) for batch in plan]
        index[:, place][np.arange(width) < counts[:, place, None]] += np.concatenate(plan)
    weight = (np.arange(width) < counts[..., None]) / np.maximum(counts, 1)[..., None]
    full = bool((counts == width).all())
    return Schedule(torch.from_numpy(index), torch.from_numpy(weight), torch.from_numpy(counts), full)


class Trainer:
    """Local SGD for all clients of a chunk: the memory of its steps, and the step itself.

    On a GPU the step is captured in a CUDA graph and replayed; everything that changes from step to step or from round
    to round is read from memory that stays in place.
    """

    def __init__(
        self, stack: Stack, training: LocalTraining, rate: float, params: Params, x: Tensor, y: Tensor, plan: Schedule
    ) -> None:
        self.stack, self.training, self.params, self.x = stack, training, params, x
        self.clients, self.full = plan.index.shape[1], plan.full
        like = next(iter(params.values()))  # the examples may be whole numbers, such as words
        self.rate = like.new_tensor(rate)
        self.anchor = like.new_zeros((), requires_grad=True) if stack.descends(training) else None
        self.trained = stack.trained(descending=self.anchor is not None)
        self.sent = {name: params[name].clone() for name in self.trained} if training.proximal else {}
        self.speed = {name: torch.zeros_like(params[name]) for name in self.trained} if training.momentum else {}
        self.places = plan.index.flatten(1).to(x.device)  # (steps, clients * batch)
        self.labels = y[plan.index.to(x.device)]  # (steps, clients, batch)
        self.weight = plan.weight.to(like)

    def inputs(self, places: Tensor) -> Tensor:
        """The examples at these places, (clients, batch, ...)."""
        return self.x.index_select(0, places).view(self.clients, -1, *self.x.shape[1:])

    def step(self, inputs: Tensor, labels: Tensor, weight: Tensor, noise: Noise) -> Tensor:
        """One step of every client; gives their losses before it."""
        training = self.training
        batch = Batch(self.clients, weight, noise, self.rate, self.anchor)
        losses, grads = self.stack.gradients(self.params, inputs, labels, batch)
        active = None if self.full else (weight.amax(dim=1) > 0).to(weight.dtype)
        with torch.no_grad():
            for name, grad in zip(self.trained, grads, strict=True):
                parameter = self.params[name]
                if training.proximal:
                    grad = grad + (parameter - self.sent[name]) * (self.rate * training.proximal)
                if training.momentum:
                    grad = self.speed[name].mul_(training.momentum).add_(grad)
                if active is not None:
                    grad = grad * active.view(-1, *(1,) * (grad.ndim - 1))  # a client that is done stands still
                parameter.sub_(grad)
        return losses

    def run(self, plan: Schedule, words: list[int]) -> Tensor:
        """All steps; gives the losses, (steps, clients)."""
        noises = dropout_noise(plan.counts, plan.index.shape[2], words, self.weight)
        ordered = self.x.view(*plan.index.shape, *self.x.shape[1:]) if plan.ordered else map(self.inputs, self.places)
        steps = zip(ordered, self.labels, self.weight, map(noises, range(plan.steps)), strict=True)
        return torch.stack([self.step(*each) for each in steps])


class Captured:
    """A trainer whose step is a CUDA graph, kept from round to round as long as no shape and no setting changes."""

    def __init__(self, stack: StageStack, training: LocalTraining, x: Tensor, y: Tensor, plan: Schedule) -> None:
        self.key = self._key(stack, training, x, plan)
        self.stack = stack
        self.trainer = Trainer(stack, training, 0.0, stack.fresh(plan.index.shape[1]), x, y, plan)
        self.losses = self.trainer.weight.new_zeros(plan.index.shape[:2])  # (steps, clients)
        self.number = torch.zeros(1, dtype=torch.int64, device=x.device)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries set themselves up in the first calls, which may not be captured
            for _ in range(2):
                self._body()
                self.number.zero_()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._body()

    @staticmethod
    def _key(stack: StageStack, training: LocalTraining, x: Tensor, plan: Schedule) -> object:
        return stack.addresses(), training, x.data_ptr(), x.shape[1:], plan.index.shape, plan.full

    def fits(self, stack: StageStack, training: LocalTraining, x: Tensor, plan: Schedule) -> bool:
        return stack is self.stack and self._key(stack, training, x, plan) == self.key

    def _body(self) -> None:
        trainer = self.trainer
        places, labels, weight = (
            table.index_select(0, self.number)[0] for table in (trainer.places, trainer.labels, trainer.weight)
        )
        noise = _device_noise(trainer.clients, weight)
        losses = trainer.step(trainer.inputs(places), labels, weight, noise)
        self.losses.index_copy_(0, self.number, losses.unsqueeze(0))
        self.number.add_(1)

    def replay(self, rate: float, y: Tensor, plan: Schedule, words: list[int]) -> tuple[Params, Tensor]:
        trainer = self.trainer
        trainer.rate.fill_(rate)
        for name, tensor in self.stack.sent.items():
            trainer.params[name].copy_(tensor)
        for name, tensor in trainer.sent.items():
            tensor.copy_(self.stack.sent[name])
        for tensor in trainer.speed.values():
            tensor.zero_()
        index = plan.index.to(y.device)
        trainer.places.copy_(index.flatten(1))
        trainer.labels.copy_(y[index])
        trainer.weight.copy_(plan.weight)
        self.number.zero_()
        with torch.random.fork_rng(devices=[y.device]):
            torch.cuda.manual_seed(words[0])
            for _ in range(plan.steps):
                self.graph.replay()
        return trainer.params, self.losses


def dropout_noise(counts: Tensor, width: int, words: list[int], like: Tensor) -> Callable[[int], Noise]:
    """Dropout masks: on a CPU the very ones that `LocalEngine` draws, from one generator for each client."""
    generators = [torch.Generator().manual_seed(word) for word in words]

    def at(step: int) -> Noise:
        def mask(shape: tuple[int, ...], p: float) -> Tensor:
            out = torch.ones(len(words), width, *shape, dtype=like.dtype)
            for client, generator in enumerate(generators):
                count = int(counts[step, client])
                if count:
                    drawn = torch.empty(count, *shape, dtype=like.dtype).bernoulli_(1 - p, generator=generator)
                    out[client, :count] = drawn / (1 - p)
            return out.to(like.device)

        return mask

    return at


def _device_noise(clients: int, weight: Tensor) -> Noise:
    """Dropout masks from the GPU's own generator: not those of the CPU, but repeatable on the same kind of GPU."""

    def mask(shape: tuple[int, ...], p: float) -> Tensor:
        return F.dropout(weight.new_ones(clients, weight.shape[1], *shape), p)

    return mask
