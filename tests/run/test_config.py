import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbcl import models
from dbcl.errors import ConfigError, ProtocolError
from dbcl.run.assemble import build_plan, public_setting, rms
from dbcl.run.config import RunConfig
from dbcl.run.presets import PRESETS, explain, from_toml, preset, to_toml
from dbcl.run.settings import about
from dbcl.run.task import task_of


def test_the_presets_are_what_they_say() -> None:
    blind, paper, plain = (preset(name) for name in ("blind", "paper", "plain"))
    assert (blind.cover, blind.ratio, blind.veil, blind.server_optimizer) == ("large", 2, 0.2, "momentum")
    assert (blind.server_momentum, blind.ema_decay, paper.ema_decay) == (0.7, 0.8, 0.0)
    assert (paper.cover, paper.ratio, paper.veil, paper.server_optimizer) == ("hidden", 2, 0, "fedavg")
    assert (blind.lanes, paper.lanes, blind.buckets, paper.buckets) == (None, 1, "shared", "shared")
    unsketched = {"sketch": "identity-v1", "cover": RunConfig().cover, "server_momentum": 0.5, "ema_decay": 0.0}
    assert preset("veil") == dataclasses.replace(blind, **unsketched)
    assert (plain.sketch, plain.veil, plain.server_optimizer) == ("identity-v1", 0, "fedavg")
    same = ("data", "model", "clients", "fraction", "epochs", "batch_size", "lr", "algorithm")
    unpromised = [name for name in PRESETS if preset(name).epsilon is None]
    assert len(unpromised) >= 4
    assert len({tuple(getattr(preset(name), field) for field in same) for name in unpromised}) == 1


def test_the_preset_with_a_guarantee_has_no_sketch_and_no_other_noise() -> None:
    private = preset("private")
    assert (private.sketch, private.veil, private.server_optimizer, private.ema_decay) == (
        "identity-v1",
        0,
        "fedavg",
        0.95,
    )
    plan = private.privacy()
    assert plan is not None
    assert (plan.unit, plan.epsilon, plan.delta, plan.clip, plan.kind) == ("client", 8, 1e-5, 0.2, "banded")
    assert (plan.clients, plan.cohort, plan.rounds, plan.separation, plan.participations) == (1000, 100, 400, 10, 40)
    assert all(preset(name).privacy() is None for name in ("blind", "veil", "paper", "plain"))
    assert preset("private", epsilon=4.0, rounds=100).privacy().participations == 10  # type: ignore[union-attr]


@pytest.mark.parametrize("examples", [4000, 60_000])  # the digits and MNIST
def test_the_preset_for_examples_promises_the_same_to_each_of_them(examples: int) -> None:
    config, client = preset("private-example"), preset("private")
    same = ("sketch", "veil", "epsilon", "delta", "server_optimizer", "ema_decay")
    assert all(getattr(config, name) == getattr(client, name) for name in same)
    assert (config.cohort, config.clients, config.training().steps) == (10, 10, 1)
    assert config.noise() is None  # a client clips its examples, not their sum
    plan = config.privacy(examples)
    assert plan is not None
    assert (plan.unit, plan.batch, plan.separation) == ("example", examples // 10, 10)
    assert plan.clip == config.clip * config.lr
    plan.require_useful(rms(models.build(config.model)), parameters=199_210)


def test_the_noise_of_adam_goes_before_it() -> None:
    adam, momentum = (preset("private", server_optimizer=name).privacy() for name in ("adam", "momentum"))
    assert adam is not None
    assert momentum is not None
    assert (adam.before, adam.momentum, adam.lr) == (True, 0.0, 1.0)
    assert (momentum.before, momentum.momentum) == (False, 0.5)
    model = models.build("mnist-mlp")
    assert set(build_plan(preset("private", server_optimizer="adam"), model).veils.values()) == {0.0}
    assert set(build_plan(preset("private", server_optimizer="adam", veil=0.1), model).veils.values()) == {0.1}


def test_clients_may_count_by_their_examples_up_to_a_public_number() -> None:
    alike, capped = preset("private").privacy(), preset("private", weight_cap=60).privacy()
    assert alike is not None
    assert capped is not None
    assert (alike.most, capped.most, capped.sigma) == (0.0, 60.0, alike.sigma)


def test_a_blt_has_the_parameters_that_are_given() -> None:
    plan = preset("private", mechanism="blt", blt_decay=0.85, blt_scale=0.62).privacy()
    assert plan is not None
    assert (plan.kind, plan.decay, plan.scale) == ("blt", (0.85,), (0.62,))
    for wrong in ({"mechanism": "blt"}, {"mechanism": "blt", "blt_decay": 0.5}, {"blt_decay": 0.5, "blt_scale": 0.1}):
        with pytest.raises(ConfigError, match=r"goes with --blt-decay and --blt-scale: dbcl privacy --mechanism blt"):
            preset("private", **wrong)


def test_a_plan_for_examples_takes_their_number_and_all_know_its_noise() -> None:
    config = preset("private-example", transcripts=("server",), clients=2)
    task = task_of(config)
    model = task.make_model(0)
    with pytest.raises(ConfigError, match='unit "example" needs examples'):
        build_plan(config, model)
    plan = build_plan(config, model, examples=4000)
    sizes = set(plan.veils.values())
    assert sizes == {float(f"{config.privacy(4000).relative(rms(model)):.3g}")}  # type: ignore[union-attr]
    assert {public_setting(config, task, plan).veil} == sizes
    blind = preset("blind")
    assert public_setting(blind, task, build_plan(blind, model)).veil == 0.2


PATTERNS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]))


