"""Secret keys of the rounds, from which all sketches and all noise follow."""

from collections.abc import Mapping
from typing import Any

from dbcl import seeds
from dbcl.errors import ProtocolError


class RoundKeys:
    """The key of the current round, and of the next one where it was drawn ahead.

    A key protects one set of weights only: a second broadcast of other weights under the same noise would show their
    difference. So the key of a round is drawn when the round before it closes, is kept in checkpoints, and is drawn
    anew when the weights change in between.

    Args:
        insecure_seed: Fixes all keys for an experiment; None draws them from the operating system.

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
        """Replace the current key by that of this round."""
        self.current, self._next = self._next or self._draw("round", round), None

    def prepare(self, round: int) -> bytes:
        """Draw the key of the round after the current one ahead of time."""
        self._next = self._draw("round", round)
        return self._next

    def of_update(self, round: int) -> bytes:
        """Draw the key of the noise on an average update, which is used once and not kept."""
        return self._draw("update", round)

    def values(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"key": self.current.hex(), "base_key": self.base.hex()}

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Restore what `values` returned."""
        current, base = bytes.fromhex(values["key"]), bytes.fromhex(values["base_key"])
        if len(current) != seeds.SEED_BYTES or len(base) != seeds.SEED_BYTES:
            raise ProtocolError("the checkpoint is damaged: a key has the wrong size")
        self.current, self.base, self._next = current, base, None

    def _draw(self, *labels: str | int) -> bytes:
        return seeds.fresh() if self._seed is None else seeds.derive(self._seed, *labels)
