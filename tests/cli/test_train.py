import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from dbcl import cli
from dbcl.errors import ConfigError, DataError, GuaranteeError, PlanError
from dbcl.model import networks
from dbcl.protocol import checkpoint
from dbcl.simulation import preset, read_metrics
from dbcl.simulation.presets import to_toml

Invoke = Callable[..., str]

QUICK = ["train", "--preset", "blind", "--fraction", "0.03"]
"""A round of three clients with forty examples each, which is warned of."""

TEN = ["train", "--preset", "blind", "--fraction", "0.1"]
"""A round of ten, which is not."""


def test_a_run_leaves_its_folder_and_says_what_happened(invoke: Invoke) -> None:
    out = invoke(*QUICK, "--rounds", "3", "--seed", "1")
    folder = Path("runs/001-blind-digits")
    assert {path.name for path in folder.iterdir()} == {
        "config.toml",
        "metrics.jsonl",
        "model.safetensors",
        "curves.png",
        "plan.txt",
        ".lock",
        "checkpoints",
    }
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert {"accuracy", "loss", "bytes_up", "bytes_down", "refused", "seconds"} <= lines[0].keys()
    assert lines[0]["bytes_down"] > 3 * 400_000
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert "392 of 784 numbers of each row" in (folder / "plan.txt").read_text()
    for words in (
        f"{lines[-1]['accuracy']:.2%}",
        "392 of 784 numbers of each row of 1.weight",
        "each 49% smaller than FedAvg's",
        "0.2 times the weights, on everything that is sent",
        "fixed by --seed",
        "runs/001-blind-digits/curves.png",
        "dbcl train --resume runs/001-blind-digits --rounds 6",
    ):
        assert words in out
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    model = networks.build("mnist-mlp")
    model.load_state_dict(weights)
    invoke(*QUICK, "--rounds", "1", "--preset", "paper")
    assert Path("runs/002-paper-digits").is_dir()


def test_the_paper_preset_says_what_went_in_clear_and_that_it_can_be_undone(invoke: Invoke) -> None:
    out = invoke(*QUICK, "--rounds", "1", "--preset", "paper")
    assert "1.bias, 3.bias, 5.weight, 5.bias" in out
    assert "none: a client that stores earlier rounds can undo the sketch" in out
    assert "new each round" in out


def test_without_a_seed_every_run_has_its_own_secrets(invoke: Invoke) -> None:
    invoke(*QUICK, "--rounds", "1", "--out", "one")
    invoke(*QUICK, "--rounds", "1", "--out", "two")
    assert "seed" not in Path("one/config.toml").read_text()
    assert Path("one/model.safetensors").read_bytes() != Path("two/model.safetensors").read_bytes()


def test_a_secret_seed_has_256_bits_and_lies_with_the_checkpoints_alone(invoke: Invoke) -> None:
    invoke(*QUICK, "--rounds", "1", "--transcripts", "0,server", "--out", "one")
    invoke(*QUICK, "--rounds", "1", "--out", "two")
    seeds = [checkpoint.load(Path(name, "checkpoints")).values["run"]["seed"] for name in ("one", "two")]
    assert [len(bytes.fromhex(seed)) for seed in seeds] == [32, 32]
    assert seeds[0] != seeds[1]
    assert all(part not in seeds[1] for part in (seeds[0][:16], seeds[0][-16:]))  # it is not a short one, filled up
    files = [path for path in Path("one").rglob("*") if path.is_file()]
    holding = [path for path in files if seeds[0].encode() in path.read_bytes()]
    holding += [path for path in files if bytes.fromhex(seeds[0]) in path.read_bytes()]
    assert {path.parent.name for path in holding} == {"checkpoints"}
    assert {path.stat().st_mode & 0o777 for path in holding} == {0o600}


def test_a_seed_fixes_everything_from_an_option_or_from_a_file(invoke: Invoke) -> None:
    blind = to_toml(preset("blind"))
    Path("mine.toml").write_text(f"seed = 7\n{blind}")
    invoke(*QUICK, "--rounds", "1", "--seed", "7", "--out", "option")
    out = invoke(*QUICK, "--rounds", "1", "--preset", "mine.toml", "--out", "file")
    assert "fixed by --seed, for experiments" in out
    assert Path("option/model.safetensors").read_bytes() == Path("file/model.safetensors").read_bytes()