def test_a_preset_names_only_settings_and_the_default_one_comes_first() -> None:
    assert PRESETS[0] == "blind"
    for name in PRESETS:
        assert preset(name) == from_toml(to_toml(preset(name)))


@given(
    seed=st.one_of(st.none(), st.integers(0, 2**31)),
    veil=st.floats(0, 10),
    ratio=st.one_of(st.floats(1.1, 9), st.tuples(st.floats(1.1, 2), st.floats(2, 9))),
    cover=st.one_of(
        st.sampled_from(["hidden", "all"]),
        st.tuples(PATTERNS, st.just('we"ird\\*')),
    ),
    norm_bound=st.one_of(st.none(), st.floats(0.1, 10)),
    lanes=st.one_of(st.none(), st.integers(1, 9)),
    buckets=st.sampled_from(["shared", "grouped"]),
    transcripts=st.sampled_from([(), ("0", "server")]),
)
def test_a_configuration_survives_its_file(**settings) -> None:
    config = RunConfig(**settings)
    assert from_toml(to_toml(config)) == config


def test_options_win_over_a_file_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("lr = 0.5\nclients = 7\n")
    config = preset(str(tmp_path / "mine.toml"), lr=0.25)
    assert (config.lr, config.clients, config.rounds) == (0.25, 7, RunConfig().rounds)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr = ", "not a TOML file"),
        ("learning_rate = 1.0", "unknown settings: learning_rate; `dbcl train --help`"),
        ("rounds = 1.5", "rounds must be a whole number, got 1.5"),
        ("rounds = true", "rounds must be a whole number, got True"),
        ("lr = '0.1'", "lr must be a number, got '0.1'"),
        ("target = '0.97'", "target must be a number, got '0.97'"),
        ("data = 3", "data must be text, got 3"),
        ("cover = [1]", r"cover must be text or a list of texts, got \(1,\)"),
        ("ratio = [2, 3, 4]", r"ratio must be a number or a list of 2 numbers, got \(2, 3, 4\)"),
        ("ratio = 'two'", "ratio is a number or a range such as 2-4, got 'two'"),
        ("fixed_secrets = true", "fixed_secrets is gone since dbcl 0.2: with a seed all is fixed"),
        ("data = 'cats'", "data must be one of digits, mnist, cifar10, lfw or module:factory, got 'cats'"),
        ("partition = 'x'", "partition must be one of iid, dirichlet, shards"),
        ("algorithm = 'x'", "algorithm must be one of fedavg, fedprox, sgd"),
        ("server_optimizer = 'x'", "server_optimizer must be one of fedavg, momentum, adam"),
        ("wire = 'int8'", "wire must be one of float64, float32"),
        ("sketch = 'x'", "sketch must be one of count-v1"),
        ("lanes = 0", "lanes must be 1 or more, got 0"),
        ("lanes = 2.5", "lanes must be a whole number, got 2.5"),
        ("lanes = true", "lanes must be a whole number, got True"),
        ("buckets = 'own'", "buckets must be one of shared, grouped, got 'own'"),
        ("sketch = 'lanes-v1'", "sketch must be one of count-v1"),
        ("clients = 0", "clients must be 1 or more, got 0"),
        ("fraction = 1.5", "fraction must be above 0 and at most 1, got 1.5"),
        ("target = 97.0", "target is an accuracy between 0 and 1, got 97.0"),
        ("server_lr = 0.0", "server_lr must be above 0, got 0.0"),
        ("server_momentum = 1.0", "server_momentum must be between 0 and 1, got 1.0"),
        ("lr = 0", "lr must be above 0, got 0"),
        ("device = 'gpu'", "device must be auto, cpu, cuda or, of several, cuda:1; got 'gpu'"),
        ("update_noise = 0.1", "update_noise is relative to update_clip: set that, too"),
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
    with pytest.raises(ConfigError, match="no preset 'soft': neither one of blind, veil, private"):
        preset("soft")


