"""A model of one's own by `module:factory`: whatever is wrong with it is one sentence, never a traceback."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dbcl.errors import ConfigError

Invoke = Callable[..., str]

OWN = """
import torch

def sized(width, depth=2):
    return torch.nn.Linear(784, width)

def optional(width=10, *more, **options):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, width))

def fails():
    raise ValueError("no weights here")

def looks_up():
    return torch.nn.Nothing

layers = 3
"""


@pytest.fixture(autouse=True)
def own_file(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("own_nets.py").write_text(OWN)
    Path("own_broken.py").write_text("raise RuntimeError('half written')\n")
    for name in ("own_nets", "own_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_nets:sized", r"the factory 'own_nets:sized' needs arguments \(width\); write a function that needs none"),
        (
            "own_nets:fails",
            r"the factory 'own_nets:fails' failed: ValueError: no weights here \(.*own_nets.py, line 11\)",
        ),
        ("own_nets:looks_up", r"failed: AttributeError: module 'torch.nn' has no attribute 'Nothing'"),
        ("own_nets:layers", "the model 'own_nets:layers' is a int, and must be a function or a class"),
        (
            "own_nets:missing",
            "cannot import the model 'own_nets:missing': module 'own_nets' has no attribute 'missing'",
        ),
        ("own_broken:net", r"cannot import the model 'own_broken:net': RuntimeError: half written \(.*, line 1\)"),
        ("own_nowhere:net", "cannot import the model 'own_nowhere:net': No module named 'own_nowhere'"),
        (":net", "cannot import the model ':net': Empty module name"),
    ],
)
def test_what_is_wrong_is_one_sentence(invoke: Invoke, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        invoke("plan", name)


def test_a_factory_whose_arguments_all_have_defaults_is_called(invoke: Invoke) -> None:
    assert "10x784" in invoke("plan", "own_nets:optional", "--coverage", "all")


def test_the_command_shows_no_traceback() -> None:
    for arguments in (["plan", "own_nets:fails"], ["train", "--device", "gpu"]):
        done = subprocess.run([sys.executable, "-m", "dbcl", *arguments], capture_output=True, text=True)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert done.stderr.startswith("error ")