def test_stop_at_a_target_and_go_on_for_longer(invoke: Invoke) -> None:
    invoke(*QUICK, "--rounds", "30", "--target", "0.7", "--seed", "1", "--out", "run")
    reached = read_metrics(Path("run"))
    assert len(reached) < 30
    assert reached[-1].score >= 0.7 > reached[-2].score
    invoke("train", "--resume", "run", "--target", "1.0", "--rounds", str(len(reached) + 2))
    assert len(read_metrics(Path("run"))) == len(reached) + 2


def test_resume_equals_the_uninterrupted_run_with_local_state_and_dropped_lines(invoke: Invoke) -> None:
    invoke(*QUICK, "--rounds", "6", "--seed", "1", "--out", "whole")
    invoke(*QUICK, "--rounds", "3", "--seed", "1", "--out", "parts")
    # A crash between a metrics line and its checkpoint leaves a line too many, or half of one.
    with open("parts/metrics.jsonl", "a") as file:
        file.write(Path("whole/metrics.jsonl").read_text().splitlines()[3] + '\n{"round": 5, "accu')
    invoke("train", "--resume", "parts", "--rounds", "6")
    assert Path("parts/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()
    drop = ("seconds",)
    whole, parts = (
        [{k: v for k, v in vars(metrics).items() if k not in drop} for metrics in read_metrics(Path(name))]
        for name in ("whole", "parts")
    )
    assert whole == parts


def streams(*arguments: str) -> tuple[str, str]:
    result = CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def test_quiet_prints_nothing() -> None:
    assert streams(*TEN, "--rounds", "2", "--quiet") == ("", "")
    assert Path("runs/001-blind-digits/model.safetensors").exists()


def test_json_is_one_object_and_nothing_else() -> None:
    out, err = streams(*QUICK, "--rounds", "3", "--seed", "4", "--json")
    report, history = json.loads(out), read_metrics(Path("runs/001-blind-digits"))
    assert err == ""
    best = max(history, key=lambda metrics: metrics.score)
    assert report["folder"] == "runs/001-blind-digits"
    assert (report["rounds"], report["stopped_by"]) == (3, "rounds")
    assert (report["accuracy"], report["best"]) == (
        history[-1].score,
        {"accuracy": best.score, "round": best.round},
    )
    assert report["bytes_up"] == sum(metrics.bytes_up for metrics in history)
    assert report["bytes_down"] == sum(metrics.bytes_down for metrics in history)
    assert (report["seed"], report["insecure"], report["device"]) == (4, True, "cpu")
    out, _ = streams("train", "--resume", "runs/001-blind-digits", "--json")
    assert json.loads(out)["rounds"] == 3


def test_few_clients_in_a_round_are_warned_of_once_and_quiet_says_it_too() -> None:
    for more in ([], ["--quiet"], ["--json"]):
        _, err = streams(*QUICK, "--rounds", "1", *more)
        (said,) = err.splitlines()
        assert said.startswith("warning: 3 clients take part in a round: with fewer than 10, a client that stores")
        assert "AUC 0.95 and more between two, about 0.8 with ten" in said
        assert "--preset private, with few clients private-example" in said
    _, err = streams("train", "--resume", "runs/001-blind-digits")
    assert err == ""  # nothing is left to play


@pytest.mark.parametrize(
    "settings", [("--preset", "plain"), ("--preset", "paper"), ("--preset", "private-example"), ("--seed", "0")]
)
def test_without_a_secret_veil_or_with_a_guarantee_few_clients_are_not_warned_of(settings: tuple[str, str]) -> None:
    _, err = streams("train", *settings, "--clients", "4", "--fraction", "1", "--rounds", "1")
    assert err == ""


def test_without_a_terminal_there_are_lines_and_no_bar(invoke: Invoke) -> None:
    out = invoke(*QUICK, "--rounds", "20")
    assert [line.split()[1] for line in out.splitlines() if line.startswith("round ")] == [
        f"{number}/20" for number in range(2, 21, 2)
    ]
    assert "━" not in out
    stopped = invoke(*QUICK, "--rounds", "400", "--target", "0.3")
    last = len(read_metrics(Path("runs/002-blind-digits")))
    assert f"round {last}/400  accuracy " in stopped
    assert f"{last} rounds, stopped: the target was reached" in stopped


def test_patience_says_since_when_and_how_to_go_on(invoke: Invoke) -> None:
    out = invoke(*QUICK, "--rounds", "80", "--patience", "2", "--seed", "1", "--out", "run")
    history = read_metrics(Path("run"))
    assert f"{len(history)} rounds, stopped: no better accuracy since round {len(history) - 2}" in out
    assert f"dbcl train --resume run --rounds 80 --patience {2 * len(history)}" in out
    invoke("train", "--resume", "run", "--rounds", str(len(history) + 1), "--patience", "99")
    assert len(read_metrics(Path("run"))) == len(history) + 1


def test_large_transcripts_are_announced_before_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [*TEN, "--rounds", "2", "--quiet", "--transcripts", "0,server", "--max-influence", "0"]
    assert streams(*arguments)[1] == ""
    monkeypatch.setattr("dbcl.cli.train.TRANSCRIPT_BYTES", 1e6)
    said = streams(*arguments)[1]
    assert said.startswith("warning: --transcripts will take up to 0.0 GB in runs/002-blind-digits/transcripts, where ")
    assert "server-sum takes less than server" in said


def start(*arguments: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "dbcl", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


@pytest.mark.slow  # tests/robustness/test_kill.py has a quick one
def test_killed_at_random_moments_and_resumed_gives_the_same_weights_bit_for_bit(invoke: Invoke) -> None:
    kills = 10
    rounds = 40 * kills
    fresh = [*QUICK, "--rounds", str(rounds), "--seed", "5", "--ratio", "2-3", "--server-optimizer", "adam"]
    invoke(*fresh, "--out", "whole")
    rng = random.Random(0)
    done, interrupted = 0, 0
    while interrupted < kills:
        begun = Path("killed/config.toml").exists()
        run = start(*(["train", "--resume", "killed"] if begun else [*fresh, "--out", "killed"]))
        # Wait for the work to begin, then let it run for a random while: mid-round, mid-checkpoint, wherever it is.
        checkpoints = Path("killed/checkpoints")
        while run.poll() is None and not (begun or list(checkpoints.glob("round-*.dbcl"))):
            time.sleep(0.01)
        if begun:
            before = newest(checkpoints)
            while run.poll() is None and newest(checkpoints) == before:
                time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.3))
        run.send_signal(signal.SIGKILL)
        _, stderr = run.communicate()
        assert run.returncode == -signal.SIGKILL, stderr.decode()
        interrupted += 1
        assert newest(checkpoints) >= done
        done = newest(checkpoints)
    assert done < rounds
    invoke("train", "--resume", "killed")
    whole, killed = (safetensors.torch.load_file(f"{name}/model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(whole[name], killed[name]) for name in whole)


def newest(checkpoints: Path) -> int:
    return max((int(path.stem.removeprefix("round-")) for path in checkpoints.glob("round-*.dbcl")), default=-1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--resume", "nowhere"], ConfigError, "nowhere holds no run"),
        (
            ["--resume", "nowhere", "--lr", "1"],
            ConfigError,
            "only --rounds, --target, --patience and --track may change, not lr",
        ),
        (["--ratio", "two"], ConfigError, "ratio is a number or a range such as 2-4, got 'two'"),
        (["--ratio", "2-3-4"], ConfigError, "ratio is a number or a range"),
        (["--preset", "blind", "--coverage", "nope.*"], PlanError, "pattern 'nope.*' matches no parameter"),
        (["--model", "resnet"], ConfigError, "no model 'resnet'"),
        (["--data", "mnist", "--data-dir", "."], DataError, "is missing; try `dbcl data fetch mnist`"),
        (["--preset", "blind", "--clients", "5000"], DataError, "4000 examples cannot be divided into 5000 parts"),
        (["--lr", "-1"], ConfigError, "lr must be above 0, got -1"),
        (["--ratio", "4"], GuaranteeError, "no preset was named, so this is guaranteed"),
        (["--device", "cuda"], ConfigError, "PyTorch finds no CUDA device here"),
    ],
)
def test_bad_options_are_one_clear_error_and_leave_nothing(
    invoke: Invoke, arguments: list, error: type, message: str
) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(error) as caught:
        invoke("train", *arguments)
    assert message in str(caught.value)
    assert list(Path().iterdir()) == []


def test_an_existing_run_is_not_overwritten(invoke: Invoke) -> None:
    invoke(*QUICK, "--rounds", "1", "--out", "run")
    before = Path("run/model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="run holds a run already; go on with it by `resume`"):
        invoke(*QUICK, "--rounds", "1", "--out", "run")
    assert Path("run/model.safetensors").read_bytes() == before
