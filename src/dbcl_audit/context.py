"""State shared by the parts of an audit: the run, a scratch folder, the effort, and the progress
count.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dbcl.plan import SketchPlan
from dbcl.simulation.config import RunConfig
from dbcl.simulation.task import Task
from dbcl_audit.effort import AuditEffort

OnProgress = Callable[[str], None]
"""Callback for a progress message."""


@dataclass(frozen=True)
class AuditContext:
    """Input of every part of an audit.

    Args:
        config: settings of the run.
        task: task of the run.
        folder: folder of the audited run.
        scratch: folder for temporary files.
        effort: number of rounds, images and models that the attacks use.
        clients: parties of a simulated run.
        seed: seed of the attacks' random choices.
        tell: called with a progress message.
        step: called after each round, tensor, image or shadow model.
        plan: sketch plan of the run.
        not_attacked: omitted parts of the audit, each with the reason. Parts add entries.

    >>> from dbcl_audit.effort import QUICK
    >>> from dbcl.simulation import task_of
    >>> from dbcl.simulation.build import build_plan
    >>> config = RunConfig()
    >>> plan = build_plan(config, task_of(config).make_model(0))
    >>> AuditContext(config, task_of(config), Path("run"), Path("scratch"), QUICK, 2, 0, print, plan=plan).lanes
    2
    """

    config: RunConfig
    task: Task
    folder: Path
    """Folder of the audited run."""
    scratch: Path
    effort: AuditEffort
    clients: int
    seed: int
    tell: OnProgress
    step: Callable[[], None] = lambda: None
    plan: SketchPlan | None = None
    not_attacked: dict[str, str] = field(default_factory=dict)

    @property
    def lanes(self) -> int:
        return 1 if self.plan is None else self.plan.lanes

    @property
    def tensors(self) -> int:
        """Number of tensors of the network."""
        return 0 if self.plan is None else len(self.plan.tensors)

    @property
    def guaranteed(self) -> bool:
        """True if the run has a differential-privacy guarantee, which bounds most attacks."""
        return self.config.privacy is not None

    @property
    def follows_updates(self) -> bool:
        """True if attacks over all rounds apply: the server optimiser is linear, and the run has no
        guarantee.
        """
        return not self.guaranteed and self.config.server_optimizer != "adam"

    def counting(self, step: Callable[[], None]) -> "AuditContext":
        """Return a context that calls `step` at each step and with each progress message."""

        def tell_and_step(text: str) -> None:
            self.tell(text)
            step()

        return replace(self, tell=tell_and_step, step=step)

    def played(self, *_: int) -> None:
        """Count a round. Has the signature of a `progress` callback."""
        self.step()


class Steps:
    """Progress over all parts of an audit. The expected numbers of steps are estimates.

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
        """Count one step. Further steps beyond the expected number of a part are not counted."""
        self._go_to(min(self.done + 1, self.ends[self.part] - 1))

    def end_part(self) -> None:
        """Mark all expected steps of the current part as completed."""
        self._go_to(self.ends[self.part])
        self.part = min(self.part + 1, len(self.ends) - 1)

    def _go_to(self, done: int) -> None:
        if done > self.done:
            self.done = done
            self.progress(done, self.ends[-1])
