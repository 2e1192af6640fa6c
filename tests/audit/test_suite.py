"""Whole audits of tiny runs: every attack gives its finding, and what cannot run is said and does not stop the rest."""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from dbcl import cli, data
from dbcl.audit import rehearsal, suite
from dbcl.audit.attacks import images as attacks
from dbcl.audit.attacks.matching import Matching
from dbcl.audit.attacks.properties import property_findings
from dbcl.audit.findings import Audit, Finding
from dbcl.errors import AuditError, ConfigError
from dbcl.run import Run, config
from dbcl.transcripts import Transcript, Truth

SMALL = suite.Budget(
    rounds=44,
    batch=8,
    pictures=1,
    steps=3,
    own_batches=1,
    own_examples=20,
    shadows=4,
    estimators=("option I", "rewind", "smoother"),
)
NET = "small_net_to_audit"
SOURCE = """
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 12), nn.ReLU(), nn.Linear(12, 10))
"""


@pytest.fixture(scope="module", autouse=True)
def small_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A network that a configuration can name, rounds that are old sooner, and no waiting for the disk."""
    folder = tmp_path_factory.mktemp("nets")
    (folder / f"{NET}.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setattr(attacks, "OLD", 22)
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


def train(folder: Path, preset: str, **changes: Any) -> Path:
    settings = {"clients": 4, "fraction": 1.0, "rounds": 3, "algorithm": "sgd", "fixed_secrets": True, **changes}
    run = Run.start(config.preset(preset, model=f"{NET}:make", **settings), folder)
    for _ in run.play():
        pass
    return folder


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the paper's setting, long enough that its first rounds are old."""
    return train(tmp_path_factory.mktemp("runs") / "paper", "paper", rounds=50, transcripts=("0", "server"))


@pytest.fixture(scope="module")
def told() -> list[str]:
    return []


@pytest.fixture(scope="module")
def found(paper: Path, told: list[str]) -> Audit:
    return suite.audit(paper, budget=replace(SMALL, estimators=("option I", "option II", "rewind")), tell=told.append)


def pick(audit: Audit, **wanted: str) -> list[Finding]:
    return [each for each in audit.findings if all(getattr(each, name) == value for name, value in wanted.items())]


def only(audit: Audit, **wanted: str) -> Finding:
    (finding,) = pick(audit, **wanted)
    return finding


def test_an_audit_looks_at_everything(found: Audit, told: list[str]) -> None:
    assert {finding.target for finding in found.findings} == {"update", "image", "label", "property", "membership"}
    assert {finding.seat for finding in found.findings} == {"client", "server", "anyone"}
    for target in ("update", "image", "property", "membership"):
        assert {finding.attacker for finding in pick(found, target=target)} == {"naive", "adaptive"}
    assert not [finding for finding in found.findings if math.isnan(finding.value)]
    assert not [finding.failures for finding in found.findings if finding.failures]
    assert found.name == "paper"
    assert found.settings["veil"] == 0.0
    assert found.settings["clear"] == ("1.bias", "3.weight", "3.bias")
    assert found.run["rounds"] == 50
    assert found.run["bytes"] > 0
    assert [seat for seat, _, _ in found.seats] == ["client", "server", "anyone"]
    assert "sketches of 1.weight without noise; in clear: 1.bias, 3.weight, 3.bias" in found.seats[0][1]
    assert found.seconds > 0
    assert {"rehearsal: single pictures", "membership: shadow models", "rewind: 1.weight"} <= set(told)


def test_findings_survive_json(found: Audit) -> None:
    text = found.json()
    again = Audit.from_json(text)
    assert again.json() == text
    assert again.findings == found.findings
    assert again.seats == found.seats
    assert again.worst("cosine") == found.worst("cosine")
    with_nan = replace(found, findings=(Finding("a", "client", "naive", "image", "psnr", float("nan")),))
    assert json.loads(with_nan.json())["findings"][0]["value"] is None
    assert math.isnan(Audit.from_json(with_nan.json()).findings[0].value)
    assert Audit.from_json(with_nan.json()).worst("psnr") is None


@pytest.mark.parametrize("where", ["", " (client-0 of the run)"])
def test_the_papers_attacks_fail_on_the_paper_and_rewind_does_not(found: Audit, where: str) -> None:
    """784 columns times 12 rows: a chance cosine is near 0.01."""
    for name in ("option I", "option II"):
        assert abs(only(found, attack=f"{name}{where}", measure="cosine").value) < 0.1
        assert only(found, attack=f"{name}{where}", measure="relative error").value > 5
    assert only(found, attack=f"rewind{where}", measure="cosine").value > 0.99
    assert only(found, attack=f"rewind{where}", measure="relative error").value < 0.1
    assert only(found, attack=f"tensors in clear{where}", measure="cosine").value > 0.99


