"""Values of the wrong type for every setting, from a TOML file, the command line's text and Python."""

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbcl.errors import ConfigError, DbclError
from dbcl.settings import fits
from dbcl.simulation.build import check
from dbcl.simulation.config import HINTS, NESTED, OPTIONS, RunConfig
from dbcl.simulation.presets import from_toml, preset, read_toml, to_toml

GUARANTEE = {"epsilon": 8.0, "clip": 0.2}
"""What the settings of a guarantee need beside them."""
PRIVACY = {name for name in OPTIONS if OPTIONS[name] in NESTED["privacy"]}


def beside(name: str) -> dict[str, float]:
    """The settings that must be there so that a setting of this name has a meaning."""
    return {other: value for other, value in GUARANTEE.items() if other != name} if name in PRIVACY else {}


IN_TOML = [
    "true",
    "0",
    "1",
    "-1",
    f"{10**30}",
    "1.5",
    "-2.5",
    "inf",
    "nan",
    "''",
    "'x'",
    "'1'",
    "[]",
    "[1]",
    "['x']",
    "[[1]]",
    "[{a = 1}]",
    "{a = 1}",
    "2020-01-01",
    "12:30:00",
]
IN_PYTHON = [b"x", object(), 1j, {1}, np.array([1.0, 2.0]), np.array("x"), np.bool_(True), datetime.date(2020, 1, 1)]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_file_with_a_value_of_any_type_is_read_or_refused_by_name(name: str) -> None:
    refused = []
    for text in IN_TOML:
        try:
            config = check(from_toml(f"{name} = {text}", **beside(name)))
        except DbclError as error:
            refused.append(str(error))
        else:
            assert fits(config.options()[name], HINTS[name])
            assert from_toml(to_toml(config)) == config
    assert len(refused) > 8
    assert all(name in text for text in refused)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("value", IN_PYTHON, ids=lambda value: type(value).__name__)
def test_no_setting_takes_an_object_of_another_type(name: str, value: Any) -> None:
    if name == "secure_aggregation" and isinstance(value, np.bool_):
        return
    for make in (RunConfig.from_options, lambda **given: preset("private", **given)):
        with pytest.raises(ConfigError, match=f"^{name} must be .*, got "):
            make(**{**beside(name), name: value})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("secure_aggregation = 1", "secure_aggregation must be true or false, got 1"),
        ("secure_aggregation = 'yes'", "secure_aggregation must be true or false, got 'yes'"),
        ("rounds = 1.5", "rounds must be a whole number, got 1.5"),
        ("veil = true", "veil must be a number, got True"),
        ("coverage = [[1]]", "coverage must be text or a list of texts"),
        ("track = [1]", "track must be a list of texts"),
        ("rounds = 0", "rounds must be 1 or more, got 0"),
        ("patience = 0", "patience must be 1 round or more, got 0"),
        ("epsilon = 8", "epsilon and clip go together"),
    ],
)
def test_the_file_is_named_before_what_is_wrong_in_it(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(DbclError, match=f"mine.toml: {message}"):
        read_toml(tmp_path / "mine.toml")


def test_numbers_of_numpy_and_lists_are_what_they_stand_for() -> None:
    config = RunConfig.from_options(
        lr=np.float32(0.5), rounds=np.int64(7), secure_aggregation=np.bool_(False), coverage=["conv*"]
    )
    assert (config.lr, config.rounds, config.secure_aggregation) == (0.5, 7, False)
    assert config.sketch.coverage == ("conv*",)
    assert type(config.rounds) is int
    assert RunConfig.from_options(ratio="2-4").sketch.ratio == (2.0, 4.0)
    assert from_toml(to_toml(config)) == config
