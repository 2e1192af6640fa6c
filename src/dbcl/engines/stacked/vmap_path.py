"""General path: `torch.func` batches the client's model over the client axis."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dbcl._torch import BATCH_NORMS, DROPOUTS, quiet_vmap
from dbcl.blinding import copied
from dbcl.data.trees import call, call_with
from dbcl.engines.stacked.batch import Batch, Params
from dbcl.engines.stacked.dropout import all_kept
from dbcl.engines.stacked.path import MAX_CHUNK, Stack
from dbcl.engines.training import LocalTraining
from dbcl.model.parametrization import inner_name
from dbcl.model.tensors import fingerprint, named_tensors
from dbcl.objective import cross_entropies, cross_entropy
from dbcl.protocol import Broadcast, blinded

UNEQUAL = 0.01
"""Relative difference of two gradients above which rounding is excluded as the cause."""


class VmapStack(Stack):
    """Client's unmodified model, run for all clients by `torch.func.vmap`."""

    def __init__(self, template: nn.Module, broadcast: Broadcast) -> None:
        self.template, self.key = template, self._key(broadcast)
        self.sent: Broadcast | None = None
        self.clients = 1

    @staticmethod
    def _key(broadcast: Broadcast) -> object:
        return [(part.name, part.shape) for part in broadcast.plan.tensors]

    def fits(self, broadcast: Broadcast) -> bool:
        return self._key(broadcast) == self.key

    def shares(self, broadcast: Broadcast) -> object:
        return broadcast.plan.digest  # the sketches are in the model, so a chunk is of one lane

    def load(self, sent: Sequence[Broadcast]) -> None:
        self.clients = len(sent)
        if self.sent is sent[0]:
            return
        self.sent = sent[0]
        self.local = blinded(self.template, self.sent).train()
        self.inner = {
            part.name: inner_name(part.name) if part.sketched else part.name for part in self.sent.plan.tensors
        }

    def start(self) -> Params:
        own = {**dict(self.local.named_parameters()), **dict(self.local.named_buffers())}
        tensors = {name: own[inner].detach() for name, inner in self.inner.items()}
        return {name: tensor.expand(self.clients, *tensor.shape).clone() for name, tensor in tensors.items()}

    def trained_names(self, *, step_in_backward: bool) -> list[str]:
        trained = {name for name, parameter in self.local.named_parameters() if parameter.requires_grad}
        return [name for name, inner in self.inner.items() if inner in trained]

    def gradients(self, params: Params, x: Tensor, y: Tensor, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Return the losses and gradients of all clients. Clients with equal batch sizes are
        computed together.

        Batches are not padded: padding would affect the results of a model with interactions
        between examples.
        """
        counts = (batch.weight > 0).sum(dim=1)
        sizes = sorted(set(counts.tolist()) - {0})
        if bool((counts == y.shape[1]).all()):
            losses, grads = self._of_one_size(params, x, y)
            return losses, [grads[name] * batch.rate for name in grads]
        losses = batch.weight.new_zeros(len(counts))
        total = {name: torch.zeros_like(params[name]) for name in self.trained_names(step_in_backward=False)}
        for size in sizes:
            who = (counts == size).nonzero().flatten()
            own = {name: tensor[who] for name, tensor in params.items()}
            losses[who], grads = self._of_one_size(own, x[who, :size], y[who, :size])
            for name, grad in grads.items():
                total[name][who] = grad * batch.rate
        return losses, list(total.values())

    def _of_one_size(self, params: Params, x: Tensor, y: Tensor) -> tuple[Tensor, Params]:
        """Return the loss of every client, and the gradients of the `trained_names` in order."""
        names = self.trained_names(step_in_backward=False)
        trained = {self.inner[name]: params[name] for name in names}
        fixed = {self.inner[name]: tensor for name, tensor in params.items() if name not in names}

        def loss(trained: Params, fixed: Params, x: Tensor, y: Tensor) -> Tensor:
            return cross_entropies(call_with(self.local, {**trained, **fixed}, x), y).mean()

        with quiet_vmap():
            grads, losses = torch.func.vmap(torch.func.grad_and_value(loss))(trained, fixed, x, y)
        return losses, {name: grads[self.inner[name]] for name in names}

    def changes(self, params: Params, steps: Tensor) -> Params:
        assert self.sent is not None
        sent = self.sent.tensors
        return {name: (tensor - sent[name].to(tensor)).to(sent[name]) for name, tensor in params.items()}

    def chunk_size(self, training: LocalTraining, sent: Mapping[int, Broadcast]) -> int:
        return len(sent) if next(iter(self.template.parameters())).is_cuda else min(len(sent), MAX_CHUNK)

    def problem(self, broadcast: Broadcast, x: Tensor, y: Tensor) -> str | None:
        """Return the reason why `torch.func` cannot run this model, or None.

        The check compares a `torch.func` step of two clients with plain PyTorch as the reference.
        """
        for name, module in self.template.named_modules():
            if isinstance(module, (*DROPOUTS, *BATCH_NORMS)):
                return f"{name} ({type(module).__name__}) draws or counts for each client by itself"
        buffers = {name for name, _ in self.template.named_buffers()}
        for part in broadcast.plan.tensors:
            if part.name in buffers:
                return f"{part.name} is a buffer, which each client changes by itself"
        self.load([broadcast] * 2)
        plain = copied(self.local)
        before = state_of(plain)
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            cross_entropy(call(plain, x), y).backward()  # type: ignore[no-untyped-call]
        moved = changed(before, state_of(plain))
        if moved:
            return f"{moved[0]} changes with every forward pass"
        like = next(iter(self.local.parameters())).detach()
        weight = like.new_full((2, len(x)), 1 / len(x))
        batch = Batch(2, weight, all_kept(weight), like.new_ones(()))
        try:
            losses, grads = self.gradients(self.start(), torch.stack([x, x]), torch.stack([y, y]), batch)
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            return str(error).split("\n")[0]
        if losses.requires_grad:
            return "it uses a parameter that is not where PyTorch would look for it"
        own = {name: plain.get_parameter(self.inner[name]) for name in self.trained_names(step_in_backward=False)}
        expected = [torch.zeros_like(each) if each.grad is None else each.grad.to_dense() for each in own.values()]
        rounding = torch.finfo(like.dtype).eps ** 0.5 * max((float(grad.norm()) for grad in expected), default=0.0)
        for name, found, grad in zip(own, grads, expected, strict=True):
            if float((found - grad).reshape(2, -1).norm(dim=1).max()) > UNEQUAL * float(grad.norm()) + rounding:
                return f"its gradient of {name} is not that of plain PyTorch"
        return None


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return the state that a forward pass may change: copies of parameters and buffers, and plain
    attributes.
    """
    state: dict[str, Any] = {name: tensor.detach().clone() for name, tensor in named_tensors(model).items()}
    state |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    for path, module in model.named_modules():
        plain = {name: value for name, value in vars(module).items() if isinstance(value, int | float | str | tuple)}
        state |= {f"{path}.{name}".lstrip("."): value for name, value in plain.items()}
    return state


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the names that differ between two results of `state_of`.

    >>> model = nn.BatchNorm1d(2)
    >>> before = state_of(model)
    >>> _ = model(torch.ones(3, 2))
    >>> changed(before, state_of(model))
    ['running_mean', 'running_var', 'num_batches_tracked']
    """
    return [name for name, value in after.items() if name not in before or not _same(before[name], value)]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and fingerprint(one) == fingerprint(other)
    return repr(one) == repr(other)
