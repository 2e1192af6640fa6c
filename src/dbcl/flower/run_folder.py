"""The checkpoint folder of a run: locking, writing and resuming."""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dbcl.errors import ProtocolError, plain
from dbcl.files import locked, make_folder, remove_scratch, user_path
from dbcl.protocol import Server, checkpoint
from dbcl.state import State, Stateful, join

log = logging.getLogger("flwr.dbcl")

OPTIONAL = ("secure",)
"""Names of the optional parts of a run."""


class RunFolder:
    """Saves and restores the parts of a run.

    Args:
        path: The folder; None disables checkpoints.
        parts: Stateful objects by name, in restoring order. The server comes last: it changes the
            user's model and reverts this change itself if its state is damaged.
    """

    def __init__(self, path: str | Path | None, parts: Mapping[str, Stateful]) -> None:
        self.path = None if path is None else user_path(path).absolute()
        self._parts = parts

    @contextlib.contextmanager
    def held(self, round: int) -> Iterator[None]:
        """Context manager that locks the folder, if there is one, for a run at this round."""
        if self.path is None:
            yield
            return
        make_folder(self.path, secret=True)
        with locked(self.path):
            remove_scratch(self.path)
            there = checkpoint.newest(self.path)
            if there is not None and there != round:
                raise ProtocolError(
                    f"{self.path} is at round {there} and this strategy at round {round}: another process has gone on "
                    "with the run; make the strategy anew"
                )
            log.info("checkpoints are in %s", self.path)
            yield

    def save(self, round: int) -> None:
        """Write a checkpoint of all parts."""
        if self.path is not None:
            checkpoint.save(self.path, round, join(**{name: part.state() for name, part in self._parts.items()}))

    def resume(self, forgotten: Sequence[str] = ()) -> bool:
        """Restore the newest checkpoint.

        Args:
            forgotten: Attributes that a checkpoint cannot store, for a warning.

        Returns:
            True if a checkpoint was found.

        Raises:
            ProtocolError: The checkpoint is damaged, or belongs to a run with other settings.
        """
        if self.path is not None and forgotten:
            log.warning("not in checkpoints, so a run that goes on starts with it anew: %s", ", ".join(forgotten))
        if self.path is None or not any(self.path.glob("round-*.dbcl")):
            return False
        state = checkpoint.load(self.path)
        self._check_parts(state)
        try:
            for name, part in self._parts.items():
                part.load_state(state.part(name))
        except Exception as error:  # a checkpoint that others have changed may hold anything
            damaged = f"the checkpoint is damaged ({type(error).__name__}: {plain(str(error), 100)})"
            raise ProtocolError(
                f"the run in {self.path} cannot go on; use the model, the plan and the strategy that it began with, or "
                f"another folder as checkpoint, to begin anew: {error if isinstance(error, ProtocolError) else damaged}"
            ) from error
        return True

    def how_to_go_on(self, server: Server) -> str:
        """Return advice for continuing a run whose rounds are all complete."""
        if server.privacy is not None and server.round >= server.privacy.rounds:
            return "The budget of the guarantee is spent, and the run cannot go on"
        anew = "" if self.path is None else f"; to begin anew, use another folder than {self.path} as checkpoint"
        return f"To go on, ask for more rounds (num_rounds){anew}"

    def _check_parts(self, state: State) -> None:
        if not self._parts.keys() - set(OPTIONAL) <= state.values.keys():
            raise ProtocolError(
                f"{self.path} holds checkpoints of another engine or of an older dbcl; choose another folder"
            )
        if ("secure" in state.values) != ("secure" in self._parts):
            with_or_without = "with" if "secure" in state.values else "without"
            raise ProtocolError(
                f"the run in {self.path} is one {with_or_without} secure aggregation; go on as it began, or take "
                "another folder as checkpoint, to begin anew"
            )
