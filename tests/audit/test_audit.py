"""Whole audits of tiny runs: every attack gives its finding, and what cannot run is said and does not stop the rest."""

import inspect
import json
import math
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

import dbcl
import dbcl_audit
from dbcl import cli
from dbcl.errors import AuditError, ConfigError
from dbcl.simulation import Run, presets, task_of
from dbcl.transcripts import Transcript, Truth
from dbcl_audit import audit as audits
from dbcl_audit.attacks.updates import audit_recording
from dbcl_audit.context import AuditContext
from dbcl_audit.effort import FULL, QUICK, AuditEffort
from dbcl_audit.findings import Audit, Finding, cases
from dbcl_audit.report.rating import worst, worst_by_adversary

SMALL = AuditEffort(
    estimators=("option I", "option II", "rewind"),
    rounds=44,
    batch=8,
    own_batches=1,
    own_examples=20,
    images=1,
    steps=3,
    restarts=1,
    inverting=True,
    shadow_models=4,
    solver_steps=5,
    min_lag=22,
    run_rounds=6,
    all_rounds=6,
    drift_examples=50,
    null_examples=50,
    property_examples=60,
    step_images=0,
    known_ends=False,
    fixed_images=1,
    fixed_rounds=6,
    fixed_steps=3,
)
TINY = replace(SMALL, estimators=("rewind",), rounds=20, batch=2, own_batches=1, own_examples=4, min_lag=4)


def train(folder: Path, preset: str, **changes: Any) -> Path:
    settings = {"clients": 4, "fraction": 1.0, "rounds": 3, "algorithm": "sgd", "seed": 0, **changes}
    run = Run.start(presets.preset(preset, model="audit.networks:twelve", **settings), folder)
    for _ in run.play():
        pass
    return folder


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the paper's setting, long enough that an attacker that goes backward knows its first rounds."""
    with pytest.MonkeyPatch.context() as patch:  # the fixture that does this for tests comes too late
        patch.setattr("os.fsync", lambda descriptor: None)
        return train(tmp_path_factory.mktemp("runs") / "paper", "paper", rounds=50, transcripts=("0", "server"))


@pytest.fixture(scope="module")
def told() -> list[str]:
    return []


@pytest.fixture(scope="module")
def moves() -> list[tuple[int, int]]:
    return []


