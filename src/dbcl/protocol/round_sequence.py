"""The sequence of rounds: their numbers, their keys, their noise, and the round that is open."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from dbcl import seeds
from dbcl.blinding import veiled
from dbcl.errors import ProtocolError
from dbcl.model.tensors import frozen_parameters
from dbcl.privacy import NoiseMechanism
from dbcl.protocol.base import fingerprints, veiled_base
from dbcl.protocol.codec import WIRE_DTYPES
from dbcl.protocol.inspection import is_count
from dbcl.protocol.keeper import Keeper
from dbcl.protocol.messages import Base
from dbcl.protocol.open_round import OpenRound
from dbcl.protocol.round_keys import RoundKeys
from dbcl.protocol.trained_weights import TrainedWeights


class RoundSequence:
    """Opens one round after another, each with a key and a noise of its own.

    A key protects one set of weights only. It is replaced when a round ends and when the weights change in between.

    Args:
        trained: The weights W.
        keeper: Keeper of the guarantee.
        noise: Mechanism of the noise.
        keys: Keys of the rounds.
        wire: Name of the dtype in which tensors travel; None for the model's own.
        steady_lanes: Keep clients that ask in the same order in the same lane in every round.

    Raises:
        ProtocolError: There is no dtype of this name.
        PlanError: The guarantee cannot be kept for these weights.
    """

    def __init__(
        self,
        trained: TrainedWeights,
        keeper: Keeper,
        noise: NoiseMechanism,
        keys: RoundKeys,
        *,
        wire: str | None = None,
        steady_lanes: bool = False,
    ) -> None:
        if wire is not None and wire not in WIRE_DTYPES:
            raise ProtocolError(f"wire must be one of {', '.join(WIRE_DTYPES)}, got {wire!r}")
        self.wire = None if wire is None else WIRE_DTYPES[wire]
        keeper.check(trained, self.wire)
        self.trained, self.keeper, self.noise, self.keys = trained, keeper, noise, keys
        self.steady_lanes = steady_lanes
        self.number = 0
        """Number of the round that is open or will open next."""
        self.current: OpenRound | None = None
        """The open round."""
        self._asked: list[str] = []  # clients that had asked for the round when the checkpoint was written
        self._frozen: tuple[tuple[str, str], ...] | None = None
        self._key_of = trained.versions()

    @property
    def asked(self) -> list[str]:
        """Clients that have asked for the round, in the order in which they first did."""
        return self._asked if self.current is None else self.current.asked

    @property
    def begun(self) -> bool:
        """True if anything may have left the server."""
        return self.number > 0 or self.current is not None

    def opened(self) -> OpenRound:
        """Return the open round, or raise `ProtocolError` if there is none."""
        if self.current is None:
            raise ProtocolError("no round is open: call open_round first")
        return self.current

    def open(self) -> OpenRound:
        """Open the next round: add its noise to W and draw its sketches."""
        plan, model = self.trained.plan, self.trained.model
        if self._frozen is None:
            self._frozen = fingerprints(model, self.base() if plan.base else None)
        self.rotate_key_if_weights_changed()
        key = self.keys.current
        self.noise.begin(self.number, seeds.derive(key, "veil"), model)
        noisy = veiled(self.trained.read(), partial(self.noise.noise, self.number), self.keeper.grid)
        noisy = {name: noisy[name].to(kind) for name, kind in self.trained.dtypes().items()}
        own = self.trained.model_tensors()
        self.current = OpenRound(
            plan,
            key,
            plan.draw(seeds.derive(key, "sketch"), self.number, self._frozen),
            noisy,
            lambda name: self.wire or own[name].dtype,
            self._asked,
            self.steady_lanes,
        )
        return self.current

    def prepare(self) -> None:
        """Precompute randomness of the next round."""
        key = self.keys.prepare(self.number + 1)
        shapes = {tensor.name: tensor.shape for tensor in self.trained.plan.tensors}
        self.noise.prepare(seeds.derive(key, "veil"), shapes)

    def base(self) -> Base:
        """Return the frozen parameters under noise, the same at every call."""
        plan = self.trained.plan
        if not plan.base:
            raise ProtocolError("no frozen parameter is sent: make the server with SketchConfig(send_frozen=True)")
        noisy = veiled_base(frozen_parameters(self.trained.model), plan.base, self.keys.base)
        return Base({name: tensor.to(self.wire) for name, tensor in noisy.items()})

    def void(self) -> None:
        """Use the open round up without a step."""
        self.noise.end(self.number)
        self.advance()

    def advance(self) -> None:
        """Go to the next round, which is not open yet."""
        self.number += 1
        self._renew_key()
        self.current, self._asked = None, []

    def check_weights(self) -> None:
        """Raise `ProtocolError` if the weights were changed outside the rounds, where a guarantee forbids it."""
        self.keeper.check_weights(self.number, self._unchanged())

    def rotate_key_if_weights_changed(self) -> None:
        """Draw another key if the weights changed since it was drawn: reusing noise would reveal the difference.

        An open round keeps its key. With a guarantee changed weights are an error once a round has been played.
        """
        if self.current is not None or self._unchanged():
            return
        if self.number > 0:
            self.check_weights()
        self._renew_key()

    def weights_restored(self) -> None:
        """Note that the weights were written to and have the values for which the key was drawn."""
        self._key_of = self.trained.versions()

    def _unchanged(self) -> bool:
        return self._key_of == self.trained.versions()

    def _renew_key(self) -> None:
        self.keys.advance(self.number)
        self._key_of = self.trained.versions()

    def restart(self, number: int, asked: list[str]) -> None:
        """Go to the beginning of a round for which these clients have asked already."""
        self.number, self._asked, self.current, self._frozen = number, asked, None, None
        self._key_of = self.trained.versions()

    def values(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the number and the keys of the round, and who has asked for it."""
        asked = {"asked": self.asked} if self.asked else {}
        return {"number": self.number, **self.keys.values(), **asked}

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Restore what `values` returned, after the weights.

        Raises:
            ProtocolError: The keys are damaged.
        """
        self.keys.load_values(values)
        self.restart(values["number"], [str(client) for client in values.get("asked", [])])

    def check_values(self, values: Mapping[str, Any]) -> None:
        """Raise `ProtocolError` if values are damaged, or if a guarantee forbids going back to them."""
        number = values["number"]
        if not is_count(number) or not isinstance(values.get("asked", []), list):
            raise ProtocolError("the checkpoint is damaged: its round cannot be what it says")
        if self.begun:
            self.keeper.check_return(self.number, number, same_key=values["key"] == self.keys.current.hex())
