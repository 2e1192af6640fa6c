"""An exponential moving average of a server's weights, for evaluation and release."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from dbcl.blinding import copied
from dbcl.errors import ConfigError, ProtocolError
from dbcl.model.tensors import named_tensors, recompute
from dbcl.state import State


class RunningMean:
    """A moving average of tensors over about 1 / (1 - decay) rounds.

    Averaging reduces the noise of single rounds, so the averaged model is more accurate than the
    last model. Clients never receive the average. It is stored at least in float32, because a slow
    average would not change in half precision.

    >>> mean = RunningMean(decay=0.5)
    >>> for rounds, value in ((1, 0.0), (20, 1.0)):
    ...     mean.update({"weight": torch.full((1, 2), value)}, rounds)
    >>> mean.model(nn.Linear(2, 1, bias=False)).weight
    Parameter containing:
    tensor([[0.5000, 0.5000]], requires_grad=True)
    """

    def __init__(self, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(f"ema_decay must be at least 0 and below 1, got {decay}")
        self.decay = decay
        self._means: dict[str, Tensor] = {}
        self._rounds = 0  # number of the last round that was included
        self._model: nn.Module | None = None
        self._written = False

    @torch.no_grad()
    def update(self, current: Mapping[str, Tensor], rounds: int) -> None:
        """Add the weights after `rounds` rounds to the average, unless already added."""
        if rounds <= self._rounds:
            return
        decay, self._rounds = decay_after(self.decay, rounds), rounds
        for name, tensor in current.items():
            own = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
            before = self._means.get(name)
            self._means[name] = own.clone() if before is None else before.to(own).lerp_(own, 1 - decay)
        self._written = False

    @torch.no_grad()
    def model(self, like: nn.Module, finish: Callable[[nn.Module], None] = lambda model: None) -> nn.Module:
        """Return a copy of a model with the averaged weights, the same object at every call.

        Args:
            like: The model to copy.
            finish: Called with the copy after every change of its weights.
        """
        if self._model is None:
            self._model = copied(like)
        if not self._written:
            for name, tensor in named_tensors(self._model).items():
                if name in self._means:
                    tensor.copy_(self._means[name])
            recompute(self._model)
            finish(self._model)
            self._written = True
        return self._model

    def state(self) -> State:
        """Return the state for a checkpoint."""
        return State({"rounds": self._rounds}, {name: tensor.clone() for name, tensor in self._means.items()})

    def load_state(self, state: State) -> None:
        """Restore the state returned by `state`."""
        if self._means and state.tensors and state.tensors.keys() != self._means.keys():
            raise ProtocolError("the checkpoint's average is of another model")
        self._means = {name: tensor.clone() for name, tensor in state.tensors.items()}
        self._rounds = int(state.values["rounds"])
        self._written = False


def decay_after(decay: float, rounds: int) -> float:
    """Return the decay after `rounds` rounds.

    The decay rises from 0, so that the initial weights do not affect the average.

    >>> decay_after(0.8, 1), decay_after(0.8, 2), decay_after(0.8, 100)
    (0.0, 0.09090909090909091, 0.8)
    """
    return min(decay, (rounds - 1) / (rounds + 9))
