"""The sequence of rounds: their numbers, keys and noise, and the open round."""

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
    """Opens one round after another, each with a separate key and separate noise.

    A key protects one set of weights only. It is replaced when a round ends and when the weights
    change in between.

    Args:
        trained: The weights W.
        keeper: The enforcer of the guarantee.
        noise: The noise mechanism.
        keys: Keys of the rounds.
        wire: Name of the transmission dtype; None for the model's dtype.
        steady_lanes: Assign clients to the same lanes in every round, given the same order of
            requests.

    Raises:
        ProtocolError: The dtype name is unknown.
        PlanError: The guarantee is not possible with these weights.
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
        """Number of the open round, or of the next round."""
        self.current: OpenRound | None = None
        """The open round, or None."""
        self._asked: list[str] = []  # clients that had asked for the round when the checkpoint was written
        self._frozen: tuple[tuple[str, str], ...] | None = None
        self._key_of = trained.versions()

    @property
    def asked(self) -> list[str]:
        """Clients that requested a broadcast of the round, in the order of their first request."""
        return self._asked if self.current is None else self.current.asked

    @property
    def begun(self) -> bool:
        """True if any broadcast may have been sent."""
        return self.number > 0 or self.current is not None

    def opened(self) -> OpenRound:
        """Return the open round.

        Raises:
            ProtocolError: No round is open.
        """
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
        """Precompute the randomness of the next round."""
        key = self.keys.prepare(self.number + 1)
        shapes = {tensor.name: tensor.shape for tensor in self.trained.plan.tensors}
        self.noise.prepare(seeds.derive(key, "veil"), shapes)

    def base(self) -> Base:
        """Return the noisy frozen parameters, the same at every call.

        Raises:
            ProtocolError: No frozen parameter is sent.
        """
        plan = self.trained.plan
        if not plan.base:
            raise ProtocolError("no frozen parameter is sent: make the server with SketchConfig(send_frozen=True)")
        noisy = veiled_base(frozen_parameters(self.trained.model), plan.base, self.keys.base)
        return Base({name: tensor.to(self.wire) for name, tensor in noisy.items()})

    def void(self) -> None:
        """Skip the open round without an optimizer step."""
        self.noise.end(self.number)
        self.advance()

    def advance(self) -> None:
        """Advance to the next round without opening it."""
        self.number += 1
        self._renew_key()
        self.current, self._asked = None, []

    def check_weights(self) -> None:
        """Raise `ProtocolError` if the guarantee forbids a change of the weights between rounds."""
        self.keeper.check_weights(self.number, self._unchanged())

    def rotate_key_if_weights_changed(self) -> None:
        """Draw a new key if the weights have changed: reused noise would reveal the difference.

        An open round keeps its key. Under a guarantee, changed weights raise an error after the
        first round.
        """
        if self.current is not None or self._unchanged():
            return
        if self.number > 0:
            self.check_weights()
        self._renew_key()

    def weights_restored(self) -> None:
        """Record that the weights again have the values for which the key was drawn."""
        self._key_of = self.trained.versions()

    def _unchanged(self) -> bool:
        return self._key_of == self.trained.versions()

    def _renew_key(self) -> None:
        self.keys.advance(self.number)
        self._key_of = self.trained.versions()

    def restart(self, number: int, asked: list[str]) -> None:
        """Return to the beginning of a round.

        Args:
            number: Number of the round.
            asked: Clients that have already requested its broadcast.
        """
        self.number, self._asked, self.current, self._frozen = number, asked, None, None
        self._key_of = self.trained.versions()

    def values(self) -> dict[str, Any]:
        """Return the round's number, keys and requesting clients, for a checkpoint."""
        asked = {"asked": self.asked} if self.asked else {}
        return {"number": self.number, **self.keys.values(), **asked}

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Restore the values returned by `values`. Call after restoring the weights.

        Raises:
            ProtocolError: The keys are damaged.
        """
        self.keys.load_values(values)
        self.restart(values["number"], [str(client) for client in values.get("asked", [])])

    def check_values(self, values: Mapping[str, Any]) -> None:
        """Raise `ProtocolError` for damaged values, or if the guarantee forbids restoring them."""
        number = values["number"]
        if not is_count(number) or not isinstance(values.get("asked", []), list):
            raise ProtocolError("the checkpoint is damaged: its round cannot be what it says")
        if self.begun:
            self.keeper.check_return(self.number, number, same_key=values["key"] == self.keys.current.hex())
