"""No more memory is one sentence with the remedy, in the words of whoever has called."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dbcl
from dbcl.cli.console import as_options
from dbcl.engines import Engine
from dbcl.errors import OutOfMemoryError
from dbcl.simulation import run as runs
from dbcl.simulation.user_code import memory_remedy
from simulation.test_mistakes import HELD_OUT, clients, net

ERRORS = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
]
MESSAGE = r"^out of memory; `engine=\"local\"` trains one client at a time, and a smaller model or `batch_size` takes"


class Huge(nn.Module):
    """Takes more memory than there is, for more than `few` examples."""

    def __init__(self, few: int) -> None:
        super().__init__()
        self.few, self.inner = few, net()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.few:
            torch.empty(1 << 58)
        return self.inner(x)


def simulate(model: nn.Module, **more: Any) -> Any:
    return dbcl.simulate(model, clients(), HELD_OUT, **{"settings": "blind", "rounds": 2, **more})


@pytest.mark.parametrize("few", [0, 2, 6])
@pytest.mark.parametrize("engine", ["stacked", "local"])
def test_a_model_that_takes_too_much_names_the_remedy(few: int, engine: str) -> None:
    """Before the run, in its first round, and where the held-out examples are measured."""
    with pytest.raises(OutOfMemoryError, match=MESSAGE) as error:
        simulate(Huge(few), engine=engine)
    assert "can't allocate memory" in str(error.value)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", ["build_run_server", "build_engine", "play_round", "evaluate"])
def test_every_error_of_memory_is_the_same_one(error: Exception, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **more: Any) -> None:
        raise error

    monkeypatch.setattr(Engine if place == "play_round" else runs, place, fails)
    with pytest.raises(OutOfMemoryError, match=MESSAGE) as raised:
        simulate(net())
    assert raised.value.__cause__ is error


def test_a_run_without_memory_can_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(engine: Engine) -> None:
        raise MemoryError

    simulate(net(), rounds=1, folder=tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "play_round", fails)
        with pytest.raises(OutOfMemoryError):
            simulate(net(), folder=tmp_path / "run", resume=True)
    assert simulate(net(), folder=tmp_path / "run", resume=True).history[-1].round == 2


def test_other_errors_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(engine: Engine) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(Engine, "play_round", fails)
    with pytest.raises(RuntimeError, match="something else"):
        simulate(net())


def test_the_command_says_it_in_its_own_words() -> None:
    said = as_options(memory_remedy(MemoryError()))
    assert said == (
        "out of memory; --engine local trains one client at a time, and a smaller model or --batch-size takes less"
    )