def test_the_algorithms_become_local_training() -> None:
    config = RunConfig(proximal=0.3, epochs=2)
    fedavg, fedprox, sgd = (
        dataclasses.replace(config, algorithm=name).training() for name in ("fedavg", "fedprox", "sgd")
    )
    assert (fedavg.proximal, fedavg.steps, fedavg.epochs) == (0, None, 2)
    assert (fedprox.proximal, fedprox.steps) == (0.3, None)
    assert sgd.steps == 1


def test_a_file_may_hold_the_text_that_an_option_takes() -> None:
    text = from_toml("cover = 'conv*, !conv1*'\nratio = '2-4'\ntranscripts = '0,server'")
    assert text == from_toml("cover = ['conv*', '!conv1*']\nratio = [2.0, 4.0]\ntranscripts = ['0', 'server']")
    assert from_toml("cover = 'all'").cover == "all"


@pytest.mark.parametrize(
    ("text", "lanes", "grouped", "scheme"),
    [
        ("", 2, False, "lanes-v1"),
        ("ratio = 4.0", 4, False, "lanes-v1"),
        ("ratio = [2.0, 4.0]", 2, False, "lanes-v1"),
        ("ratio = 1.3", 1, False, "count-v1"),
        ("lanes = 1", 1, False, "count-v1"),
        ("lanes = 3\nbuckets = 'grouped'", 3, True, "lanes-v1"),
        ("sketch = 'count-hashed-v1'", 1, False, "count-hashed-v1"),
    ],
)
def test_the_lanes_of_a_run_are_those_of_its_plan(text: str, lanes: int, grouped: bool, scheme: str) -> None:
    plan = build_plan(from_toml(text), models.build("mnist-mlp"))
    assert (plan.lanes, plan.grouped, plan.tensors[0].scheme) == (lanes, grouped, scheme)


def test_a_seed_in_a_file_fixes_the_secrets_and_the_noise_of_clients_too() -> None:
    fixed, fresh = from_toml("seed = 3\nupdate_clip = 1.0"), from_toml("update_clip = 1.0")
    assert (fixed.insecure, fresh.insecure) == (True, False)
    assert (fixed.noise().insecure_seed, fresh.noise().insecure_seed) == (3, None)


def test_every_setting_is_explained_and_its_default_is_one_of_its_choices() -> None:
    for field in dataclasses.fields(RunConfig):
        known = about(field)
        assert known.help
        assert not known.help.endswith(".")
        assert not known.choices or field.default in known.choices
        assert bool(known.unset) == (field.default in (None, ())), field.name
        assert explain(field.name).endswith(".")


def test_the_explanation_of_a_setting_follows_the_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Default fedavg; presets blind, veil: momentum." in explain("server_optimizer")
    assert "Default 0.2; presets private, private-example, paper, plain: 0." in explain("veil")
    assert explain("clients").endswith("Default 100; preset private: 1000; preset private-example: 10.")
    texts = dict.fromkeys(PRESETS, "") | {
        "blind": "veil = 0.5",
        "paper": "veil = 0.2",
        "plain": "ratio = [2.0, 4.0]",
    }
    monkeypatch.setattr("dbcl.run.presets._preset_text", texts.__getitem__)
    assert "Default 0.2; preset blind: 0.5." in explain("veil")
    assert "Default 2; preset plain: 2-4." in explain("ratio")
