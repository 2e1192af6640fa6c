"""What surrounds a command goes wrong: disks, pipes, terminals, folders, processes. Still one line and one status."""

import contextlib
import errno
import http.client
import io
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import torch

from dbcl import SketchPlan, __main__, cli
from dbcl.cli.train import _next_folder
from dbcl.engines import Engine
from dbcl.errors import AuditError
from dbcl.files import locked
from dbcl.simulation import Run, RunConfig, read_metrics
from dbcl.simulation.task import task_of
from dbcl.transcripts import Transcript
from dbcl_audit import audit as audits
from dbcl_audit.attacks.membership import audit_final_model
from dbcl_audit.context import AuditContext
from dbcl_audit.effort import FULL
from dbcl_audit.findings import Audit, Finding

OWN = """
import torch
from torch import nn

def net():
    print("a word of one's own")
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

def data():
    x = torch.linspace(-1, 1, 48).view(12, 4)
    return (x[:8], (x[:8, 0] > 0).long()), (x[8:], (x[8:, 0] > 0).long())

calls = []

def third(outputs, targets):
    calls.append(1)
    if len(calls) == 3:
        raise ZeroDivisionError("in round 3")
    return outputs.sum()
"""
OWN_CODE = ("--model", "own:net", "--data", "own:data")
RUN = ("train", "--preset", "blind", *OWN_CODE, "--clients", "2", "--fraction", "1", "--rounds", "3", "--seed", "0")


