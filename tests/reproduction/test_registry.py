import json
import subprocess
import sys
from pathlib import Path

import pytest

from dbcl.data import LOADERS
from dbcl.errors import ConfigError
from experiments import registry, rows
from experiments.experiment import Experiment

EXPERIMENTS = registry.EXPERIMENTS
FOLDER = Path(registry.__file__).parent
SHARED = {
    "__init__",
    "__main__",
    "experiment",
    "figures",
    "registry",
    "rows",
    "runner",
    "small_tasks",
    "tables",
    "training",
}


def test_every_file_is_in_the_registry() -> None:
    files = {path.stem for path in FOLDER.glob("*.py")} - SHARED
    assert files == {experiment.name.replace("-", "_") for experiment in EXPERIMENTS}
    assert len({experiment.name for experiment in EXPERIMENTS}) == len(EXPERIMENTS)


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
@pytest.mark.parametrize("quick", [True, False], ids=["quick", "full"])
def test_jobs_are_plain_settings_with_a_seed_and_no_two_are_the_same(experiment: Experiment, quick: bool) -> None:
    jobs = experiment.jobs(quick, Path("nowhere"))
    assert jobs
    assert [json.loads(rows.key(job)) for job in jobs] == list(jobs)
    assert len({rows.key(job) for job in jobs}) == len(jobs)
    assert all(isinstance(job["seed"], int) for job in jobs)
    named = {job["data"] for job in jobs if "data" in job}
    assert named <= {*experiment.needs(quick), "digits"}  # the digits come with the package
    assert {*experiment.data, *experiment.quick_data} <= set(LOADERS)


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_the_full_setting_is_not_the_quick_one(experiment: Experiment) -> None:
    quick, full = (experiment.jobs(quick, Path("nowhere")) for quick in (True, False))
    assert {rows.key(job) for job in quick}.isdisjoint({rows.key(job) for job in full} - _timeless(experiment))


def _timeless(experiment: Experiment) -> set[str]:
    """Jobs that are computed in no time are the same in both."""
    timeless = [job for job in experiment.jobs(True, Path("nowhere")) if job.get("check") in ("corollary", "remark")]
    return {rows.key(job) for job in timeless}


def test_an_unknown_name_is_told_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"no experiment 'table'; did you mean table1\?"):
        registry.find("table")
    with pytest.raises(ConfigError, match=r"no experiment 'x'; choose all or one of table1, non-iid"):
        registry.find("x")


def test_playing_loads_nothing_that_only_figures_or_audits_need() -> None:
    """A machine with a GPU may lack them: jobs are played there and reported elsewhere."""
    code = """
import sys
from pathlib import Path
from experiments import runner
from experiments.experiment import Context
from experiments.registry import EXPERIMENTS, find
for name, settings in (("table1", {"rounds": 1}), ("lfw-roc", {"rounds": 1}), ("theory", {})):
    job = {**find(name).jobs(True, Path("nowhere"))[0], **settings}
    find(name).play(job, Context())
print(sorted({"matplotlib", "scipy", "sklearn", "flwr", "torchmetrics"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
