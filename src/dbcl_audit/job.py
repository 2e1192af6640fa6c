"""What the parts of an audit share: the run, where to write, how much to spend, and a count of the steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dbcl.simulation.config import RunConfig
from dbcl.simulation.task import Task
from dbcl_audit.attacks import OnProgress
from dbcl_audit.budget import Budget


@dataclass(frozen=True)
class Job:
    """What every part of an audit needs: the run's settings and data, where to write, and how much to spend.

    `tell` is called with each thing that is done, `step` when one is: a round, a tensor, a picture, a shadow model.

    >>> from dbcl_audit.budget import QUICK
    >>> from dbcl.simulation import task_of
    >>> Job(RunConfig(), task_of(RunConfig()), Path("run"), Path("scratch"), QUICK, 2, 0, print).budget.rounds
    40
    """

    config: RunConfig
    task: Task
    folder: Path  # of the run
    scratch: Path
    budget: Budget
    clients: int
    seed: int
    tell: OnProgress
    step: Callable[[], None] = lambda: None
    lanes: int = 1
    not_attacked: dict[str, str] = field(default_factory=dict)


class Steps:
    """Counts the steps of an audit's parts, of which it knows roughly how many there will be.

    >>> steps = Steps([2, 3], lambda done, total: print(f"{done} of {total}"))
    >>> steps.step()
    1 of 5
    >>> steps.end_part()
    2 of 5
    """

    def __init__(self, expected: Sequence[int], progress: Callable[[int, int], None]) -> None:
        self.ends = [sum(expected[: number + 1]) for number in range(len(expected))]
        self.part = self.done = 0
        self.progress = progress

    def step(self) -> None:
        """One step is done. A part that takes more than was expected waits at its last one."""
        self._go_to(min(self.done + 1, self.ends[self.part] - 1))

    def end_part(self) -> None:
        """The part is done, however many steps it took."""
        self._go_to(self.ends[self.part])
        self.part = min(self.part + 1, len(self.ends) - 1)

    def _go_to(self, done: int) -> None:
        if done > self.done:
            self.done = done
            self.progress(done, self.ends[-1])
