"""Noise mechanism with a differential privacy guarantee: noise of fixed scale, correlated over
rounds.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dbcl import seeds
from dbcl.errors import ConfigError, ProtocolError
from dbcl.model.tensors import named_tensors
from dbcl.privacy.accounting import PrivacyPlan
from dbcl.privacy.factorization import Mechanism, Memory
from dbcl.privacy.noise import NoiseMechanism
from dbcl.state import State

SCHEME = "correlated-v2"
"""Label of the random stream of z. Version 1 used 32 bits of radius and so had a shorter tail."""


class _Begun(NamedTuple):
    """Opened round, whose noise may already have been sent."""

    round: int
    key: bytes
    tag: str
    devices: dict[str, torch.device]
    fixed: frozenset[str]


class CorrelatedNoise(NoiseMechanism):
    """Correlated noise of a `Mechanism`, N_(t+1) = (A C^-1 z)_t, with z of standard deviation
    `sigma` in the space of W.

    `CorrelatedNoise.from_plan` makes the noise of a `PrivacyPlan` and provides the plan's
    guarantee. An instance with other arguments has no guarantee. The scale is absolute, because
    noise in proportion to the weights would leak their scale.

    N_t is added to every tensor broadcast in round t, and to the model released after the last
    round. With n rounds of updates, rounds 0 to n may begin. z of round t is derived from the
    round's key, the round and the tensor's name. W_0 depends on no data and needs no noise for the
    guarantee. The mechanism still adds noise of scale lr * sigma to W_0, so that no tensor is sent
    unprotected; this noise is used once and does not affect the guarantee.

    For a workload with `after=False`, the noise of round t + 1 is added to the average update of
    round t, starting with round 1.

    `state()` contains a few float64 tensors of the size of each tensor of W, which are never
    modified in place. `end` advances the state by one round, so a reopened round has the same
    noise. A second noise on the same weights raises an error: a round out of order, or another key
    for an opened round.

    >>> plan = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=400, clients=1000, cohort=100)
    >>> veil = CorrelatedNoise.from_plan(plan)
    >>> veil.begin(0, bytes(32), nn.Linear(4, 2))
    >>> veil.noise(0, "bias", (2,)).dtype
    torch.float64
    >>> veil.end(0)
    >>> veil.guarantee()[:24]
    '(epsilon 8, delta 1e-05)'
    """

    def __init__(self, mechanism: Mechanism, sigma: float, promise: str = "none") -> None:
        if not 0 < sigma < math.inf:
            raise ConfigError(f"the veil's sigma must be above 0 and finite, got {sigma}")
        self.mechanism, self.sigma = mechanism, sigma
        self._promise = promise
        self._position = 0 if mechanism.workload.after else 1  # the round that may begin
        self._memory: dict[str, Memory] = {}
        self._next: dict[str, Memory] = {}
        self._begun: _Begun | None = None
        self._shown: str | None = None  # what tells the key of a round that has begun, before a restart too
        self._ahead: dict[tuple[bytes, int, str], Tensor] = {}

    @classmethod
    def from_plan(cls, plan: PrivacyPlan) -> "CorrelatedNoise":
        """Return the noise mechanism of a plan."""
        return cls(plan.mechanism, plan.sigma, plan.promise)

    def guarantee(self) -> str:
        return self._promise

    def begin(self, round: int, key: bytes, model: nn.Module) -> None:
        if round > self.mechanism.rounds:
            raise ProtocolError(
                f"the budget of {self.mechanism.rounds} rounds is spent: nothing more may leave the server"
            )
        if round != self._position:
            raise ProtocolError(f"the veil's noise is that of round {self._position}, and round {round} would begin")
        tag = seeds.derive(key, "begun", round).hex()
        if self._shown not in (None, tag):
            raise ProtocolError(
                f"round {round} has begun with another key: a second noise on its weights would show them"
            )
        if self._begun is None or self._begun.tag != tag:
            self._next = {}
        own = named_tensors(model)
        fixed = frozenset(name for name, tensor in own.items() if not isinstance(tensor, nn.Parameter))
        self._begun = _Begun(round, key, tag, {name: tensor.device for name, tensor in own.items()}, fixed)
        self._shown = tag

    def noise(self, round: int, name: str, shape: tuple[int, ...]) -> Tensor:
        begun = self._opened(round)
        if name in begun.fixed:
            raise ProtocolError(
                f"{name} is no parameter: what clients measure goes into it without a clip, so there is no guarantee. "
                "The remedy: a normalisation without running statistics, such as GroupNorm"
            )
        if round > 1 and name not in self._memory:
            raise ProtocolError(f"{name} has not left the server since round 1, so its noise is not known")
        if name not in self._next:
            device = begun.devices[name]
            z = self._ahead.pop((begun.key, round, name), None)
            if z is None:
                z = self._drawn(begun.key, round, name, shape, device)
            memory = self._memory.get(name, Memory())
            self._next[name] = self.mechanism.step(_moved(memory, device), z)
        total = self._next[name].total
        assert total is not None
        return total.clone()

    def prepare(self, key: bytes, shapes: Mapping[str, tuple[int, ...]]) -> None:
        if self._begun is None:
            return
        later, devices = self._begun.round + 1, self._begun.devices
        self._ahead = {
            (key, later, name): self._drawn(key, later, name, shape, devices[name])
            for name, shape in shapes.items()
            if name not in self._begun.fixed
        }

    def _drawn(self, key: bytes, round: int, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        count = math.prod(shape)
        words = seeds.words(key, SCHEME, round, name, n=count + count % 2)
        return seeds.fine_normals_on(device, words, count).mul_(self.sigma).reshape(shape)

    def end(self, round: int) -> None:
        self._opened(round)
        if round > 0:  # the noise on W_0 is no part of the stream
            missing = self._memory.keys() - self._next.keys()
            if missing:
                raise ProtocolError(f"round {round}: {min(missing)} did not leave the server, and its noise is missing")
            self._memory = self._next
        self._next, self._begun, self._shown = {}, None, None
        self._position = round + 1

    def _opened(self, round: int) -> _Begun:
        if self._begun is None or (self._begun.round, self._begun.tag) != (round, self._shown):
            raise ProtocolError(f"the veil of round {round} has not begun")
        return self._begun

    def state(self) -> State:
        tensors: dict[str, Tensor] = {}
        for name, (past, velocity, total) in self._memory.items():
            kept = {**{f"past{age}": each for age, each in enumerate(past)}, "velocity": velocity, "total": total}
            tensors |= {f"{part}.{name}": each for part, each in kept.items() if each is not None}
        return State({"mechanism": self._identity(), "round": self._position, "begun": self._shown}, tensors)

    def load_state(self, state: State) -> None:
        values = state.values
        if values.get("mechanism") != self._identity():
            raise ProtocolError(
                "the checkpoint's veil has another noise or another budget, which cannot be changed in a run"
            )
        parts: dict[str, dict[str, Tensor]] = {}
        for key, tensor in state.tensors.items():
            part, _, name = key.partition(".")
            parts.setdefault(name, {})[part] = tensor.double()
        depth = self.mechanism.strategy.memory
        memory = {
            name: Memory(
                tuple(own[f"past{age}"] for age in range(depth) if f"past{age}" in own),
                own["velocity"] if self.mechanism.workload.momentum else None,
                own["total"],
            )
            for name, own in parts.items()
        }
        # The round that has begun is kept: it is open again where this state, or one that is loaded after it, is of it.
        self._position, self._shown, self._memory, self._ahead = int(values["round"]), values["begun"], memory, {}

    def _identity(self) -> dict[str, Any]:
        """Return the settings that must not change during a run, as JSON values."""
        own = self.mechanism
        return {
            "sigma": self.sigma,
            "momentum": own.workload.momentum,
            "lr": own.workload.lr,
            "after": own.workload.after,
            "numerator": list(own.strategy.numerator),
            "denominator": list(own.strategy.denominator),
            "rounds": own.rounds,
            "separation": own.separation,
            "participations": own.participations,
        }


def _moved(memory: Memory, device: torch.device) -> Memory:
    """Move the memory to the device of the weights."""
    past, velocity, total = memory
    return Memory(
        tuple(each.to(device) for each in past),
        None if velocity is None else velocity.to(device),
        None if total is None else total.to(device),
    )