def test_without_a_defence_the_client_sees_every_update(tmp_path: Path) -> None:
    audit = suite.audit(train(tmp_path / "plain", "plain"), budget=replace(SMALL, rounds=30, own_batches=8))
    for name in SMALL.estimators:
        assert only(audit, attack=name, measure="cosine").value == pytest.approx(1.0, abs=1e-3)
    assert audit.worst("cosine") == pytest.approx(1.0, abs=1e-3)
    assert only(audit, attack="label from the output layer's bias").value > 0.8


def test_a_run_with_a_veil_is_audited_with_the_smoother(tmp_path: Path) -> None:
    folder = train(tmp_path / "blind", "blind", rounds=1)
    changed = replace(config.from_toml((folder / "config.toml").read_text()), data="digits")
    assert changed.veil == 0.2
    script = rehearsal.drawn(np.arange(100), (8, 2, 4), seed=0)
    dataset = data.load("digits")
    played = rehearsal.rehearse(changed, dataset, script, tmp_path / "rehearsal")
    assert played.attacker.setting.veil == 0.2
    made = attacks.estimates(played.attacker, ["option I", "smoother"])
    findings = attacks.updates(played.attacker, played.truth, made, lambda text: None)
    assert max(abs(f.value) for f in findings if f.attack in made and f.measure == "cosine") < 0.5
    assert [f.attack for f in findings][-1] == "tensors unsketched, veiled"


def test_no_attack_of_a_rehearsal_opens_the_truth(tmp_path: Path) -> None:
    dataset = data.load("digits")
    settings = config.preset("paper", model=f"{NET}:make")
    script = rehearsal.drawn(np.arange(400), (20, 2, 1), seed=3)
    script[:, rehearsal.VICTIM, 0] = np.arange(20)
    played = rehearsal.rehearse(settings, dataset, script, tmp_path / "rehearsal")
    shutil.rmtree(tmp_path / "rehearsal" / "truth")
    made = attacks.estimates(played.attacker, ["option I", "rewind"])
    matching = Matching(steps=2, restarts=1)
    findings = attacks.images(played, dataset, made, [0], matching, lambda text: None)
    assert {(finding.attack, finding.seat) for finding in findings} >= {
        ("matching the lifted update", "server"),
        ("matching through the sketch", "server"),
        *((f"matching on {name}", "client") for name in made),
    }
    assert not any(finding.failures for finding in findings)
    assert attacks.clear_labels(played, dataset, range(19)).value > 0.8
    holds = np.arange(len(dataset.y_train)) % 2 == 0
    spare = np.arange(400, 800)
    assert property_findings(
        played, dataset, holds, spare, made, batches=8, examples=20, seed=0, tell=lambda text: None
    )
    with pytest.raises(AuditError, match="truth: round 0 cannot be read"):
        attacks.updates(played.attacker, played.truth, made, lambda text: None)


def test_a_rehearsal_plays_its_script(tmp_path: Path) -> None:
    dataset = data.load("digits")
    script = rehearsal.drawn(np.arange(400), (3, 3, 4), seed=3)
    settings = config.preset("paper", model=f"{NET}:make")
    one, two, again = (
        rehearsal.rehearse(settings, dataset, script, tmp_path / name, seed=seed)
        for name, seed in (("one", 1), ("two", 2), ("again", 1))
    )
    assert one.attacker.rounds == [0, 1, 2]
    assert sorted(one.server[0].updates) == ["0", "1", "2"]
    # The same script and the same initial weights, and sketches that follow from the seed.
    assert one.attacker[0].broadcast.plan != two.attacker[0].broadcast.plan
    assert one.attacker[0].broadcast.plan == again.attacker[0].broadcast.plan
    bias = [each.server[0].weights["3.bias"] for each in (one, two)]  # type: ignore[index]
    assert bias[0].equal(bias[1])
    steps: list[tuple[int, int]] = []
    rehearsal.rehearse(settings, dataset, script, tmp_path / "three", progress=lambda *step: steps.append(step))
    assert steps == [(1, 3), (2, 3), (3, 3)]


# --- what is missing ------------------------------------------------------------------------------------------------


def test_a_folder_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(AuditError, match=r"nothing holds no run: it has no config\.toml"):
        suite.audit(tmp_path / "nothing", budget=SMALL)


def test_an_unfinished_run_is_audited_all_the_same(tmp_path: Path) -> None:
    settings = config.preset("paper", model=f"{NET}:make", clients=4, fraction=1.0, rounds=5)
    run = Run.start(settings, tmp_path / "run")
    next(run.play())
    budget = replace(SMALL, rounds=30, own_batches=8, estimators=("option I", "rewind"))
    audit = suite.audit(tmp_path / "run", budget=budget)
    finding = only(audit, target="membership")
    assert math.isnan(finding.value)
    assert "model.safetensors is missing: the run is not finished" in finding.failures[0]
    assert {each.target for each in audit.findings} == {"update", "image", "label", "property", "membership"}
    assert Audit.from_json(audit.json()).json() == audit.json()