@pytest.fixture(scope="module")
def found(paper: Path, told: list[str], moves: list[tuple[int, int]]) -> Audit:
    """The one audit that most tests here look at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        return audits.audit(
            paper, effort=SMALL, allow_code=True, tell=told.append, progress=lambda *step: moves.append(step)
        )


def pick(audit: Audit, **wanted: str) -> list[Finding]:
    return [each for each in audit.findings if all(getattr(each, name) == value for name, value in wanted.items())]


def only(audit: Audit, **wanted: str) -> Finding:
    (finding,) = pick(audit, **wanted)
    return finding


def test_an_audit_looks_at_everything(found: Audit, told: list[str]) -> None:
    assert {finding.target for finding in found.findings} == {"update", "image", "label", "property", "membership"}
    assert {finding.adversary for finding in found.findings} == {"client", "server", "anyone"}
    for target in ("update", "image", "property", "membership"):
        assert {finding.attacker for finding in pick(found, target=target)} == {"naive", "adaptive"}
    assert not [finding for finding in found.findings if math.isnan(finding.value)]
    assert not [finding.failures for finding in found.findings if finding.failures]
    assert found.name == "paper"
    assert found.settings["veil"] == 0.0
    assert found.settings["unprotected"] == ("1.bias", "3.weight", "3.bias")
    assert found.run["rounds"] == 50
    assert found.run["bytes"] > 0
    assert [adversary for adversary, _, _ in found.adversaries] == ["client", "server", "anyone"]
    assert "sketches of 1.weight without noise; unprotected: 1.bias, 3.weight, 3.bias" in found.adversaries[0][1]
    assert found.seconds > 0
    assert {"simulated run: single images", "membership: shadow models", "rewind: 1.weight"} <= set(told)


def test_every_finding_names_its_simulated_run(found: Audit) -> None:
    """Only findings on the final model and on recordings of the run itself have none."""
    named = {
        finding.simulated_run: {each.target for each in pick(found, simulated_run=finding.simulated_run)}
        for finding in found.findings
    }
    assert named == {
        "": {"update", "membership"},
        "2 parties, single steps on fresh batches": {"update", "property", "image", "label"},
        "2 parties, one image in all rounds": {"image", "label"},
        "2 parties with fixed shards": {"membership", "update", "label"},
        "4 clients with fixed shards, all in every round": {"membership", "update"},
        "as the run is: 4 of 4 clients in a round": {"membership"},
    }
    for finding in pick(found, simulated_run=""):
        assert finding.attack.endswith("(client-0 of the run)") or finding.adversary in ("anyone", "client"), finding
    again = Audit.from_json(found.json())
    assert [each.simulated_run for each in again.findings] == [each.simulated_run for each in found.findings]


def test_an_audit_says_when_with_what_and_how_it_was_made(found: Audit) -> None:
    written = json.loads(found.json())
    assert (
        abs(datetime.now(UTC) - datetime.strptime(written["date"], "%Y-%m-%d %H:%M %Z").replace(tzinfo=UTC)).days == 0
    )
    assert written["version"] == dbcl.__version__
    assert written["parties"] == 2
    assert written["property_name"] == "thick strokes"
    assert written["budget"] == {**json.loads(json.dumps(asdict(SMALL))), "seed": 0}
    assert written["settings"]["rounds"] == 50


def test_every_value_says_how_many_cases_it_rests_on_and_shares_have_an_interval(found: Audit) -> None:
    for finding in found.findings:
        assert cases(finding)[0] > 0, finding
        if finding.attack.startswith("unprotected tensors"):
            continue  # a median over all rounds
        if finding.measure in ("cosine", "accuracy", "auc", "auc", "psnr"):
            assert finding.low is not None, finding
            assert finding.low <= finding.value <= finding.high, finding  # type: ignore[operator]
    simulated = only(found, attack="rewind", measure="cosine")
    curve = simulated.curves[0]
    assert cases(simulated) == (sum(lag >= SMALL.min_lag for lag in curve.x), "scored rounds")


def test_the_bar_moves_with_every_round_tensor_image_and_model(found: Audit, moves: list[tuple[int, int]]) -> None:
    done = [done for done, _ in moves]
    assert {total for _, total in moves} == {done[-1]}
    assert done == sorted(set(done))
    assert len(done) > 150
    assert max(after - before for before, after in pairwise(done)) < 0.05 * done[-1]


def test_findings_survive_json(found: Audit) -> None:
    text = found.json()
    again = Audit.from_json(text)
    assert again.json() == text
    assert again.findings == found.findings
    assert again.adversaries == found.adversaries
    assert worst(again, "cosine") == worst(found, "cosine")
    with_nan = replace(found, findings=(Finding("a", "client", "naive", "image", "psnr", float("nan")),))
    assert json.loads(with_nan.json())["findings"][0]["value"] is None
    assert math.isnan(Audit.from_json(with_nan.json()).findings[0].value)
    assert worst(Audit.from_json(with_nan.json()), "psnr") is None


@pytest.mark.parametrize("where", ["", " (client-0 of the run)"])
def test_the_papers_attacks_fail_on_the_paper_and_rewind_does_not(found: Audit, where: str) -> None:
    """784 columns times 12 rows: a chance cosine is near 0.01."""
    for name in ("option I", "option II"):
        assert abs(only(found, attack=f"{name}{where}", measure="cosine").value) < 0.1
        assert only(found, attack=f"{name}{where}", measure="relative error").value > 5
    assert only(found, attack=f"rewind{where}", measure="cosine").value > 0.99
    assert only(found, attack=f"rewind{where}", measure="relative error").value < 0.1
    assert only(found, attack=f"unprotected tensors{where}", measure="cosine").value > 0.99


@pytest.mark.slow
def test_an_audit_of_a_run_with_lanes_simulates_clients_that_collude(tmp_path: Path) -> None:
    folder = train(tmp_path / "run", "paper", rounds=1, lanes=2)
    steps: list[tuple[int, int]] = []
    audit = audits.audit(folder, effort=TINY, allow_code=True, progress=lambda *step: steps.append(step))
    assert [adversary for adversary, _, _ in audit.adversaries] == ["client", "colluders", "server", "anyone"]
    assert "sketches of 1.weight in one of 2 lanes without noise" in audit.adversaries[0][1]
    together = pick(audit, adversary="colluders")
    assert {finding.target for finding in together} == {"update", "property", "membership"}
    assert only(audit, adversary="colluders", attack="smoother", measure="cosine").value > 0.999
    single = [finding for finding in together if finding.simulated_run == "4 parties, single steps on fresh batches"]
    assert all(finding.note.startswith("2 of 4 clients together, one of each lane") for finding in single)
    assert all("2 of 4 clients together" in finding.note for finding in together)
    assert worst_by_adversary(audit)["colluders"] in together
    assert steps[-1][0] == steps[-1][1]
    assert not [finding.failures for finding in audit.findings if finding.failures]


# --- what is missing ------------------------------------------------------------------------------------------------


def test_a_folder_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing holds no run: it has no config\.toml"):
        audits.audit(tmp_path / "nothing", effort=SMALL)


def test_parts_that_fail_are_findings_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is not finished, and a fault in one part; two recordings that are too short did not fail."""

    def broken(*arguments: Any, **more: Any) -> list[Finding]:
        raise TypeError("object has no len()")

    parts = [replace(part, run=broken) if part.name == "members" else part for part in audits.PARTS]
    monkeypatch.setattr(audits, "PARTS", tuple(parts))
    settings = presets.preset("paper", model="audit.networks:twelve", clients=4, fraction=1.0, rounds=5, seed=0)
    run = Run.start(replace(settings, transcripts=("1",)), tmp_path / "run")
    next(run.play())
    silent = tmp_path / "run" / "transcripts" / "client-3"
    silent.mkdir()
    shutil.copy(silent.with_name("client-1") / "setting.json", silent)
    steps: list[tuple[int, int]] = []
    audit = audits.audit(
        tmp_path / "run", effort=TINY, allow_code=True, progress=lambda done, total: steps.append((done, total))
    )
    membership, faulty = (finding for finding in audit.findings if finding.failures)
    assert audit.not_attacked["updates from client-1"] == "client-1 saw 1 rounds; estimating takes 3 or more"
    assert audit.not_attacked["updates from client-3"] == "client-3 holds no rounds: nothing was sent to it"
    assert (membership.target, membership.measure) == ("membership", "auc")
    assert "model.safetensors is missing: the run is not finished" in membership.failures[0]
    assert math.isnan(membership.value)
    assert (faulty.attack, faulty.target, faulty.measure) == ("members", "membership", "auc")
    assert "TypeError: object has no len()" in faulty.failures[0]
    assert {each.target for each in audit.findings if not each.failures} >= {"update", "image", "label", "property"}
    (total,) = {total for _, total in steps}
    assert steps[0] == (0, total)
    assert steps[-1] == (total, total)
    assert [done for done, _ in steps] == sorted({done for done, _ in steps})
    assert Audit.from_json(audit.json()).json() == audit.json()


