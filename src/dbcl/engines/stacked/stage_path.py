"""A client's network with a client axis: by stages where it is a plain stack, by `torch.func` where it is not."""

import warnings

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dbcl.engines.stacked import layers as stages
from dbcl.engines.stacked.layers import Batch, Params, Stage
from dbcl.engines.training import LocalTraining
from dbcl.protocol import Broadcast, blinded

CACHE_BYTES = 16 << 20
"""On a CPU a chunk of clients may touch about this much in a step: more, and memory sets the pace."""
BLOCK = 500
"""How many examples are sketched together."""
MOST = 10
"""More clients than this in a chunk gain nothing on a CPU."""


class Stack:
    """A network with a client axis: what a path supplies to the training loop."""

    def fits(self, broadcast: Broadcast) -> bool:
        raise NotImplementedError

    def load(self, broadcast: Broadcast) -> None:
        raise NotImplementedError

    def fresh(self, clients: int) -> Params:
        """Every client's copy of what was sent, by name."""
        raise NotImplementedError

    def trained(self, *, descending: bool) -> list[str]:
        """The names that the training loop moves: not buffers, and not what descends in the backward pass."""
        raise NotImplementedError

    def descends(self, training: LocalTraining) -> bool:
        """Whether steps happen inside the backward pass: where the training is plain SGD and the path knows how."""
        return False

    def examples(self, x: Tensor, rows: Tensor) -> Tensor:
        """These rows of the data, as the first layer wants them."""
        return x.index_select(0, rows)

    def gradients(self, params: Params, x: Tensor, y: Tensor, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """The loss of every client, and `batch.rate` times the gradients of what the loop moves, as in `trained`."""
        raise NotImplementedError

    def changes(self, params: Params, broadcast: Broadcast) -> Params:
        """How every tensor of the plan has changed, in the dtype that it was sent in."""
        raise NotImplementedError

    def fitting_chunk(self, training: LocalTraining, clients: int) -> int:
        raise NotImplementedError


class StageStack(Stack):
    """The fast path: the network as a list of stages."""

    def __init__(self, template: nn.Module, broadcast: Broadcast, example: Tensor, *, bf16: bool = False) -> None:
        self.bf16 = bf16
        self.stages: list[Stage] = stages.build(template, broadcast.plan, example.ndim - 1)
        self.buffers = {name for name, _ in template.named_buffers()}
        self.frozen = {name for name, p in template.named_parameters() if not p.requires_grad}
        self.holder = {name: stage for stage in self.stages for name in stage.names}
        self.example, self.like = example, next(iter(template.parameters())).detach().new_empty(0)
        self.key = self._key(broadcast)
        self.first = self._presketched()
        self.room: Tensor | None = None  # for the examples of a chunk, kept from chunk to chunk
        self.by_hand = not bf16 and all(
            isinstance(stage, stages.Linear) or (isinstance(stage, stages.Apply) and type(stage.layer) is nn.ReLU)
            for stage in self.stages
        )
        self.activations: int | None = None

    @staticmethod
    def _key(broadcast: Broadcast) -> object:
        return [(part.name, part.shape, part.scheme) for part in broadcast.plan.tensors]

    def fits(self, broadcast: Broadcast) -> bool:
        return self._key(broadcast) == self.key

    def _presketched(self) -> stages.Linear | None:
        """The first layer, where its input is the data themselves: they are sketched once for the whole round."""
        for place, stage in enumerate(self.stages):
            if isinstance(stage, stages.Linear) and (place > 0 or self.example.ndim == 2):
                self.stages = self.stages[place:]
                stage.presketched = True
                return stage
            if not isinstance(stage, stages.Flatten):
                return None
        return None

    def addresses(self) -> list[int]:
        """Where the tables of the sketches lie; a captured graph reads them there."""
        tables = [stage.tables for stage in self.stages if isinstance(stage, stages.Linear | stages.Conv2d)]
        return [table.data_ptr() for held in tables if held is not None for table in held.tensors()]

    def load(self, broadcast: Broadcast) -> None:
        for stage in self.stages:
            stage.load(broadcast.plan.sketches, self.like)
        # A layer's rows may follow the order of the next one's sketch, so all tables come first.
        self.sent = {
            name: stage.pack(name, broadcast.tensors[name].to(self.like)) for name, stage in self.holder.items()
        }

    def fresh(self, clients: int) -> Params:
        return {name: tensor.expand(clients, *tensor.shape).clone() for name, tensor in self.sent.items()}

    def trained(self, *, descending: bool) -> list[str]:
        moving = [name for name in self.holder if name not in self.buffers and name not in self.frozen]
        return [name for name in moving if not (descending and self.holder[name].descends)]

    def descends(self, training: LocalTraining) -> bool:
        return not (training.momentum or training.proximal or self.frozen or self.bf16)

    def examples(self, x: Tensor, rows: Tensor) -> Tensor:
        tables = None
        if self.first is not None:
            x, tables = x.flatten(1), self.first.tables
        shape = x.shape[1:] if tables is None else tables.gain.shape
        total = len(rows)
        if self.room is None or len(self.room) < total or self.room.shape[1:] != shape:
            self.room = x.new_empty(total, *shape)
        if tables is None:
            torch.index_select(x, 0, rows, out=self.room[:total])
        else:
            for start in range(0, total, BLOCK):  # so that the unsketched examples stay in the cache
                own = rows[start : start + BLOCK]
                tables.project_into(self.room[start : start + len(own)], x.index_select(0, own))
        return self.room[:total]

    def forward(self, params: Params, x: Tensor, batch: Batch) -> Tensor:
        h = x
        for stage in self.stages:
            h = stage.forward(h, params, batch)
        return h

    def gradients(self, params: Params, x: Tensor, y: Tensor, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        if batch.anchor is not None and self.by_hand and x.ndim == 3:
            return self._by_hand(params, x, y, batch), []
        wanted = [params[name].requires_grad_() for name in self.trained(descending=batch.anchor is not None)]
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            logits = self.forward(params, x, batch)
        losses = weighted_losses(logits.to(x.dtype), y, batch.weight)
        anchor = [batch.anchor] if batch.anchor is not None else []
        grads = torch.autograd.grad(losses.sum() * batch.rate, wanted + anchor, allow_unused=True)
        for parameter in wanted:
            parameter.requires_grad_(False)
        return losses.detach(), list(grads[: len(wanted)])

    @torch.no_grad()
    def _by_hand(self, params: Params, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        """One step of a stack of dense layers and ReLUs without autograd, whose bookkeeping would cost a third."""
        tape = []
        h = x
        with np.errstate(over="ignore", invalid="ignore"):  # a client that diverges is refused at the server's door
            for stage in self.stages:
                if isinstance(stage, stages.Linear):
                    h = stage.enter(h)
                    out = stage.product_by_hand(h, params)
                else:
                    out = h.relu_()
                tape.append((stage, h, out))
                h = out
        losses, grad = losses_and_slope(h, y, batch.weight, batch.rate)
        for stage, saved, out in reversed(tape):
            grad = stage.back(grad, saved, out, params)  # type: ignore[assignment]
        return losses

    def changes(self, params: Params, broadcast: Broadcast) -> Params:
        moved = {}
        for name, stage in self.holder.items():
            change = stage.unpack(name, params[name] - self.sent[name])
            moved[name] = change.to(broadcast.tensors[name])
        return {part.name: moved[part.name] for part in broadcast.plan.tensors}

    def fitting_chunk(self, training: LocalTraining, clients: int) -> int:
        if self.like.is_cuda:
            return clients
        if self.activations is None:
            self.activations = self._touched(training.batch_size)
        return max(1, min(clients, MOST, CACHE_BYTES // max(1, self.activations)))

    def _touched(self, batch_size: int) -> int:
        """Bytes that one client's step touches: parameters and gradients, and every stage's output both ways."""
        params = self.fresh(1)
        total = 2 * sum(tensor.numel() for tensor in params.values())
        x = self.examples(self.example, torch.zeros(batch_size, dtype=torch.int64))
        weight = torch.full((1, batch_size), 1 / batch_size, dtype=x.dtype)
        batch = Batch(1, weight, lambda shape, p: torch.ones(1, batch_size, *shape, dtype=x.dtype), self.like)
        h = x.unsqueeze(0)
        with torch.no_grad():
            for stage in self.stages:
                h = stage.forward(h, params, batch)
                total += 2 * h.numel()
        return total * self.like.element_size()


class VmapStack(Stack):
    """The general path: `torch.func` batches the client's own model over the client axis."""

    def __init__(self, template: nn.Module, broadcast: Broadcast, example: Tensor) -> None:
        self.template, self.key = template, [(part.name, part.shape) for part in broadcast.plan.tensors]

    def fits(self, broadcast: Broadcast) -> bool:
        return [(part.name, part.shape) for part in broadcast.plan.tensors] == self.key

    def load(self, broadcast: Broadcast) -> None:
        self.local = blinded(self.template, broadcast).train()
        # A covered weight lives under its parametrization's name; the plan's names are those of the messages.
        covered = broadcast.plan.sketches
        self.inner = {
            part.name: "{}parametrizations.{}.original".format(*_split(part.name))
            if part.name in covered
            else part.name
            for part in broadcast.plan.tensors
        }

    def fresh(self, clients: int) -> Params:
        own = {**dict(self.local.named_parameters()), **dict(self.local.named_buffers())}
        return {n: own[inner].detach().expand(clients, *own[inner].shape).clone() for n, inner in self.inner.items()}

    def trained(self, *, descending: bool) -> list[str]:
        moving = {name for name, parameter in self.local.named_parameters() if parameter.requires_grad}
        return [name for name, inner in self.inner.items() if inner in moving]

    def gradients(self, params: Params, x: Tensor, y: Tensor, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        trained = self.trained(descending=False)
        still = {self.inner[name]: tensor for name, tensor in params.items() if name not in trained}

        def one(moving: Params, still: Params, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            logits = torch.func.functional_call(self.local, {**moving, **still}, (x,))
            return weighted_losses(logits.unsqueeze(0), y.unsqueeze(0), weight.unsqueeze(0))[0]

        moving = {self.inner[name]: params[name] for name in trained}
        grads, losses = torch.func.vmap(torch.func.grad_and_value(one))(moving, still, x, y, batch.weight)
        return losses, [grads[self.inner[name]] * batch.rate for name in trained]

    def changes(self, params: Params, broadcast: Broadcast) -> Params:
        sent = broadcast.tensors
        return {name: (tensor - sent[name].to(tensor)).to(sent[name]) for name, tensor in params.items()}

    def fitting_chunk(self, training: LocalTraining, clients: int) -> int:
        return clients if next(iter(self.local.parameters())).is_cuda else min(clients, MOST)

    def problem(self, broadcast: Broadcast, x: Tensor, y: Tensor) -> str | None:
        """Why this model cannot go through `torch.func`; found by trying one step of one client and of two."""
        for name, module in self.template.named_modules():
            if isinstance(module, nn.modules.dropout._DropoutNd | nn.modules.batchnorm._BatchNorm):
                return f"{name} ({type(module).__name__}) draws or counts for each client by itself"
        self.load(broadcast)
        like = next(iter(self.local.parameters())).detach()
        weight = like.new_full((2, len(x)), 1 / len(x))
        batch = Batch(2, weight, lambda shape, p: like.new_ones(2, len(x), *shape), like.new_ones(()))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.gradients(self.fresh(2), torch.stack([x, x]), torch.stack([y, y]), batch)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            return str(error).split("\n")[0]
        return None


def weighted_losses(logits: Tensor, y: Tensor, weight: Tensor) -> Tensor:  # (c, b, k), (c, b), (c, b) -> (c,)
    """`models.loss` of every client: the mean over the examples of its batch that count."""
    flat = logits.flatten(0, 1)
    if flat.shape[-1] == 1:
        each = F.binary_cross_entropy_with_logits(flat.squeeze(-1), y.flatten().to(flat.dtype), reduction="none")
    else:
        each = F.cross_entropy(flat, y.flatten(), reduction="none")
    return (each.view(weight.shape) * weight).sum(dim=1)


def losses_and_slope(logits: Tensor, y: Tensor, weight: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """`weighted_losses`, and `rate` times the derivative of their sum by the logits."""
    if logits.shape[-1] == 1:
        flat = logits.squeeze(-1)
        each = F.binary_cross_entropy_with_logits(flat, y.to(flat.dtype), reduction="none")
        return (each * weight).sum(dim=1), ((flat.sigmoid() - y) * (weight * rate)).unsqueeze(-1)
    logp = F.log_softmax(logits, dim=-1)
    label = y.unsqueeze(-1)
    losses = -(logp.gather(-1, label).squeeze(-1) * weight).sum(dim=1)
    slope = logp.exp_()
    slope.scatter_add_(-1, label, slope.new_full((), -1.0).expand_as(label))
    return losses, slope.mul_((weight * rate).unsqueeze(-1))


def _split(name: str) -> tuple[str, str]:
    path, dot, last = name.rpartition(".")
    return path + dot, last
