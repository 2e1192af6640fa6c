"""Secret keys of the rounds, from which all sketches and all noise are derived."""

from collections.abc import Mapping
from typing import Any

from dbcl import seeds
from dbcl.errors import ProtocolError


class RoundKeys:
    """The keys of the current round and, after `prepare`, of the next round.

    A key protects one set of weights only: two broadcasts of different weights under the same noise
    would reveal their difference. The key of a round is drawn when the previous round closes and is
    saved in checkpoints. If the weights change in between, a new key is drawn.

    Args:
        insecure_seed: Fixes all keys, for experiments; None draws the keys from the operating
            system.

    >>> keys = RoundKeys()
    >>> keys.current == RoundKeys().current, RoundKeys(0).current == RoundKeys(0).current
    (False, True)
    """

    def __init__(self, insecure_seed: int | None = None) -> None:
        self._seed = None if insecure_seed is None else seeds.derive(bytes(32), "experiment", insecure_seed)
        self.current = self._draw("round", 0)
        self.base = self._draw("base")
        """Key of the noise on frozen parameters."""
        self._next: bytes | None = None

    def advance(self, round: int) -> None:
        """Replace the current key by the key of the given round."""
        self.current, self._next = self._next or self._draw("round", round), None

    def prepare(self, round: int) -> bytes:
        """Draw the key of the next round in advance."""
        self._next = self._draw("round", round)
        return self._next

    def of_update(self, round: int) -> bytes:
        """Draw the one-time key of the noise on an average update. It is not stored."""
        return self._draw("update", round)

    def values(self) -> dict[str, Any]:
        """Return the values for a checkpoint."""
        return {"key": self.current.hex(), "base_key": self.base.hex()}

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Restore the values returned by `values`."""
        current, base = bytes.fromhex(values["key"]), bytes.fromhex(values["base_key"])
        if len(current) != seeds.SEED_BYTES or len(base) != seeds.SEED_BYTES:
            raise ProtocolError("the checkpoint is damaged: a key has the wrong size")
        self.current, self.base, self._next = current, base, None

    def _draw(self, *labels: str | int) -> bytes:
        return seeds.fresh() if self._seed is None else seeds.derive(self._seed, *labels)
