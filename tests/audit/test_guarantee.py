"""The audit of a run with a guarantee: what is measured, said and drawn, and the exit code."""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Subset
from typer.testing import CliRunner

import dbcl_audit.guarantee as measured
from dbcl import cli, seeds
from dbcl.objective import CLASSIFICATION
from dbcl.privacy import Spent
from dbcl.protocol import Server
from dbcl.simulation import RunConfig
from dbcl.simulation.build import privacy_plan
from dbcl.simulation.presets import preset, to_toml
from dbcl.simulation.task import given
from dbcl_audit.audit import audit
from dbcl_audit.canaries import CanaryEstimate
from dbcl_audit.effort import QUICK
from dbcl_audit.findings import Audit, Finding
from dbcl_audit.guarantee import SHARED_ORDER, guarantee_finding, shared_findings
from dbcl_audit.report.comparison import WHO, epsilon, worst_finding
from dbcl_audit.report.page import page
from dbcl_audit.report.rating import BROKEN, DOUBTFUL, FAILED, KEPT, SHORT, UNRATED, exceeded, word
from dbcl_audit.report.wording import verdicts

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
    """Take few canaries, and repeatable secrets: one sound run in a thousand is beyond its limits by chance."""
    monkeypatch.setattr("dbcl_audit.canaries.MAX_CANARIES", 60)
    drawn: list[bytes] = []

    def fresh() -> bytes:
        drawn.append(seeds.derive(bytes(32), "guarantee", len(drawn)))
        return drawn[-1]

    monkeypatch.setattr("dbcl.seeds.fresh", fresh)


def run_of(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(to_toml(RunConfig.from_options(**{**SETTINGS, **changes})))
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
        effort=replace(QUICK, canary_rounds=6, drift_examples=50, null_examples=50),
        tell=told.append,
        progress=lambda done, total: steps.append((done, total)),
    )
    finding, *members = found.findings
    assert seeds_seen == [None, 0]  # members are attacked in a simulated run that can be repeated
    assert (finding.target, finding.measure, finding.budget["rounds"], finding.budget["turns"]) == (
        "guarantee",
        "epsilon",
        6,
        2,
    )
    plan = privacy_plan(RunConfig.from_options(**SETTINGS))
    assert plan is not None
    assert finding.budget["stated epsilon"] == plan.spent(rounds=6, participations=2).epsilon < 8
    assert finding.low < finding.value < finding.high
    error = (finding.budget["mu high"] - finding.budget["mu low"]) / (2 * 1.96)
    assert error < 0.4
    assert abs(finding.budget["mu"] - finding.budget["stated mu"]) < 5 * error
    assert told[0] == "simulated run: canaries among the run's clients"
    assert steps[0][0] == 0
    assert steps[-1][0] == steps[-1][1]
    assert found.not_attacked == {
        "updates, images, labels and properties": "the guarantee bounds how well every adversary but the "
        "server can infer one client",
        "members, as the run is": "no client takes part three times in the simulated rounds",
    }
    assert members == []
    assert Audit.from_json(found.json()).findings == found.findings


def test_the_command_measures_one_example_and_keeps_limits(tmp_path: Path) -> None:
    folder = run_of(
        tmp_path / "run",
        privacy_unit="example",
        clients=4,
        fraction=1.0,
        algorithm="sgd",
        separation=2,
        delta=1e-5,
        rounds=4,
    )

    def invoke(limits: str) -> Any:
        return CliRunner().invoke(cli.app, ["audit", str(folder), "--fail-above", limits], env={"COLUMNS": "160"})

    kept = invoke("epsilon=80")
    assert kept.exit_code == 0, kept.output
    said = " ".join(kept.output.split())
    assert "told canaries as well as an epsilon of" in said
    assert "8.00 is stated for these 4 rounds, at delta 1e-05" in said
    assert "not attacked: updates, images, labels, properties and membership: the guarantee bounds how well" in said
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


class Residual(nn.Module):
    """A model that the stacked engine trains one client at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, 20), nn.Linear(20, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(x + torch.relu(self.first(x)))
        return out


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 3))


def together(x: torch.Tensor, y: torch.Tensor) -> Any:
    return x, y


def one_by_one(x: torch.Tensor, y: torch.Tensor) -> Any:
    return Subset(list(zip(x, y, strict=True)), range(len(x)))  # type: ignore[arg-type]


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize(
    ("make", "source", "path"), [(dense, together, "stages"), (dense, one_by_one, "loop"), (Residual, together, "loop")]
)
def test_real_extreme_examples_find_clients_that_do_not_clip(
    make: Callable[[], nn.Module], source: Any, path: str, clips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go through the code that trains a client, by the path that the run takes."""
    engines: list[Any] = []
    made = measured.build_engine

    def watched(*arguments: Any, **more: Any) -> Any:
        engines.append(made(*arguments, **more))
        return engines[-1]

    monkeypatch.setattr(measured, "build_engine", watched)
    if not clips:
        for place in ("privacy.example_clipping", "privacy.dense_clipping", "engines.stacked.stage_path"):
            monkeypatch.setattr(f"dbcl.{place}.clip_factors", lambda squares, clip: torch.ones_like(squares))
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(80, 20, generator=generator), torch.arange(80) % 3
    examples = source(x, y)
    task = given(lambda seed: make(), examples, examples, objective=CLASSIFICATION)
    config = preset("private-example", clients=4, rounds=4, separation=2, delta=1e-3, epsilon=100.0, clip=0.1, lr=0.1)
    found = measured.measure_guarantee(task.adapt(config), task)
    assert {engine.path for engine in engines} == {path}
    assert found.holds is clips
    assert found.largest == pytest.approx(1.0, rel=1e-3) if clips else found.largest > 10