def job(folder: Path, budget: suite.Budget) -> suite.Job:
    settings = config.from_toml((folder / "config.toml").read_text())
    return suite.Job(settings, data.load("digits"), folder, folder, budget, 2, 0, None, lambda text: None)


def test_too_short_a_recording_fails_with_a_reason(tmp_path: Path) -> None:
    folder = train(tmp_path / "run", "paper", rounds=2, transcripts=("1",))
    with pytest.raises(AuditError, match="client-1 saw 2 rounds; estimating takes 3 or more"):
        suite.recorded(folder / "transcripts" / "client-1", job(folder, SMALL))


def test_a_recording_without_its_truth_fails_with_a_reason(paper: Path, tmp_path: Path) -> None:
    shutil.copytree(paper / "transcripts" / "client-0", tmp_path / "client-0")
    work = job(paper, replace(SMALL, estimators=("rewind",)))
    with pytest.raises(AuditError, match="truth: round 0 cannot be read"):
        suite.recorded(tmp_path / "client-0", work)
    whole = suite.recorded(paper / "transcripts" / "client-0", work)
    assert whole[0].attack == "rewind (client-0 of the run)"
    assert Transcript(tmp_path / "client-0").rounds == list(range(50))
    assert Truth(paper / "transcripts").cohort(0) == [0, 1, 2, 3]


def test_a_part_that_fails_is_a_finding_and_the_others_go_on(tmp_path: Path) -> None:
    folder = train(tmp_path / "run", "paper", rounds=2, transcripts=("1",))
    steps: list[tuple[int, int]] = []
    budget = replace(SMALL, rounds=30, own_batches=8, estimators=("option I", "rewind"))
    audit = suite.audit(folder, budget=budget, progress=lambda done, total: steps.append((done, total)))
    (failed,) = [finding for finding in audit.findings if finding.failures]
    assert failed.attack == "updates from client-1"
    assert failed.target == "update"
    assert math.isnan(failed.value)
    assert steps == [(done, 4) for done in range(5)]


# --- the command ----------------------------------------------------------------------------------------------------


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "160"})


def test_audit_fails_above_a_limit_and_leaves_page_and_json(
    paper: Path, found: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "QUICK", replace(SMALL, rounds=30, own_batches=8, estimators=("option I", "rewind")))
    folder = shutil.copytree(paper, tmp_path / "run", ignore=shutil.ignore_patterns("transcripts"))
    result = invoke("audit", str(folder), "--quick", "--fail-above", "cosine=0.3")
    assert result.exit_code == 1, result.output
    assert "cosine: " in result.output
    assert "above the limit 0.3" in result.output
    assert "An attack that failed proves nothing" in result.output
    html = (folder / "audit.html").read_text()
    assert html.startswith("<!")
    assert "rewind" in html
    written = Audit.from_json((folder / "audit.json").read_text())
    assert written.worst("cosine") > 0.99  # type: ignore[operator]
    monkeypatch.setattr(suite, "audit", lambda *arguments, **more: found)
    other = tmp_path / "pages" / "one.html"
    lenient = invoke("audit", str(folder), "--fail-above", "cosine=1.5", "--out", str(other))
    assert lenient.exit_code == 0, lenient.output
    assert Audit.from_json(other.with_suffix(".json").read_text()).json() == found.json()
    # Two audits side by side; a folder or the file itself.
    page = tmp_path / "compare.html"
    result = invoke("compare", str(folder), str(other.with_suffix(".json")), "--out", str(page))
    assert result.exit_code == 0, result.output
    assert "audits side by side" in result.output
    assert f"{written.run['accuracy']:.1%}" in result.output
    assert all(f"<td>{name}</td>" in page.read_text() for name in ("run", "paper"))


def test_wrong_limits_are_refused_before_the_work(tmp_path: Path) -> None:
    for arguments, words in (
        (["--fail-above", "speed=3"], "unknown measure 'speed'"),
        (["--parties", "1"], "parties must be 2 or more"),
    ):
        result = invoke("audit", str(tmp_path), *arguments)
        assert isinstance(result.exception, ConfigError)
        assert words in str(result.exception)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("compare", "audit.json is missing: run `dbcl audit run` first"),
        ("audit", "run holds no run: it has no config.toml"),
    ],
)
def test_what_is_missing_is_exit_status_2_and_one_message(
    command: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("sys.argv", ["dbcl", command, "run"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    said = capfd.readouterr().err
    assert words in said
    assert "Traceback" not in said


def test_a_file_that_is_no_audit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    for text in ("{", "{}", '{"findings": [], "seats": [], "speed": 1}'):
        path.write_text(text)
        result = invoke("compare", str(tmp_path))
        assert isinstance(result.exception, ConfigError)
        assert "audit.json is no audit" in str(result.exception)