@pytest.fixture(autouse=True)
def own_module() -> Iterator[None]:
    Path("own.py").write_text(OWN)
    yield
    sys.modules.pop("own", None)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the real `main` in this process; gives the status, and what it wrote to its two streams."""

    def invoke(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dbcl", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return invoke


Invoke = Callable[..., tuple[int, str, str]]


OPEN = os.open


class FailsAt:
    """A function that raises an error of the system at its n-th call, as a disk that is full does, and ever after."""

    def __init__(self, real: Callable[..., object], number: int, code: int) -> None:
        self.real, self.left, self.code = real, number, code

    def __call__(self, *arguments: object, **more: object) -> object:
        reads = self.real is OPEN and not int(str(arguments[1])) & os.O_CREAT
        self.left -= not reads
        if self.left <= 0 and not reads:
            raise OSError(self.code, os.strerror(self.code), "a file")
        return self.real(*arguments, **more)


@pytest.mark.parametrize(("what", "code"), [("fsync", errno.ENOSPC), ("replace", errno.EROFS), ("open", errno.EDQUOT)])
def test_a_disk_that_fails_at_any_moment_ends_in_one_line_and_the_run_goes_on(
    what: str, code: int, run: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(*RUN, "--quiet", "--out", "whole")[0] == 0
    expected = Path("whole/model.safetensors").read_bytes()
    refused = resumed = 0
    for number in range(1, 60):
        with monkeypatch.context() as patch:
            patch.setattr(os, what, FailsAt(getattr(os, what), number, code))
            status, _, said = run(*RUN, "--quiet", "--out", "new/run")
        if status == 0:
            break
        begun = Path("new/run/config.toml").exists()
        then = "; mend it and go on with: dbcl train --resume new/run --allow-code" if begun else ""
        assert (status, said) == (2, f"error {os.strerror(code)}: a file{then}\n"), number
        if begun:
            resumed += 1
            assert run("train", "--quiet", "--resume", "new/run", "--allow-code")[0] == 0
            assert Path("new/run/model.safetensors").read_bytes() == expected
            assert [each.round for each in read_metrics(Path("new/run"))] == [1, 2, 3]
            shutil.rmtree("new")
        else:
            refused += 1
            assert not Path("new").exists()  # what never began has left nothing
    assert status == 0
    assert refused >= 2
    assert resumed >= 4


LIMITED = """
import resource, sys
from dbcl.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
main()
"""


@pytest.mark.parametrize("most", [2_000_000, 100])
def test_a_file_that_the_system_does_not_take_is_named(most: int) -> None:
    """The system's own error of a write names no path."""
    given = [str(most), "train", "--preset", "blind", "--rounds", "2", "--seed", "0", "--out", "new/run"]
    ended = subprocess.run([sys.executable, "-c", LIMITED, *given], capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    assert re.search(r"error File too large: new/run/\S+", ended.stderr)
    assert Path("new/run").exists() == ("; mend it and go on with: dbcl train --resume new/run" in ended.stderr)


def test_a_tilde_is_the_home_folder(run: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert run(*RUN, "--quiet", "--out=~/mine", "--track=tensorboard:~/logs")[0] == 0
    assert (tmp_path / "home/mine/model.safetensors").exists()
    assert (tmp_path / "home/logs/mine").exists()
    assert run("train", "--resume=~/mine", "--rounds", "4", "--quiet", "--allow-code")[0] == 0
    (tmp_path / "home/mine.toml").write_text("rounds = 1\nclients = 2\n")
    assert run("train", "--preset=~/mine.toml", "--quiet", "--seed", "0")[0] == 0
    assert run("privacy", "--out=~/noise.png", "--rounds", "100")[0] == 0
    for command in (("audit", "~/nowhere"), ("compare", "~/nowhere"), ("data", "--data-dir=~/sets")):
        _, out, err = run(*command)
        assert str(tmp_path / "home") in "".join((out + err).split()), command
    assert not Path("~").exists()
    status, _, said = run("train", "--preset", "blind", "--out=~nobody-here/x")
    assert status == 2
    assert "~nobody-here/x" in said


def test_a_metric_that_fails_in_round_3_is_named_and_the_run_goes_on(run: Invoke) -> None:
    status, _, said = run(*RUN, "--quiet", "--metric", "own:third")
    assert status == 2
    assert re.fullmatch(
        r"error own:third failed: ZeroDivisionError: in round 3 \(.*own.py, line 18\); mend it and go on with: "
        r"dbcl train --resume runs/001-blind-own-data --allow-code\n",
        said,
    )
    folder = Path("runs/001-blind-own-data")
    assert len(read_metrics(folder)) == 2
    assert run("train", "--quiet", "--resume", str(folder), "--allow-code")[0] == 0
    sys.modules["own"].calls[:] = [1, 2, 3]
    assert run(*RUN, "--quiet", "--metric", "own:third", "--out", "whole")[0] == 0
    assert read_metrics(folder)[-1].score == read_metrics(Path("whole"))[-1].score
    assert (folder / "model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()


@pytest.mark.parametrize("settings", [("--batch-size", str(10**18)), ("--patience", str(10**18)), ("--lr", "1e-300")])
def test_a_number_that_is_large_or_small_but_means_something(settings: tuple[str, ...], run: Invoke) -> None:
    assert run(*RUN, "--quiet", *settings) == (0, "a word of one's own\n" * 2, "")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ],
)
def test_no_memory(error: Exception, run: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def play_round(self: Engine) -> None:
        raise error

    monkeypatch.setattr(Engine, "play_round", play_round)
    status, _, said = run(*RUN, "--quiet")
    assert status == 2
    assert said.startswith("error out of memory; --engine local trains")


def test_what_own_code_prints_is_no_part_of_the_json(run: Invoke) -> None:
    status, out, said = run(*RUN, "--json")
    assert status == 0
    assert json.loads(out)["rounds"] == 3
    assert "a word of one's own" in said


def test_a_seed_in_a_preset_of_ones_own_fixes_the_run_and_is_called_insecure(run: Invoke) -> None:
    Path("mine.toml").write_text('seed = 5\nrounds = 1\nclients = 2\nmodel = "own:net"\ndata = "own:data"\n')
    reports = [json.loads(run("train", "--preset", "mine.toml", "--json", "--out", name)[1]) for name in "ab"]
    assert [(each["seed"], each["insecure"]) for each in reports] == [(5, True)] * 2
    assert Path("a/model.safetensors").read_bytes() == Path("b/model.safetensors").read_bytes()
    assert "fixed by --seed, for experiments" in run("train", "--preset", "mine.toml")[1]
    Path("mine.toml").write_text("fixed_secrets = true\nseed = 5\n")
    status, out, error = run("train", "--preset", "mine.toml")
    assert (status, out) == (2, "")
    assert error.startswith("error mine.toml: unknown settings: fixed_secrets;")


@pytest.mark.parametrize("begun", [True, False])
def test_of_two_processes_that_choose_the_same_number_the_second_takes_the_next(
    begun: bool, run: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, build, held = list[Path](), Run.__init__, contextlib.ExitStack()

    def slowly(self: Run, config: RunConfig, folder: Path, *given: Any, **more: Any) -> None:
        """Another process has begun in the same folder, or is about to, while this one was loading."""
        build(self, config, folder, *given, **more)
        if made:
            return
        made.append(folder)
        if begun:
            Run.start(RunConfig(clients=2), folder)
        else:
            folder.mkdir(parents=True)
            held.enter_context(locked(folder))

    monkeypatch.setattr(Run, "__init__", slowly)
    with held:
        assert run(*RUN, "--quiet")[0] == 0
    assert made == [Path("runs/001-blind-own-data")]
    assert Path("runs/002-blind-own-data/model.safetensors").exists()
    assert not Path("runs/001-blind-own-data/model.safetensors").exists()


@pytest.mark.parametrize(
    ("names", "following"),
    [
        ((), "001"),
        (("notes", "12-x", "abc-1", "-", "\u0663\u0663\u0663-x", "1234567890-x"), "001"),
        (("007-a", "003-b"), "008"),
        (("999-a",), "1000"),
        (("1000-a", "999-b"), "1001"),
    ],
)
def test_the_next_number(names: tuple[str, ...], following: str) -> None:
    for name in names:
        Path("runs", name).mkdir(parents=True)
    assert _next_folder("x") == Path(f"runs/{following}-x")


def test_more_leaked_than_was_allowed_is_status_1(run: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = Finding("rewind", "client", "adaptive", "update", "cosine", 0.99, 0.98, 1.0, 0.0)
    monkeypatch.setattr(audits, "audit", lambda *_, **__: Audit("a", {}, {}, (), (finding,), 1.0, parties=2))
    Run.start(RunConfig(clients=2), Path("run"))
    assert run("audit", "run", "--fail-above", "client.cosine=0.5")[0] == 1
    assert run("audit", "run", "--fail-above", "client.cosine=0.995")[0] == 0


@pytest.mark.parametrize("content", [None, b"", b"no tensors", b"\x08\0\0\0\0\0\0\0{}      "])
def test_a_model_that_cannot_be_read_is_a_finding(content: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(clients=2)
    Run.start(config, Path("run"))
    if content is not None:
        Path("run/model.safetensors").write_bytes(content)
    context = AuditContext(config, task_of(config), Path("run"), Path("scratch"), FULL, 2, 0, lambda text: None)
    with pytest.raises(AuditError, match=r"run/model.safetensors (cannot be read|is missing)"):
        audit_final_model(context)


class Answer(io.BytesIO):
    """What a server sends, which may break off."""

    def __init__(self, content: bytes = b"x", length: str | None = None, error: Exception | None = None) -> None:
        super().__init__(content)
        self.headers, self.error = {"Content-Length": length}, error

    def read(self, size: int | None = -1, /) -> bytes:
        if self.error is not None:
            raise self.error
        return super().read(size)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (urllib.error.URLError("no route"), "cannot download .*no route.*by hand"),
        (urllib.error.HTTPError("http://there", 404, "Not Found", Message(), None), "cannot download .*404: Not Found"),
        (TimeoutError("timed out"), "cannot download .*timed out"),
        (ssl.SSLError("bad certificate"), "cannot download .*bad certificate"),
        (Answer(error=http.client.IncompleteRead(b"half", 7)), "cannot download .*IncompleteRead"),
        (Answer(error=ConnectionResetError(104, "Connection reset by peer")), "cannot download .*Connection reset"),
        (Answer(b"another file", "12"), "its sha256 is .* and must be .*; nothing was kept"),
        (Answer(b"", ""), "its sha256 is .* and must be .*; nothing was kept"),
        (Answer(b"x", "many"), "its sha256 is .* and must be .*; nothing was kept"),
        (Answer(b"x", "-3"), "its sha256 is .* and must be .*; nothing was kept"),
    ],
    ids=lambda value: repr(value)[:40] if not isinstance(value, str) else "",
)
def test_a_download_that_fails_leaves_nothing(
    answer: object, message: str, run: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    def urlopen(*_: object, **__: object) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    status, _, said = run("data", "fetch", "mnist", "--data-dir", "d")
    assert status == 2
    assert re.fullmatch(f"error .*{message}.*\n", said), said
    assert not Path("d").exists()
    Path("d").write_text("a file")
    assert run("data", "fetch", "mnist", "--data-dir", "d/e")[2] == "error datasets cannot lie under d/e: d is a file\n"


@pytest.mark.parametrize("content", [b"\xff", "", "[]", "{}", "null", '{"model": 3}', "wrong model", "wrong lr"])
def test_a_damaged_transcript_is_one_error(content: bytes | str) -> None:
    whole = {"model": "mnist-mlp", "shape": [1, 28, 28], "outputs": 10, "training": {}, "clients": 2, "cohort": 2}
    special = {"wrong model": {**whole, "model": 3}, "wrong lr": {**whole, "training": {"lr": "fast"}}}
    text = json.dumps(special[str(content)]) if content in special else content
    Path("client-0").mkdir()
    Path("client-0/setting.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(AuditError, match=r"client-0: setting.json is damaged"):
        Transcript(Path("client-0"))


def test_nobodys_home(run: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DBCL_DATA", raising=False)

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    assert run("train", "--data", "mnist") == (
        2,
        "",
        "error there is no home folder here: say by --data-dir or DBCL_DATA where datasets lie\n",
    )


@pytest.mark.parametrize("arguments", [("plan", "own:net", "--coverage", "all"), ("env",), ("data",), (*RUN,)])
def test_a_stream_without_unicode(arguments: tuple[str, ...], run: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert run(*arguments)[0] == 0
    stream.detach()


@pytest.mark.parametrize("arguments", [RUN, ("audit", "run"), ("plan", "own:net")])
def test_an_interruption_is_a_word_and_status_130(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    Run.start(RunConfig(clients=2), Path("run"))
    for place in (Run, "start"), (audits, "audit"), (SketchPlan, "from_model"):
        monkeypatch.setattr(*place, interrupted)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["dbcl", *arguments])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "stopped\n"
    assert not Path("runs").exists()


def test_without_arguments_it_helps(run: Invoke) -> None:
    status, out, said = run()
    assert status == 2
    assert "Usage: dbcl [OPTIONS] COMMAND" in out + said


SHELL = {
    "{dbcl} env | head -c 0; exit ${{PIPESTATUS[0]}}": (1, ""),
    "{dbcl} env >&-": (0, ""),
    "{dbcl} plan mnist-mlp > /dev/full": (2, "error No space left on device\n"),
    "COLUMNS=1 {dbcl} plan mnist-mlp": (0, ""),
    "COLUMNS=10 {dbcl} plan mnist": (2, r"error no model 'mnist'; choose mnist-mlp, .*\n"),
    "PYTHONIOENCODING=ascii {dbcl} plan mn\u00efst": (2, r"error no model 'mn\?st'; choose mnist-mlp, .*\n"),
    "{dbcl} plan mnist 2>&-": (2, ""),
    "mkdir gone; cd gone; rmdir ../gone; {dbcl} env": (2, r"error the current folder is gone; .*\n"),
}


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[dict[str, subprocess.Popen[str]]]":
    """All of them at once, since most of their time goes into loading."""
    place, dbcl = tmp_path_factory.mktemp("shell"), f"{sys.executable} -m dbcl"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": place}
    started = {each: subprocess.Popen(["bash", "-c", each.format(dbcl=dbcl)], **pipes) for each in SHELL}
    yield started
    for process in started.values():  # those that no test of this worker has waited for
        if process.returncode is None:
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELL)
def test_in_a_process_of_its_own(shell: str, processes: "dict[str, subprocess.Popen[str]]") -> None:
    status, message = SHELL[shell]
    _, said = processes[shell].communicate(timeout=120)
    assert re.fullmatch(message, said), said
    assert processes[shell].returncode == status