@pytest.mark.parametrize("part", audits.PARTS, ids=lambda part: part.name)
def test_a_part_that_failed_is_labelled_by_its_own_adversary_and_measure(part: audits.Part) -> None:
    found = part.failed(AuditError("no room"))
    assert (found.attack, found.adversary, found.target) == (part.name, part.adversary, part.target)
    assert (found.measure, found.failures) == (part.measure, ("no room",))
    assert math.isnan(found.value)


@pytest.mark.slow
def test_a_client_that_is_alone_in_its_round_is_not_attacked_as_a_member(tmp_path: Path) -> None:
    settings = presets.preset("blind", model="audit.networks:twelve", clients=5, fraction=0.2, rounds=2, seed=0)
    run = Run.start(settings, tmp_path / "run")
    list(run.play())
    audit = audits.audit(tmp_path / "run", effort=replace(TINY, whole_cohort=True), allow_code=True)
    assert not [finding.failures for finding in audit.findings if finding.failures]
    assert "one client" in audit.not_attacked["members, as the run is"]


@pytest.mark.slow
@pytest.mark.parametrize("name", presets.PRESETS)
@pytest.mark.parametrize("clients", [2, 3, 10])
@pytest.mark.parametrize("rounds", [5, 20, 60])
def test_every_preset_is_audited_with_any_number_of_clients_and_rounds(
    name: str, clients: int, rounds: int, tmp_path: Path
) -> None:
    """Every part gives findings, or says in words why it is left out; none fails by a fault of ours."""
    settings: dict[str, Any] = {"clients": clients, "fraction": 1.0, "rounds": rounds, "transcripts": ("0", "server")}
    if name == "private-example":
        settings["separation"] = min(10, rounds)
    elif name == "private":
        settings["epsilon"] = 1000.0  # at a smaller one so few clients are refused: the noise would be too large
    run = Run.start(presets.preset(name, model="audit.networks:twelve", seed=0, **settings), tmp_path / "run")
    list(run.play())
    audit = audits.audit(tmp_path / "run", effort=TINY, allow_code=True)
    assert audit.findings
    assert "a fault of dbcl" not in " ".join(reason for each in audit.findings for reason in each.failures)


