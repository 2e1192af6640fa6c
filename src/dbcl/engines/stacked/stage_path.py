"""Fast path for a sequence of supported layers, converted to a list of stages."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from dbcl.blinding import check_module
from dbcl.engines.stacked.batch import Batch, Params
from dbcl.engines.stacked.build import build_stages, where_hooked
from dbcl.engines.stacked.dropout import all_kept
from dbcl.engines.stacked.layers import Apply, BatchNorm, Conv2d, Flatten, Lanes, Stage
from dbcl.engines.stacked.linear import Linear
from dbcl.engines.stacked.path import MAX_CHUNK, Stack, weighted_losses
from dbcl.engines.training import LocalTraining
from dbcl.errors import ConfigError
from dbcl.model.norm_stats import is_statistic, own_part
from dbcl.model.tensors import named_tensors
from dbcl.objective import cross_entropies_and_gradients
from dbcl.privacy import clip_factors
from dbcl.protocol import Broadcast

CACHE_BYTES = 16 << 20
"""Maximum number of bytes that a chunk accesses in a step on a CPU. Larger chunks are limited by
memory bandwidth.
"""
SKETCH_BLOCK = 500
"""Number of examples sketched together on a CPU, chosen to fit the cache."""


class StageStack(Stack):
    """Network as a list of stages. With `bf16`, products run under autocast to bfloat16."""

    def __init__(self, template: nn.Module, broadcast: Broadcast, example: Tensor, *, bf16: bool = False) -> None:
        self.template, self.example, self.bf16 = template, example, bf16
        check_module(template, broadcast.plan)
        self.stages: list[Stage] = build_stages(template, broadcast.plan, example.ndim - 1)
        self.buffers = {name for name, _ in template.named_buffers()}
        self.not_sent = {name: tensor.detach() for name, tensor in named_tensors(template).items()}
        asked = {part.name for part in broadcast.plan.tensors}
        self.frozen = {n for n, p in template.named_parameters() if not p.requires_grad or n not in asked}
        self.stage_of = {name: stage for stage in self.stages for name in stage.names}
        self.like = next(iter(template.parameters())).detach().new_empty(0)
        self.key = self._key(broadcast)
        self.presketched = self._presketch()
        self.manual = not bf16 and all(
            isinstance(stage, Linear) or (isinstance(stage, Apply) and type(stage.layer) is nn.ReLU)
            for stage in self.stages
        )
        self.sent: Params = {}  # what each lane was sent, in the stages' layout, with a leading axis for the lanes
        self.broadcasts: list[Broadcast] = []  # of the chunk's clients
        self.lane_of = torch.zeros(1, dtype=torch.int64, device=self.like.device)  # each client's place in `sent`
        self.example_memory: Tensor | None = None  # holds the examples of one chunk after another
        self.step_bytes: int | None = None

    @staticmethod
    def _key(broadcast: Broadcast) -> object:
        return [(part.name, part.shape, part.scheme) for part in broadcast.plan.tensors]

    def fits(self, broadcast: Broadcast) -> bool:
        return self._key(broadcast) == self.key and where_hooked(self.template) is None

    def _presketch(self) -> Linear | None:
        """Return the first layer if its input is the data, which can be sketched once for the whole
        round.
        """
        for place, stage in enumerate(self.stages):
            if isinstance(stage, Linear) and (place > 0 or self.example.ndim == 2):
                self.stages = self.stages[place:]
                stage.presketched = True
                return stage
            if not isinstance(stage, Flatten):
                return None
        return None

    def addresses(self) -> list[int]:
        """Return the memory addresses of the index tables, which a captured graph reads."""
        tables = [stage.tables for stage in self.stages if isinstance(stage, Linear | Conv2d)]
        return [tensor.data_ptr() for own in tables if own is not None for tensor in own.tensors()]

    def clips_examples(self, training: LocalTraining) -> bool:
        rows = self.presketched is not None or self.example.ndim == 2
        return self.manual and rows and self.can_step_in_backward(training)

    @property
    def small(self) -> bool:
        """Return whether the kernels of a step are too short for multithreading: on a CPU, if all
        layers are dense.
        """
        return self.manual and not self.like.is_cuda

    def shares(self, broadcast: Broadcast) -> object:
        return broadcast.plan.seed  # lanes that share their buckets differ in weights alone

    def load(self, sent: Sequence[Broadcast]) -> None:
        if list(map(id, sent)) == list(map(id, self.broadcasts)):
            return
        self.broadcasts = list(sent)
        lanes = list({id(broadcast): broadcast for broadcast in sent}.values())
        places = {id(broadcast): place for place, broadcast in enumerate(lanes)}
        self.lane_of = torch.tensor([places[id(broadcast)] for broadcast in sent], device=self.like.device)
        sketches = Lanes([broadcast.plan.sketches for broadcast in lanes], self.lane_of)
        for stage in self.stages:
            stage.load(sketches, self.like)
        # After all tables are there: a layer's outputs may follow the order of the next one's sketch.
        tensors = [{**self.not_sent, **broadcast.tensors} for broadcast in lanes]
        self.sent = {
            name: torch.stack([stage.pack(name, each[name].to(self.like)) for each in tensors])
            for name, stage in self.stage_of.items()
        }

    def start(self) -> Params:
        return {name: tensor.index_select(0, self.lane_of) for name, tensor in self.sent.items()}

    def trained_names(self, *, step_in_backward: bool) -> list[str]:
        trained = [name for name in self.stage_of if name not in self.buffers and name not in self.frozen]
        return [name for name in trained if not (step_in_backward and self.stage_of[name].steps_in_backward)]

    def can_step_in_backward(self, training: LocalTraining) -> bool:
        return not (training.momentum or training.proximal or self.frozen or self.bf16)

    def examples(self, x: Tensor, rows: Tensor, clients: Tensor) -> Tensor:
        tables = None
        if self.presketched is not None:
            x, tables = x.flatten(1), self.presketched.tables
        shape = x.shape[1:] if tables is None else tables.gain.shape
        total, memory = len(rows), self.example_memory
        if memory is None or len(memory) < total or memory.shape[1:] != shape:
            memory = self.example_memory = x.new_empty(total, *shape)
        if tables is None:
            torch.index_select(x, 0, rows, out=memory[:total])
        else:
            block = total if x.is_cuda else SKETCH_BLOCK
            for start in range(0, total, block):
                end = min(start + block, total)
                whose = clients[start:end] if tables.lift_weight.ndim > 1 else None
                tables.project_into(memory[start:end], x.index_select(0, rows[start:end]), whose)
        return memory[:total]

    def gradients(self, params: Params, x: Tensor, y: Tensor, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        if batch.step_in_backward and self.manual and x.ndim == 3:
            return self._manual_step(params, x, y, batch), []
        assert batch.example_clip is None  # only the step above clips; `clips_examples` says when it is taken
        names = self.trained_names(step_in_backward=batch.step_in_backward)
        trained = [params[name].requires_grad_() for name in names]
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            h = x
            for stage in self.stages:
                h = stage.forward(h, params, batch)
        losses = weighted_losses(h.to(x.dtype), y, batch.weight)
        leaves = trained if batch.dummy_leaf is None else [*trained, batch.dummy_leaf]
        grads = torch.autograd.grad(losses.sum() * batch.rate, leaves, allow_unused=True)
        for parameter in trained:
            parameter.requires_grad_(False)
        return losses.detach(), list(grads[: len(trained)])

    @torch.no_grad()
    def _manual_step(self, params: Params, x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        """Perform an SGD step of dense layers and ReLUs without autograd, whose overhead is a third
        of the time.
        """
        tape = []
        h = x
        with np.errstate(over="ignore", invalid="ignore"):  # the server refuses the update of a client that diverges
            for stage in self.stages:
                if isinstance(stage, Linear):
                    h = stage.sketch_input(h)
                    out = stage.manual_forward(h, params)
                else:
                    out = h.relu_()
                tape.append((stage, h, out))
                h = out
        each, grad = cross_entropies_and_gradients(h, y)
        factor = batch.weight
        if batch.example_clip is not None:
            factor = self._clipped(grad, tape, params, batch)
            # An example without a finite gradient counts as none: it must not take the others' with it.
            each, grad = each.nan_to_num(0.0, 0.0, 0.0), grad.nan_to_num(0.0, 0.0, 0.0)
            tape = [(stage, saved.nan_to_num(0.0, 0.0, 0.0), out) for stage, saved, out in tape]
        grad.mul_((factor * batch.rate).unsqueeze(-1))
        for stage, saved, out in reversed(tape):
            grad = stage.manual_backward(grad, saved, out, params)  # type: ignore[assignment]
        return (each * batch.weight).sum(dim=1)

    @staticmethod
    def _clipped(grad: Tensor, tape: Sequence[tuple[Stage, Tensor, Tensor]], params: Params, batch: Batch) -> Tensor:
        """Return the clipping factor of each example's gradient; 0 for padding.

        For a dense layer, the gradient of one example is the outer product of its input and its
        output gradient. Its norm follows from their norms without materialising the gradient.
        """
        squares = torch.zeros_like(batch.weight)
        for stage, saved, out in reversed(tape):
            if isinstance(stage, Linear):
                squares += grad.square().sum(-1) * (saved.square().sum(-1) + stage.has_bias)
            grad = stage.input_gradient(grad, out, params)
        assert batch.example_clip is not None
        return clip_factors(squares, batch.example_clip) * (batch.weight > 0)

    def check(self, counts: Tensor) -> None:
        for stage in self.stages:
            if isinstance(stage, BatchNorm) and stage.places == 1 and bool((counts == 1).any()):
                raise ConfigError(
                    f"{stage.prefix[:-1]}: a batch of one example has no variance to normalise by; choose a batch size "
                    "that leaves no single example, or another normalisation"
                )

    def changes(self, params: Params, steps: Tensor) -> Params:
        changed, sent = {}, self.start()
        broadcast = self.broadcasts[0]  # all lanes have the same names and dtypes
        for name, stage in self.stage_of.items():
            if name in self.frozen:
                continue
            if isinstance(stage, BatchNorm) and is_statistic(name):
                batches = steps.to(self.like).unsqueeze(1)
                change = own_part(params[name], sent[name], stage.layer.momentum, batches)
                change = change.clamp(min=0) if name.endswith("running_var") else change
            else:
                change = stage.unpack(name, params[name] - sent[name])
            changed[name] = change.to(broadcast.tensors[name])
        return {part.name: changed[part.name] for part in broadcast.plan.tensors}

    def chunk_size(self, training: LocalTraining, sent: Mapping[int, Broadcast]) -> int:
        if self.like.is_cuda:
            return len(sent)
        if self.step_bytes is None:
            self.load([next(iter(sent.values()))])
            self.step_bytes = self._bytes_touched(training.batch_size)
        return max(1, min(len(sent), MAX_CHUNK, CACHE_BYTES // max(1, self.step_bytes)))

    def _bytes_touched(self, batch_size: int) -> int:
        """Return the bytes that one client's step accesses: parameters, stage outputs, and the
        gradients of both.
        """
        params = self.start()  # of the one client that is loaded
        total = 2 * sum(tensor.numel() for tensor in params.values())
        first = torch.zeros(batch_size, dtype=torch.int64)
        x = self.examples(self.example, first, first)
        weight = torch.full((1, batch_size), 1 / batch_size, dtype=x.dtype)
        batch = Batch(1, weight, all_kept(weight), self.like)
        h = x.unsqueeze(0)
        with torch.no_grad():
            for stage in self.stages:
                h = stage.forward(h, params, batch)
                total += 2 * h.numel()
        return total * self.like.element_size()