def test_what_cannot_be_measured_is_said(tmp_path: Path) -> None:
    found = audit(run_of(tmp_path / "run", server_optimizer="adam", epsilon=8.0, server_lr=0.01), effort=QUICK)
    (finding,) = found.findings
    assert word(finding) == FAILED
    assert "before an optimiser that is not linear" in finding.failures[0]
    seeded, unmeasured = verdicts(found)
    assert "promises nothing" in seeded[1]
    assert unmeasured[:3] == (0, "The guarantee was not measured.", "")
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


def shared(epsilons: tuple[float, ...], **changes: Any) -> list[Finding]:
    """Return findings for anyone, the server and colluders, whose measured mu is so far from 0."""
    found = {who: replace(estimate(mu), **changes) for who, mu in zip(SHARED_ORDER, epsilons, strict=True)}
    return shared_findings(found, colluders=2)


@pytest.mark.parametrize(
    ("shifts", "words"),
    [
        ((0.7, 0.9, 1.0), (KEPT, KEPT, KEPT)),
        ((0.7, 0.9, 1.6), (BROKEN, KEPT, KEPT)),
        ((0.7, 1.6, 1.0), (BROKEN, BROKEN, KEPT)),
        ((0.7, 1.29, 1.0), (DOUBTFUL, DOUBTFUL, KEPT)),
        ((1.6, 0.9, 1.0), (BROKEN, BROKEN, BROKEN)),
    ],
)
def test_colluders_are_never_rated_milder_than_one_of_them(shifts: tuple[float, ...], words: tuple[str, ...]) -> None:
    made = shared(shifts)
    assert [each.adversary for each in made] == ["colluders", "server", "anyone"]
    assert tuple(word(each) for each in made) == words
    settings = {"epsilon": 4.38, "sketch": "identity-v1", "noise_by": "clients", "colluders": 2}
    report = Audit("a", settings, {}, (), tuple(made), 1.0)
    assert verdicts(report)[0][1].startswith("The server with 2 colluding clients: ")
    assert epsilon(report).startswith("4.38 (")
    worst = {who: worst_finding(report, who) for who in WHO}
    assert [each and word(each) for each in worst.values()] == [words[0], words[0], words[2]]


def test_less_than_canaries_should_reach_is_said() -> None:
    (first, *_) = made = shared((0.2, 0.2, 0.2), expected=1.0)
    assert word(first) == SHORT
    settings = {"epsilon": 4.38, "sketch": "identity-v1", "noise_by": "clients", "colluders": 2}
    rank, said, *_ = verdicts(Audit("a", settings, {}, (), tuple(made), 1.0))[0]
    assert rank == 2
    assert "Less was measured" in said or "less was measured" in said


def test_a_client_without_noise_is_named() -> None:
    settings = {"epsilon": 4.38, "sketch": "identity-v1", "noise_by": "clients", "colluders": 2}
    made = Audit("a", settings, {}, (), tuple(shared((0.7, 0.9, 1.0), quiet=("client 3",))), 1.0)
    assert [rank for rank, *_ in verdicts(made)] == [4, 4, 4]
    assert "client 3" in verdicts(made)[0][1]
    assert "client 3" in page(made)


OWN = """
import torch

def data():
    x = torch.randn(700, 40, generator=torch.Generator().manual_seed(0))
    y = (x[:, :10].argmax(dim=1)) % 5
    return (x[:600], y[:600]), (x[600:], y[600:])

def net():
    return torch.nn.Linear(40, 5)
"""


@pytest.mark.parametrize("seed", [None, 0])
def test_train_and_audit_with_noise_of_clients(
    seed: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that the report says is true of a run in which nobody trusts the server."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_run", raising=False)
    (tmp_path / "own_run.py").write_text(OWN)

    def invoke(*arguments: str) -> str:
        done = CliRunner().invoke(cli.app, [*arguments], env={"COLUMNS": "160"})
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())

    seeded = () if seed is None else ("--seed", str(seed))
    own = ("--model", "own_run:net", "--data", "own_run:data", "--clients", "5", "--epsilon", "8")
    invoke("train", *own, "--rounds", "8", "--separation", "2", "--lr", "1", "--out", "run", *seeded)
    said = invoke("audit", "run", "--allow-code")
    assert "The server with 1 colluding client: " in said
    assert "8.00 is stated for these 8 rounds, at delta 1e-05" in said
    assert "The server: " in said
    assert "Anyone with the model: " in said
    assert "every adversary, the server and 1 colluding client included, can infer one example" in said
    assert "up to 1 colluding client and everyone who gets the model" in said
    assert ("This run itself promises nothing" in said) == (seed is not None)
    html = (tmp_path / "run" / "audit.html").read_text()
    assert "The server need not be trusted" in html
    compared = invoke("compare", "run")
    for text in (said, html, compared):
        assert "server is trusted" not in text
        assert "trusted server" not in text
        assert "the true weights" not in text
    assert "none (seed)" in compared if seed is not None else "8 (" in compared
    read = Audit.from_json((tmp_path / "run" / "audit.json").read_text())
    assert [each.adversary for each in read.findings] == ["colluders", "server", "anyone"]
    stated = [each.budget["stated epsilon"] for each in read.findings]
    assert stated[0] == pytest.approx(8.0, rel=1e-2)
    assert stated[1] == stated[2] < stated[0]
    assert read.settings["colluders"] == 1
    assert {row[0] for row in read.adversaries} == {"client", "server", "colluders", "anyone"}
