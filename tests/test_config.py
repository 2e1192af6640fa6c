import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbcl.errors import ConfigError, ProtocolError
from dbcl.run.config import PRESETS, RunConfig, from_toml, preset


def test_the_presets_are_what_they_say() -> None:
    blind, paper, plain = (preset(name) for name in ("blind", "paper", "plain"))
    assert (blind.cover, blind.ratio, blind.veil, blind.server_optimizer) == ("hidden", 2, 0.2, "momentum")
    assert (paper.cover, paper.ratio, paper.veil, paper.server_optimizer) == ("hidden", 2, 0, "fedavg")
    assert (plain.sketch, plain.veil, plain.server_optimizer) == ("identity-v1", 0, "fedavg")
    same = ("data", "model", "clients", "fraction", "epochs", "batch_size", "lr", "algorithm")
    assert len({tuple(getattr(preset(name), field) for field in same) for name in PRESETS}) == 1


PATTERNS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]))


@given(
    seed=st.integers(0, 2**31),
    veil=st.floats(0, 10),
    ratio=st.one_of(st.floats(1.1, 9), st.tuples(st.floats(1.1, 2), st.floats(2, 9))),
    cover=st.one_of(
        st.sampled_from(["hidden", "all"]),
        st.tuples(st.text(st.characters(codec="utf-8", exclude_categories=["Cc"])), st.just('we"ird\\*')),
    ),
    norm_bound=st.one_of(st.none(), st.floats(0.1, 10)),
    fixed=st.booleans(),
)
def test_a_configuration_survives_its_file(seed, veil, ratio, cover, norm_bound, fixed) -> None:
    config = RunConfig(seed=seed, veil=veil, ratio=ratio, cover=cover, norm_bound=norm_bound, fixed_secrets=fixed)
    assert from_toml(config.toml()) == config


def test_options_win_over_a_file_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("lr = 0.5\nclients = 7\n")
    config = preset(str(tmp_path / "mine.toml"), lr=0.25)
    assert (config.lr, config.clients, config.rounds) == (0.25, 7, RunConfig().rounds)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr = ", "not a TOML file"),
        ("learning_rate = 1.0", "unknown settings: learning_rate; known are data, model"),
        ("rounds = 1.5", "rounds must be a int, got 1.5"),
        ("lr = '0.1'", "lr must be a float, got '0.1'"),
        ("fixed_secrets = 1", "fixed_secrets must be a bool, got 1"),
        ("data = 'cats'", "data must be one of digits, mnist, cifar10, lfw, got 'cats'"),
        ("partition = 'x'", "partition must be one of iid, dirichlet, shards"),
        ("algorithm = 'x'", "algorithm must be one of fedavg, fedprox, sgd"),
        ("server_optimizer = 'x'", "server_optimizer must be one of fedavg, momentum, adam"),
        ("wire = 'int8'", "wire must be one of float64, float32"),
        ("sketch = 'x'", "sketch must be one of count-v1"),
        ("clients = 0", "clients must be 1 or more, got 0"),
        ("fraction = 1.5", "fraction must be above 0 and at most 1, got 1.5"),
        ("target = 97.0", "target is an accuracy between 0 and 1, got 97.0"),
        ("server_lr = 0.0", "server_lr must be above 0, got 0.0"),
        ("server_momentum = 1.0", "server_momentum must be between 0 and 1, got 1.0"),
        ("lr = 0", "lr must be above 0, got 0"),
    ],
)
def test_bad_settings_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_toml(text)


def test_the_door_checks_its_own() -> None:
    with pytest.raises(ProtocolError, match="min_updates must be 1 or more, got 0"):
        RunConfig(min_updates=0)
    with pytest.raises(ProtocolError, match="norm_bound must be above 0, got -1"):
        RunConfig(norm_bound=-1.0)


def test_no_preset_of_that_name() -> None:
    with pytest.raises(ConfigError, match="no preset 'soft': neither one of blind, paper, plain nor a file"):
        preset("soft")


def test_the_algorithms_become_local_training() -> None:
    config = RunConfig(proximal=0.3, epochs=2)
    fedavg, fedprox, sgd = (
        dataclasses.replace(config, algorithm=name).training() for name in ("fedavg", "fedprox", "sgd")
    )
    assert (fedavg.proximal, fedavg.steps, fedavg.epochs) == (0, None, 2)
    assert (fedprox.proximal, fedprox.steps) == (0.3, None)
    assert sgd.steps == 1
