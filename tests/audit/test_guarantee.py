"""The audit of a run with a guarantee: what is measured, said and drawn, and the exit code."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dbcl import cli
from dbcl.audit.budget import QUICK
from dbcl.audit.canaries import CanaryEstimate
from dbcl.audit.findings import Audit, Finding
from dbcl.audit.guarantee import guarantee_finding
from dbcl.audit.report.page import page
from dbcl.audit.report.rating import BROKEN, DOUBTFUL, FAILED, KEPT, UNRATED, exceeded, word
from dbcl.audit.report.wording import verdicts
from dbcl.audit.suite import audit
from dbcl.privacy import Spent
from dbcl.protocol import Server
from dbcl.run import RunConfig
from dbcl.run.presets import to_toml

SETTINGS: dict[str, Any] = {
    "sketch": "identity-v1",
    "veil": 0.0,
    "clients": 60,
    "fraction": 0.2,
    "rounds": 10,
    "epsilon": 8.0,
    "delta": 1e-3,
    "clip": 0.1,
    "server_optimizer": "fedavg",
    "lr": 0.1,
    "seed": 0,
}


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dbcl.audit.canaries.MOST", 60)


def run_of(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(to_toml(RunConfig(**{**SETTINGS, **changes})))
    return folder


def estimate(shift: float, stated: float = 1.0) -> CanaryEstimate:
    """So far apart are the scores of 200 canaries and of 200 directions that nobody used."""
    grid = [math.sqrt(2) * _inverse_erf(2 * (i + 0.5) / 200 - 1) for i in range(200)]
    return CanaryEstimate(
        tuple(each + shift for each in grid), tuple(grid), Spent(stated, 4.38 * stated, 1e-5), rounds=9, turns=3
    )


def _inverse_erf(y: float) -> float:
    low, high = -6.0, 6.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if math.erf(middle) < y else (low, middle)
    return low


def test_an_audit_measures_epsilon_with_fresh_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds_seen: list[int | None] = []
    made = Server.__init__

    def watched(self: Server, *arguments: Any, **more: Any) -> None:
        seeds_seen.append(more.get("insecure_seed"))
        made(self, *arguments, **more)

    monkeypatch.setattr(Server, "__init__", watched)
    told, steps = [], []
    found = audit(
        run_of(tmp_path / "run"),
        budget=replace(QUICK, canary_rounds=6, drift_examples=50, null_examples=50),
        tell=told.append,
        progress=lambda done, total: steps.append((done, total)),
    )
    finding, *members = found.findings
    assert seeds_seen == [None, 0]  # members are looked for in a rehearsal that can be repeated
    assert (finding.target, finding.measure, finding.budget["rounds"], finding.budget["turns"]) == (
        "guarantee",
        "epsilon",
        6,
        2,
    )
    plan = RunConfig(**SETTINGS).privacy()
    assert finding.budget["stated epsilon"] == plan.spent(rounds=6, participations=2).epsilon < 8
    assert finding.low < finding.value < finding.high
    error = (finding.budget["mu high"] - finding.budget["mu low"]) / (2 * 1.96)
    assert error < 0.4
    assert abs(finding.budget["mu"] - finding.budget["stated mu"]) < 5 * error
    assert told[0] == "rehearsal: canaries among the run's clients"
    assert steps[0][0] == 0
    assert steps[-1][0] == steps[-1][1]
    assert found.not_attacked == {
        "updates, pictures, labels and properties": "the guarantee bounds what they can tell of one client, from every "
        "seat but the server's",
        "members, as the run is": "no client takes part three times in the rehearsal's rounds",
    }
    assert members == []
    assert Audit.from_json(found.json()).findings == found.findings


def test_the_command_measures_one_example_and_keeps_limits(tmp_path: Path) -> None:
    folder = run_of(
        tmp_path / "run", unit="example", clients=4, fraction=1.0, algorithm="sgd", separation=2, delta=1e-5, rounds=4
    )

    def invoke(limits: str) -> Any:
        return CliRunner().invoke(cli.app, ["audit", str(folder), "--fail-above", limits], env={"COLUMNS": "160"})

    kept = invoke("epsilon=80")
    assert kept.exit_code == 0, kept.output
    said = " ".join(kept.output.split())
    assert "told canaries as well as an epsilon of" in said
    assert "8.00 is stated for these 4 rounds, at delta 1e-05" in said
    assert (
        "not attacked: updates, pictures, labels, properties and membership: the guarantee bounds what they can" in said
    )
    assert "the promise is a theorem" in said
    broken = invoke("client.epsilon=0.01,auc=0.9")
    assert broken.exit_code == 1
    assert "client.epsilon: matched filter (client, adaptive) reached" in " ".join(broken.output.split())
    assert "auc: no attack gave a value" in " ".join(broken.output.split())
    read = json.loads((folder / "audit.json").read_text())
    assert read["findings"][0]["budget"]["stated epsilon"] == pytest.approx(8.0, rel=1e-3)
    html = (folder / "audit.html").read_text()
    assert "Each client must clip the gradients of its own examples" in html
    assert "Nothing is safe because an attack failed" not in html
    assert "no veil" not in html.lower()
    assert "canaries that took part" in html
    assert "border-top-style:dashed" in html


def test_what_cannot_be_measured_is_said(tmp_path: Path) -> None:
    found = audit(run_of(tmp_path / "run", server_optimizer="adam", epsilon=8.0, server_lr=0.01), budget=QUICK)
    (finding,) = found.findings
    assert word(finding) == FAILED
    assert "before an optimiser that is not linear" in finding.failures[0]
    assert verdicts(found)[0][:3] == (0, "The guarantee was not measured.", "")
    assert "This audit is incomplete" in page(found)
    assert exceeded(found, {"epsilon": 100.0})


@pytest.mark.parametrize(
    ("shift", "said", "rank"),
    [(0.9, KEPT, 1), (1.1, KEPT, 1), (1.29, DOUBTFUL, 2), (1.6, BROKEN, 4)],
)
def test_the_verdict(shift: float, said: str, rank: int) -> None:
    stated = 4.377178095681137
    found = replace(estimate(shift), stated=Spent(1.0, stated, 1e-5))
    finding = guarantee_finding(found)
    assert word(finding) == said
    made = Audit("a", {"epsilon": stated, "sketch": "identity-v1"}, {}, (), (finding,), 1.0)
    assert verdicts(made)[0][0] == rank
    html = page(made)
    assert ("The guarantee does not hold: there is a fault in the code or in the setting." in html) == (rank == 4)
    assert ("Do not release this model" in html) == (rank == 4)
    assert f"<li class='w{rank}'>" in html


def test_a_finding_that_does_not_say_what_is_stated_is_not_rated() -> None:
    bare = Finding("matched filter", "client", "adaptive", "guarantee", "epsilon", 3.0)
    assert word(bare) == UNRATED
    assert "guarantee" in page(Audit("a", {"epsilon": 8.0}, {}, (), (bare,), 1.0))
