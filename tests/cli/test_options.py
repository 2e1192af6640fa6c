"""The options of the commands are the settings of a run; no default is written in a command."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.main import get_command

from dbcl import cli
from dbcl.cli.plan import plan
from dbcl.cli.privacy import privacy
from dbcl.cli.train import train
from dbcl.settings import PROMISE, about
from dbcl.simulation.config import OPTIONS, RunConfig
from dbcl.simulation.presets import explain, from_toml

Invoke = Callable[..., str]


def test_every_setting_is_an_option() -> None:
    assert set(inspect.signature(train).parameters) - {
        "preset",
        "data_dir",
        "out",
        "resume",
        "quiet",
        "as_json",
        "allow_code",
        "baseline",
    } == set(OPTIONS)


def test_plan_takes_those_that_decide_what_a_client_sees() -> None:
    own = {"model", "preset", "shape", "outputs", "examples", "as_json"}
    decide = {"coverage", "sketch", "ratio", "lanes", "veil", "wire"}
    assert set(inspect.signature(plan).parameters) - own == decide


def test_privacy_takes_those_that_decide_how_large_the_noise_is() -> None:
    own = {"run", "preset", "shape", "outputs", "examples", "data_dir", "out", "as_json"}
    promise = {name for name, field in OPTIONS.items() if about(field).panel == PROMISE}
    moves = {"algorithm", "lr", "secure_aggregation", "server_optimizer", "server_lr", "server_momentum"}
    assert set(inspect.signature(privacy).parameters) - own == promise | moves | {
        "data",
        "model",
        "clients",
        "fraction",
        "rounds",
    }


def options_of(command: str) -> dict:
    params = get_command(cli.app).commands[command].params
    return {param.name: param for param in params if param.param_type_name == "option"}


@pytest.mark.parametrize("command", ["train", "plan", "privacy"])
def test_an_option_has_the_text_and_the_panel_of_its_setting_and_no_default_of_its_own(command: str) -> None:
    made = {name: option for name, option in options_of(command).items() if name in OPTIONS}
    assert len(made) >= 5
    for name, option in made.items():
        assert option.help == explain(name)
        assert option.rich_help_panel == about(OPTIONS[name]).panel
        assert option.default is None
        assert option.opts == [f"--{name.replace('_', '-')}"]


def test_help_teaches(invoke: Invoke) -> None:
    out = invoke("train", "--help")
    for panel in dict.fromkeys(about(field).panel for field in OPTIONS.values()):
        assert panel in out
    for words in (
        "Default 100; presets guaranteed, private-example: 10; preset private: 1000.",
        "private-example (the same as guaranteed, with a trusted server), paper",
        "blind (sketch and secret noise), veil (secret noise, no sketch), private (differential privacy for each of",
        "paper (a sketch that a client",
        "Default momentum; presets guaranteed, private, private-example, paper, plain: fedavg.",
        "replace the defaults; an option that you give replaces them",
        "dbcl train --preset paper --data mnist --target 0.97",
    ):
        assert words in " ".join(out.replace("│", " ").split())


def test_a_preset_wins_over_a_default_and_an_option_over_a_preset(invoke: Invoke) -> None:
    Path("mine.toml").write_text("lr = 0.5\nveil = 0.0\nclients = 200\n")
    invoke("train", "--preset", "mine.toml", "--rounds", "1", "--fraction", "0.01", "--lr", "0.01", "--out", "run")
    config = from_toml(Path("run/config.toml").read_text())
    assert (config.lr, config.clients) == (0.01, 200)
    assert config.sketch == replace(RunConfig().sketch, veil=0.0)


def test_numbers_that_are_none_are_refused_by_the_option_itself(invoke: Invoke) -> None:
    with pytest.raises(SystemExit) as stopped:
        invoke("train", "--rounds", "many")
    assert stopped.value.code == 2
    assert list(Path().iterdir()) == []
