"""The general path: `torch.func` batches the client's own model over the client axis."""

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dbcl._torch import BATCH_NORMS, DROPOUTS
from dbcl.data.trees import call_with
from dbcl.engines.stacked.batch import Batch, Params
from dbcl.engines.stacked.dropout import all_kept
from dbcl.engines.stacked.path import MAX_CHUNK, Stack, weighted_losses
from dbcl.engines.training import LocalTraining
from dbcl.nn import inner_name
from dbcl.protocol import Broadcast, blinded


class VmapStack(Stack):
    """A client's model as it is, run for all clients by `torch.func.vmap`."""

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
        names = self.trained_names(step_in_backward=False)
        trained = {self.inner[name]: params[name] for name in names}
        fixed = {self.inner[name]: tensor for name, tensor in params.items() if name not in names}

        def loss(trained: Params, fixed: Params, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            logits = call_with(self.local, {**trained, **fixed}, x)
            return weighted_losses(logits.unsqueeze(0), y.unsqueeze(0), weight.unsqueeze(0))[0]

        grads, losses = torch.func.vmap(torch.func.grad_and_value(loss))(trained, fixed, x, y, batch.weight)
        return losses, [grads[self.inner[name]] * batch.rate for name in names]

    def changes(self, params: Params, steps: Tensor) -> Params:
        assert self.sent is not None
        sent = self.sent.tensors
        return {name: (tensor - sent[name].to(tensor)).to(sent[name]) for name, tensor in params.items()}

    def chunk_size(self, training: LocalTraining, sent: Mapping[int, Broadcast]) -> int:
        return len(sent) if next(iter(self.template.parameters())).is_cuda else min(len(sent), MAX_CHUNK)

    def problem(self, broadcast: Broadcast, x: Tensor, y: Tensor) -> str | None:
        """Why this model cannot go through `torch.func`, found by trying a step of two clients; None where it can."""
        for name, module in self.template.named_modules():
            if isinstance(module, (*DROPOUTS, *BATCH_NORMS)):
                return f"{name} ({type(module).__name__}) draws or counts for each client by itself"
        self.load([broadcast] * 2)
        like = next(iter(self.local.parameters())).detach()
        weight = like.new_full((2, len(x)), 1 / len(x))
        batch = Batch(2, weight, all_kept(weight), like.new_ones(()))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.gradients(self.start(), torch.stack([x, x]), torch.stack([y, y]), batch)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            return str(error).split("\n")[0]
        return None
