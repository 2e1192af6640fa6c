import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

import dbcl
from dbcl.cli.console import sparkline
from dbcl.errors import ConfigError, DataError, PlanError
from dbcl_audit.cli.audit import worst_rows
from dbcl_audit.findings import Audit, Finding
from dbcl_audit.report import measures

Invoke = Callable[..., str]


@pytest.mark.parametrize("program", [["-m", "dbcl"], ["-c", "from dbcl.cli import main; main()"]])
def test_the_command_itself_prints_one_message_and_exits_with_2(program: list[str]) -> None:
    command = [sys.executable, *program, "train", "--model", "resnet"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("error no model 'resnet'; choose mnist-mlp")
    assert "Traceback" not in result.stderr


def test_a_misspelt_command_is_suggested_once() -> None:
    done = subprocess.run([sys.executable, "-m", "dbcl", "trian"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("Did you mean 'train'?") == 1


def test_the_version(invoke: Invoke) -> None:
    assert invoke("--version") == f"dbcl {dbcl.__version__}\n"
    assert "Double-Blind Collaborative Learning" in invoke("--help")


def test_plan_shows_what_a_client_would_see(invoke: Invoke) -> None:
    out = invoke("plan", "mnist-cnn", "--ratio", "2-4")
    assert "200 to 400 of 800 numbers of each row" in out
    assert "unprotected: nothing" in out
    facts = json.loads(invoke("plan", "cifar-cnn", "--shape", "3,32,32", "--preset", "paper", "--json"))
    assert facts["message_bytes"] < 0.51 * facts["plain_message_bytes"]
    assert facts["unprotected"][0] == "0.0.bias"
    half = json.loads(invoke("plan", "cifar-cnn", "--shape", "3,32,32", "--wire", "bfloat16", "--json"))
    assert half["message_bytes"] < 0.26 * half["plain_message_bytes"]
    assert "no veil" in invoke("plan", "mnist-mlp", "--veil", "0")
    schemes = {
        number: {
            row["sketch"] for row in json.loads(invoke("plan", "mnist-mlp", "--lanes", number, "--json"))["tensors"]
        }
        for number in ("1", "3")
    }
    assert schemes == {"1": {"count-v1", "none"}, "3": {"lanes-v1", "none"}}
    with pytest.raises(ConfigError, match="shape is channels,height,width"):
        invoke("plan", "mnist-mlp", "--shape", "28")


def test_plan_reads_its_settings_as_train_does(invoke: Invoke) -> None:
    Path("mine.toml").write_text('coverage = "1.*,3.*,!3.weight"\nratio = "2-4"\nwire = "bfloat16"\n')
    facts = json.loads(invoke("plan", "mnist-mlp", "--preset", "mine.toml", "--json"))
    assert [row["tensor"] for row in facts["tensors"] if row["sketch"] != "none"] == ["1.weight"]
    assert facts["tensors"][0]["a client sees"] == "196 to 392 of 784 numbers of each row"
    assert facts["wire"] == "bfloat16"
    with pytest.raises(PlanError, match="pattern '' matches no parameter"):
        invoke("plan", "mnist-mlp", "--coverage", "")
    with pytest.raises(ConfigError, match="ratio is a number or a range such as 2-4, got ''"):
        invoke("plan", "mnist-mlp", "--ratio", "")
    with pytest.raises(ConfigError, match="wire must be one of float64, float32"):
        invoke("plan", "mnist-mlp", "--wire", "int8")


def test_data_and_env(invoke: Invoke) -> None:
    facts = json.loads(invoke("data", "--data-dir", "here", "--json"))
    assert facts["folder"] == "here"
    assert {row["name"]: row["here"] for row in facts["datasets"]}["digits"] is True
    assert {row["name"]: row["here"] for row in facts["datasets"]}["mnist"] is False
    assert "4,000 to learn from, 1,000 held out" in invoke("data", "--data-dir", "here")
    assert {"dbcl", "python", "torch", "cuda"} <= json.loads(invoke("env", "--json")).keys()
    assert "torch:" in invoke("env")
    with pytest.raises(DataError, match="LFW cannot be fetched"):
        invoke("data", "fetch", "lfw")


def test_the_audits_table_is_made_of_the_findings_not_of_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "range_text", lambda finding: "in words, (as it were)")
    findings = (
        Finding("rewind", "client", "naive", "update", "cosine", 0.02, -0.2, 0.2, 0.0),
        Finding("smoother", "client", "adaptive", "update", "cosine", 0.99, 0.98, 1.0, 0.0, {"scored rounds": 12}),
        Finding("invert", "server", "adaptive", "picture", "psnr", 25.0, None, None, 13.0),
        Finding("invert", "server", "adaptive", "picture", "ssim", 0.9),
        Finding("forest", "client", "naive", "property", "auc", 0.52),
        Finding("LiRA", "anyone", "adaptive", "membership", "tpr at 1 % fpr", 0.031, budget={"members": 1000}),
    )
    assert list(worst_rows(Audit("a", {}, {}, (), findings, 1.0, property_name="thick strokes"))) == [
        (
            "update\ncosine",
            "client",
            "0.000",
            "0.020\n-0.200 to 0.200\n[bold]unclear",
            "0.990\n0.980 to 1.000\n12 scored rounds\n[bold]as bad as no defence",
        ),
        ("picture\npsnr", "server", "13.0 dB", "–", "25.0 dB\n[bold]leaks"),
        ("thick strokes\nauc", "client", "0.500", "0.520\n[bold]close to guessing", "–"),
        ("membership\nfound at 1 % false alarms", "anyone", "1.0 %", "–", "3.1 %\n1,000 members\n[bold]leaks"),
    ]


def test_a_comparison_fits_a_terminal_of_80_columns(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        Finding("smoother", "client", "adaptive", "update", "cosine", 0.329),
        Finding("invert", "server", "adaptive", "image", "psnr", 39.8, chance=13.7),
        Finding("invert", "server", "adaptive", "image", "psnr", 39.8, chance=13.1),
    ]
    run = {"accuracy": 0.915, "rounds": 60, "bytes": 485e6}
    for name, findings in (("001-blind", found[:2]), ("002-paper", found)):
        Path(f"{name}.json").write_text(Audit(name, {}, run, (), tuple(findings), 1.0).json())
    monkeypatch.setattr("dbcl_audit.cli.compare.console", Console(width=80))
    lines = invoke("compare", "001-blind.json", "002-paper.json").splitlines()
    worst = next(number for number, line in enumerate(lines) if "worst finding" in line)
    rows = {words[0]: words[1:] for words in map(str.split, lines[:worst]) if words}
    assert "leaks" in " ".join(lines[worst:])
    assert rows["guessing"] == ["0.000", "—", "—", "13.7", "—", "—"]
    assert rows["001-blind"] == ["91.5%", "60", "485", "0.329", "—", "—", "39.8", "—", "—"]
    assert rows["002-paper"][-3] == "39.8"
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("count", [1, 2, 3, 31, 32, 33, 64, 200])
def test_a_sparkline_goes_from_the_first_round_to_the_last(count: int) -> None:
    low, bars, high = sparkline([index / count for index in range(count)], "{:.1%}".format).split()
    assert low == "0.0%"
    assert high == f"{(count - 1) / count:.1%}"
    assert len(bars) == min(32, count)
    assert list(bars) == sorted(bars)
    assert bars[0] == "▁"
    assert bars[-1] == ("█" if count > 1 else "▁")