def context(folder: Path, effort: AuditEffort) -> AuditContext:
    settings = presets.from_toml((folder / "config.toml").read_text())
    return AuditContext(settings, task_of(settings), folder, folder, effort, 2, 0, lambda text: None)


def test_a_recording_without_its_truth_fails_with_a_reason(paper: Path, tmp_path: Path) -> None:
    shutil.copytree(paper / "transcripts" / "client-0", tmp_path / "client-0")
    work = context(paper, replace(SMALL, estimators=("rewind",)))
    with pytest.raises(AuditError, match="truth: round 0 cannot be read"):
        audit_recording(tmp_path / "client-0", work)
    whole = audit_recording(paper / "transcripts" / "client-0", work)
    assert whole[0].attack == "rewind (client-0 of the run)"
    assert Transcript(tmp_path / "client-0").rounds == list(range(50))
    assert Truth(paper / "transcripts").cohort(0) == [0, 1, 2, 3]


# --- the command ----------------------------------------------------------------------------------------------------


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "160"})


def test_audit_fails_above_a_limit_and_leaves_page_and_json(
    paper: Path, found: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    signature = inspect.signature(audits.audit)

    def audit(*arguments: Any, **more: Any) -> Audit:
        asked.append(signature.bind(*arguments, **more).arguments)
        return found

    monkeypatch.setattr(audits, "audit", audit)
    folder = shutil.copytree(paper, tmp_path / "run", ignore=shutil.ignore_patterns("transcripts"))
    result = invoke("audit", str(folder), "--quick", "--parties", "3", "--fail-above", "cosine=0.3")
    assert result.exit_code == 1, result.output
    assert "cosine: " in result.output
    assert "above the limit 0.3" in result.output
    assert "An attack that failed proves nothing" in result.output
    assert "These are simulated runs, most of them of 2 parties" in result.output
    for verdict in ("A client got as much as if there were no defence.", "The server got as much as if there were no"):
        assert verdict in " ".join(result.output.split())
    html = (folder / "audit.html").read_text()
    assert html.startswith("<!")
    assert "rewind" in html
    written = Audit.from_json((folder / "audit.json").read_text())
    assert worst(written, "cosine") > 0.99  # type: ignore[operator]
    other = tmp_path / "pages" / "one.html"
    lenient = invoke("audit", str(folder), "--fail-above", "cosine=1.5", "--out", str(other))
    assert lenient.exit_code == 0, lenient.output
    assert invoke("audit", str(folder), "--fail-above", "anyone.cosine=0.3,client.cosine=1.5").exit_code == 1
    by_adversary = invoke("audit", str(folder), "--fail-above", "client.cosine=1.5,anyone.auc=0.99")
    assert by_adversary.exit_code == 0, by_adversary.output
    assert Audit.from_json(other.with_suffix(".json").read_text()).json() == found.json()
    assert [(each["folder"], each["effort"], each["clients"]) for each in asked] == [
        (folder, QUICK, 3),
        (folder, FULL, 2),
        (folder, FULL, 2),
        (folder, FULL, 2),
    ]
    # Two audits side by side; a folder or the file itself.
    page = tmp_path / "compare.html"
    result = invoke("compare", str(folder), str(other.with_suffix(".json")), "--out", str(page))
    assert result.exit_code == 0, result.output
    assert "audits side by side" in result.output
    assert "cosine" in result.output
    assert "higher is worse" in result.output
    (guessing,) = (line for line in result.output.splitlines() if line.strip().startswith("guessing"))
    assert float(guessing.split()[1]) >= 0  # what anybody expects of an update has a cosine, too
    assert guessing.split()[3] == "0.500"
    assert f"{written.run['accuracy']:.1%}" in result.output
    assert page.read_text().count("<td>paper</td>") == 2


@pytest.mark.slow
def test_the_command_audits_a_run(tmp_path: Path) -> None:
    """The quick budget as it ships, by the command, on the default preset: as docs/audit.md says."""
    folder = train(tmp_path / "run", "blind", rounds=20)
    limits = "client.cosine=0.99,client.psnr=45,server.psnr=15"  # under a veil no client gets what is exact
    result = invoke("audit", str(folder), "--quick", "--allow-code", "--fail-above", limits)
    assert result.exit_code == 1, result.output
    written = Audit.from_json((folder / "audit.json").read_text())
    assert {finding.target for finding in written.findings} == {"update", "image", "label", "property", "membership"}
    assert not [finding.failures for finding in written.findings if math.isnan(finding.value)]
    assert "server.psnr: " in result.output
    assert "client.cosine: " not in result.output
    assert "client.psnr: " not in result.output


@pytest.mark.slow
def test_the_paper_preset_with_two_clients_is_audited_without_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both know each other's updates but for rounding here: covariances are singular."""
    monkeypatch.chdir(tmp_path)
    command = "train --preset paper --clients 2 --rounds 60 --transcripts 0,server --seed 0 --out run"
    assert invoke(*command.split()).exit_code == 0
    result = invoke("audit", "run", "--quick")
    assert result.exit_code == 0, result.output
    written = Audit.from_json(Path("run/audit.json").read_text())
    assert {finding.target for finding in written.findings} == {"update", "image", "label", "property", "membership"}
    assert not [finding.failures for finding in written.findings if math.isnan(finding.value)]


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
    for text in ("{", "{}", '{"findings": [], "adversaries": [], "speed": 1}'):
        path.write_text(text)
        result = invoke("compare", str(tmp_path))
        assert isinstance(result.exception, ConfigError)
        assert "audit.json is no audit" in str(result.exception)


def test_what_an_audit_needs_is_loaded_on_first_use() -> None:
    parts = ("effort.QUICK.rounds", "audit.audit", "report.page.page", "findings.Audit")
    program = (
        "import sys, dbcl_audit; dbcl_audit.report; assert not {'sklearn', 'scipy'} & sys.modules.keys(); "
        f"print({', '.join(f'dbcl_audit.{part}' for part in parts)})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="'dbcl_audit' has no attribute 'speed'"):
        dbcl_audit.speed  # noqa: B018
