"""Veil: secret noise that the server adds to W before sending.

Clients receive sketches of W + N_t, and the server keeps W. The noise is drawn in the space of W
and sketched together with W, so that all messages of a round contain the same noise for every
sketch. Clients could average out independent noise by comparing their sketches.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from dbcl import seeds
from dbcl.errors import ProtocolError
from dbcl.model.tensors import named_tensors, owner, plain_numbers
from dbcl.state import State

SCHEME = "veil-v2"
"""Label of the random stream of independent noise. Version 1 (dbcl 0.1) was drawn in the space of
V, after sketching.
"""


class NoiseMechanism(ABC):
    """Interface of a noise mechanism. In each round the server calls `begin`, `noise` for each
    broadcast tensor, and `end`.

    The noise of a round is a function of the round's key, stored in the server's checkpoint, and of
    `state()`. After restoring both, `begin` reproduces the same noise. A mechanism with noise
    correlated over rounds stores the required history in its state, and adds a round to the history
    only in `end`.

    >>> veil = IndependentNoise({"weight": 0.2, "bias": 0.0})
    >>> veil.begin(0, bytes(32), nn.Linear(4, 2))
    >>> veil.noise(0, "weight", (2, 4)).shape, veil.noise(0, "bias", (2,))
    (torch.Size([2, 4]), None)
    """

    @abstractmethod
    def begin(self, round: int, key: bytes, model: nn.Module) -> None:
        """Begin a round.

        Args:
            round: Number of the round.
            key: Secret key from which the noise is derived.
            model: Model with the master weights; the noise may scale with them.
        """

    @abstractmethod
    def noise(self, round: int, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return N_t of one tensor in the space of W, as float64 on the tensor's device; None
        without a veil.
        """

    @abstractmethod
    def guarantee(self) -> str:
        """Return the guarantee as a sentence; "none" without a guarantee."""

    def prepare(self, key: bytes, shapes: Mapping[str, tuple[int, ...]]) -> None:  # noqa: B027
        """Precompute the weight-independent part of a later round's noise.

        Args:
            key: Secret key of the later round.
            shapes: Tensor shapes by name.
        """

    def end(self, round: int) -> None:  # noqa: B027  most kinds keep nothing
        """Close the round. Its noise is not requested again."""

    def state(self) -> State:
        """Return the state that must persist between rounds in addition to the round's key."""
        return State({}, {})

    def load_state(self, state: State) -> None:  # noqa: B027
        """Restore a state returned by `state`."""


class IndependentNoise(NoiseMechanism):
    """Independent Gaussian noise in every round, with a scale relative to the weights: tau = rho *
    rms(W).

    This noise makes reconstruction harder and provides no guarantee: independent noise averages out
    over many rounds (docs/threat-model.md).

    Args:
        sizes: Relative scale rho of each tensor.

    >>> IndependentNoise({"weight": 0.2}).guarantee()
    'none'
    """

    def __init__(self, sizes: Mapping[str, float]) -> None:
        self.sizes = dict(sizes)
        self._begun: tuple[int, bytes, dict[str, float]] | None = None
        self._devices: dict[str, torch.device] = {}
        self._ahead: dict[tuple[bytes, str], Tensor] = {}

    def begin(self, round: int, key: bytes, model: nn.Module) -> None:
        taus = veil_sizes(model, self.sizes)
        for name, tau in taus.items():
            if self.sizes[name] > 0 and not (math.isfinite(tau) and tau > 0):
                raise ProtocolError(
                    f"{name} must be veiled, and the size of its veil would be {tau}: the weights are "
                    f"{'all 0' if tau == 0 else 'not finite'}, so nothing leaves the server"
                )
        self._begun = round, key, taus
        self._devices = {name: tensor.device for name, tensor in named_tensors(model).items()}

    def noise(self, round: int, name: str, shape: tuple[int, ...]) -> Tensor | None:
        if self._begun is None or self._begun[0] != round:
            raise ProtocolError(f"the veil of round {round} has not begun")
        _, key, taus = self._begun
        if not taus[name] > 0:
            return None
        drawn = self._ahead.pop((key, name), None)
        return (self._drawn(key, name, shape) if drawn is None else drawn).mul_(taus[name])

    def prepare(self, key: bytes, shapes: Mapping[str, tuple[int, ...]]) -> None:
        veiled = {name: shape for name, shape in shapes.items() if self.sizes[name]}
        self._ahead = {(key, name): self._drawn(key, name, shape) for name, shape in veiled.items()}

    def _drawn(self, key: bytes, name: str, shape: tuple[int, ...]) -> Tensor:
        count = math.prod(shape)
        words = seeds.words(key, SCHEME, name, n=(count + 1) // 2)
        return seeds.normals_on(self._devices[name], words, count).reshape(shape)

    def end(self, round: int) -> None:
        self._begun = None

    def guarantee(self) -> str:
        return "none"


def veil_sizes(model: nn.Module, rhos: Mapping[str, float]) -> dict[str, float]:
    """Return the noise scale tau of every tensor: rho times the root mean square of its entries.

    A tensor of zeros, such as a new bias, would get no noise, and its updates would be unprotected.
    Its root mean square is therefore replaced by at least that of its module's parameters together,
    or of the whole model if these are zero.

    Args:
        model: Model with the master weights.
        rhos: Relative scale of each tensor.

    >>> layer = nn.Linear(4, 2)
    >>> nn.init.ones_(layer.weight), nn.init.zeros_(layer.bias) # doctest: +ELLIPSIS
    (...)
    >>> veil_sizes(layer, {"weight": 0.2, "bias": 0.2})["bias"]
    0.178...
    """
    tensors = named_tensors(model)
    lengths = _lengths([*tensors.values(), *model.parameters()])
    whole = _rms(model.parameters(), lengths)
    taus = {}
    for name, rho in rhos.items():
        module, _ = owner(model, name)
        floor = _rms(module.parameters(recurse=False), lengths) or whole
        taus[name] = rho * max(_rms([tensors[name]], lengths), floor) if rho else 0.0
    return taus


def _lengths(tensors: Iterable[Tensor]) -> dict[int, float]:
    """Return the norm of every tensor by its id, with a single GPU synchronisation."""
    own = {id(tensor): tensor.detach() for tensor in tensors if plain_numbers(tensor)}
    if not own:
        return {}
    home = next(iter(own.values())).device
    each = [torch.linalg.vector_norm(tensor, dtype=torch.float64).to(home) for tensor in own.values()]
    return dict(zip(own, torch.stack(each).tolist(), strict=True))


def _rms(tensors: Iterable[Tensor], lengths: Mapping[int, float]) -> float:
    listed = [tensor for tensor in tensors if id(tensor) in lengths]
    count = sum(tensor.numel() for tensor in listed)
    return math.hypot(*(lengths[id(tensor)] for tensor in listed)) / math.sqrt(count) if count else 0.0
