import dataclasses
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import torch
from flwr.serverapp import strategy as flower
from hypothesis import strategies as st
from torch import nn

import dbcl
from dbcl.config import UNSKETCHED
from dbcl.errors import ConfigError, GuaranteeError, ProtocolError
from dbcl.model import networks
from dbcl.objective import Objective
from dbcl.protocol import BroadcastRequirements, UpdateValidator
from dbcl.settings import about
from dbcl.simulation.build import build_plan, build_run_server, check, privacy_plan, public_setting, validator
from dbcl.simulation.config import OPTIONS, RunConfig
from dbcl.simulation.planning import planned, rms
from dbcl.simulation.presets import DEFAULT, PRESETS, explain, from_toml, preset, to_toml
from dbcl.simulation.task import given, task_of
from dbcl.simulation.training import local_training, update_noise


def test_the_presets_are_what_they_say() -> None:
    blind, paper, plain = (preset(name) for name in ("blind", "paper", "plain"))
    sketches = [(each.sketch.coverage, each.sketch.ratio, each.sketch.veil) for each in (blind, paper)]
    assert sketches == [("auto", 2, 0.2), ("hidden", 2, 0)]
    assert (blind.server_optimizer, paper.server_optimizer, plain.server_optimizer) == ("momentum", "fedavg", "fedavg")
    assert (blind.server_momentum, blind.ema_decay, paper.ema_decay, plain.ema_decay) == (0.5, 0.8, 0.0, 0.0)
    assert (blind.sketch.lanes, paper.sketch.lanes) == (None, 1)
    assert preset("veil") == blind.with_options(sketch="identity-v1")
    assert plain.sketch == UNSKETCHED
    assert validator(plain) == UpdateValidator(max_influence=None, outlier_factor=None)
    same = ("data", "model", "clients", "fraction", "epochs", "batch_size", "lr", "algorithm")
    unpromised = [name for name in PRESETS if preset(name).privacy is None]
    assert len(unpromised) >= 4
    assert len({tuple(getattr(preset(name), field) for field in same) for name in unpromised}) == 1


def adapted() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 4), nn.Linear(4, 64), nn.Linear(64, 3))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "small": lambda: nn.Sequential(nn.Linear(64, 3)),
    "dense": lambda: nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 20), nn.ReLU(), nn.Linear(20, 3)),
    "frozen": adapted,
    "images": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3),
        nn.GroupNorm(2, 8),
        nn.Conv2d(8, 8, 3),
        nn.Flatten(),
        nn.Linear(128, 32),
        nn.Linear(32, 3),
    ),
    "statistics": lambda: nn.Sequential(nn.Linear(64, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 3)),
}
SKETCHED = {"dense": ["0.weight", "2.weight"], "images": ["3.weight", "5.weight"]}
"""What the default sketches in each of `NETWORKS`; nothing in the others."""


@pytest.mark.parametrize("name", NETWORKS)
def test_the_default_is_the_same_everywhere(name: str) -> None:
    """Plan, server step, running mean and checks of updates: of each way to begin without a guarantee."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return NETWORKS[name]()

    x, y = torch.randn(60, 64, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    task = given(lambda seed: make(), [(x[:40], y[:40])], (x[40:], y[40:]), objective=Objective.from_loss())
    calibration = x[40:]

    def of_run(config: RunConfig) -> dbcl.Server:
        config = dataclasses.replace(config, clients=1, fraction=1.0)
        return build_run_server(config, task, seed=bytes(32))

    servers = {
        "dbcl.Server": dbcl.Server(make(), calibration=calibration),
        "a plan": dbcl.Server(model := make(), dbcl.SketchPlan.from_model(model), calibration=calibration),
        "RunConfig": of_run(RunConfig()),
        "the preset": of_run(preset("blind")),
        "dbcl.simulate": dbcl.simulate(make, [(x[:40], y[:40])], (x[40:], y[40:]), rounds=1, settings="blind").server,
        "Flower": dbcl.flower.DoubleBlind(flower.FedAvg(), make(), calibration=calibration).server,
    }
    found = {
        way: (
            server.plan,
            type(server.trained.optimizer),
            server.trained.optimizer.defaults,
            server.release.mean.decay if server.release.mean else None,
            server.validator,
            server.guarantee,
        )
        for way, server in servers.items()
    }
    first = found["dbcl.Server"]
    assert {way: each for way, each in found.items() if each != first} == {}
    plan, kind, step, decay, validator, _ = first
    assert [tensor.name for tensor in plan.tensors if tensor.sketched] == SKETCHED.get(name, [])
    assert plan.lanes == (2 if name in SKETCHED else 1)
    assert set(plan.veils.values()) == {0.2}
    assert (kind, step["momentum"], step["lr"], decay, validator) == (torch.optim.SGD, 0.5, 1.0, 0.8, UpdateValidator())
    dbcl.blinded(make(), servers["dbcl.Server"].open_round(), require=BroadcastRequirements())


def test_the_preset_with_a_guarantee_has_no_sketch_and_no_other_noise() -> None:
    private = preset("private")
    assert private.sketch == UNSKETCHED
    assert (private.server_optimizer, private.ema_decay) == ("fedavg", 0.95)
    plan = privacy_plan(private)
    assert plan is not None
    assert (plan.unit, plan.epsilon, plan.delta, plan.clip, plan.correlation) == ("client", 8, 1e-5, 0.2, "banded")
    assert (plan.clients, plan.cohort, plan.rounds, plan.separation, plan.participations) == (1000, 100, 400, 10, 40)
    assert all(privacy_plan(preset(name)) is None for name in ("blind", "veil", "paper", "plain"))
    shorter = privacy_plan(preset("private", epsilon=4.0, rounds=100))
    assert shorter is not None
    assert (shorter.epsilon, shorter.participations) == (4, 10)


@pytest.mark.parametrize(
    ("examples", "separation", "rounds", "step"), [(4000, 1, 70, 2.0), (60_000, 10, 430, 4.0)]
)  # the digits and MNIST
def test_the_presets_for_examples_plan_what_suits_their_number(
    examples: int, separation: int, rounds: int, step: float
) -> None:
    trusted, default = (
        planned(preset(name), examples=examples, values=39_700) for name in ("private-example", "guaranteed")
    )
    same = ("model", "sketch", "veil", "epsilon", "delta", "clip", "server_optimizer", "ema_decay", "separation")
    assert all(trusted.options()[name] == default.options()[name] for name in same)
    assert (trusted.cohort, trusted.clients, local_training(trusted).steps) == (10, 10, 1)
    assert update_noise(trusted) is None  # a client clips its examples, not their sum
    central, shared = (privacy_plan(config, examples, 39_700) for config in (trusted, default))
    assert central is not None
    assert shared is not None
    assert (central.unit, central.batch, central.separation) == ("example", examples // separation, separation)
    assert trusted.privacy is not None
    assert (trusted.rounds, round(trusted.lr * trusted.privacy.clip, 2)) == (rounds, step)
    assert central.clip == trusted.privacy.clip * trusted.lr
    assert (shared.shared, shared.colluders, shared.mu) == (True, 2, pytest.approx(central.mu, rel=1e-3))
    # Two of ten shares count for nothing.
    at_equal_pace = dataclasses.replace(shared, rounds=central.rounds, clip=central.clip, participations=0)
    assert at_equal_pace.sigma / central.sigma == pytest.approx((10 / 8) ** 0.5, rel=0.02)


def test_too_few_examples_are_refused_with_the_choices() -> None:
    with pytest.raises(GuaranteeError, match=r"cost about \d\d points .*`features`.*`epsilon`.* such as blind$"):
        planned(preset("guaranteed"), examples=100, values=39_700)
    with pytest.raises(GuaranteeError, match=r"2 clients or more.*private-example"):
        planned(preset("guaranteed", clients=1), examples=4000, values=39_700)


def test_the_noise_of_adam_goes_before_it() -> None:
    adam, momentum = (privacy_plan(preset("private", server_optimizer=name)) for name in ("adam", "momentum"))
    assert adam is not None
    assert momentum is not None
    assert (adam.noise_on_updates, adam.momentum, adam.lr) == (True, 0.0, 1.0)
    assert (momentum.noise_on_updates, momentum.momentum) == (False, 0.5)
    model = networks.build("mnist-mlp")
    assert set(build_plan(preset("private", server_optimizer="adam"), model).veils.values()) == {0.0}
    assert set(build_plan(preset("private", server_optimizer="adam", veil=0.1), model).veils.values()) == {0.1}


def test_clients_may_count_by_their_examples_up_to_a_public_number() -> None:
    alike, capped = privacy_plan(preset("private")), privacy_plan(preset("private", weight_cap=60))
    assert alike is not None
    assert capped is not None
    assert (alike.weight_cap, capped.weight_cap, capped.sigma) == (0.0, 60.0, alike.sigma)


def test_a_plan_for_examples_takes_their_number_and_all_know_its_noise() -> None:
    config = planned(
        preset("private-example", model="mnist-mlp", epsilon=8.0, transcripts=("server",), clients=2),
        examples=4000,
        values=199_210,
    )
    task = task_of(config)
    model = task.make_model(0)
    with pytest.raises(ConfigError, match='unit "example" needs examples'):
        build_plan(config, model)
    plan = build_plan(config, model, examples=4000)
    sizes = set(plan.veils.values())
    noise = privacy_plan(config, 4000)
    assert noise is not None
    assert sizes == {float(f"{noise.relative(rms(model)):.3g}")}
    assert {public_setting(config, task, plan).veil} == sizes
    blind = preset("blind")
    assert public_setting(blind, task, build_plan(blind, model)).veil == 0.2


PATTERNS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]))


def test_a_preset_names_only_settings_and_the_default_one_comes_first() -> None:
    assert PRESETS[0] == DEFAULT == "guaranteed"
    for name in PRESETS:
        assert preset(name) == from_toml(to_toml(preset(name)))


@hypothesis.given(
    seed=st.one_of(st.none(), st.integers(0, 2**31)),
    veil=st.floats(0, 10),
    ratio=st.one_of(st.floats(1.1, 9), st.tuples(st.floats(1.1, 2), st.floats(2, 9))),
    coverage=st.one_of(
        st.sampled_from(["hidden", "all"]),
        st.tuples(PATTERNS, st.just('we"ird\\*')),
    ),
    norm_bound=st.one_of(st.none(), st.floats(0.1, 10)),
    lanes=st.one_of(st.none(), st.integers(1, 9)),
    transcripts=st.sampled_from([(), ("0", "server")]),
)
def test_a_configuration_survives_its_file(**settings) -> None:
    config = RunConfig.from_options(**settings)
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
        ("coverage = [1]", r"coverage must be text or a list of texts, got \(1,\)"),
        ("ratio = [2, 3, 4]", r"ratio must be a number or a list of 2 numbers, got \(2, 3, 4\)"),
        ("ratio = 'two'", "ratio is a number or a range such as 2-4, got 'two'"),
        ("fixed_secrets = true", "unknown settings: fixed_secrets"),
        ("privacy_unit = 'x'\nepsilon = 8\nclip = 1", "privacy_unit must be one of client, example"),
        ("epsilon = 8", "epsilon and clip go together"),
        ("clip = 8", "epsilon and clip go together"),
        ("delta = 0.1", "delta: without `epsilon` there is no guarantee"),
        ("data = 'cats'", "data must be one of digits, mnist, cifar10, lfw or module:factory, got 'cats'"),
        ("partition = 'x'", "partition must be one of iid, dirichlet, shards"),
        ("algorithm = 'x'", "algorithm must be one of fedavg, fedprox, sgd"),
        ("server_optimizer = 'x'", "server_optimizer must be one of fedavg, momentum, adam"),
        ("wire = 'int8'", "wire must be one of float64, float32"),
        ("sketch = 'x'", "sketch must be one of count-v1"),
        ("lanes = 0", "lanes must be 1 or more, got 0"),
        ("lanes = 2.5", "lanes must be a whole number, got 2.5"),
        ("lanes = true", "lanes must be a whole number, got True"),
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
        check(from_toml(text))


def test_the_validator_checks_its_own() -> None:
    with pytest.raises(ProtocolError, match="min_updates must be 1 or more, got 0"):
        check(RunConfig(min_updates=0))
    with pytest.raises(ProtocolError, match="norm_bound must be above 0, got -1"):
        check(RunConfig(norm_bound=-1.0))


def test_no_preset_of_that_name() -> None:
    with pytest.raises(ConfigError, match="no preset 'soft': neither one of guaranteed, blind, veil, private"):
        preset("soft")


def test_the_algorithms_become_local_training() -> None:
    config = RunConfig(proximal=0.3, epochs=2)
    fedavg, fedprox, sgd = (
        local_training(dataclasses.replace(config, algorithm=name)) for name in ("fedavg", "fedprox", "sgd")
    )
    assert (fedavg.proximal, fedavg.steps, fedavg.epochs) == (0, None, 2)
    assert (fedprox.proximal, fedprox.steps) == (0.3, None)
    assert sgd.steps == 1


def test_a_file_may_hold_the_text_that_an_option_takes() -> None:
    text = from_toml("coverage = 'conv*, !conv1*'\nratio = '2-4'\ntranscripts = '0,server'")
    assert text == from_toml("coverage = ['conv*', '!conv1*']\nratio = [2.0, 4.0]\ntranscripts = ['0', 'server']")
    assert from_toml("coverage = 'all'").sketch.coverage == "all"


@pytest.mark.parametrize(
    ("text", "lanes", "scheme"),
    [
        ("", 2, "lanes-v1"),
        ("ratio = 4.0", 4, "lanes-v1"),
        ("ratio = [2.0, 4.0]", 2, "lanes-v1"),
        ("ratio = 1.3", 1, "count-v1"),
        ("lanes = 1", 1, "count-v1"),
        ("lanes = 3", 3, "lanes-v1"),
        ("sketch = 'count-hashed-v1'", 1, "count-hashed-v1"),
    ],
)
def test_the_lanes_of_a_run_are_those_of_its_plan(text: str, lanes: int, scheme: str) -> None:
    plan = build_plan(from_toml(text), networks.build("mnist-mlp"))
    assert (plan.lanes, plan.tensors[0].scheme) == (lanes, scheme)


def test_a_seed_in_a_file_fixes_the_secrets_and_the_noise_of_clients_too() -> None:
    fixed, fresh = from_toml("seed = 3\nupdate_clip = 1.0"), from_toml("update_clip = 1.0")
    assert (fixed.insecure, fresh.insecure) == (True, False)
    noises = [update_noise(each) for each in (fixed, fresh)]
    assert [each.insecure_seed for each in noises if each is not None] == [3, None]


def test_every_setting_is_explained_and_its_default_is_one_of_its_choices() -> None:
    assert len(OPTIONS) > 50
    for name, field in OPTIONS.items():
        known = about(field)
        assert known.help
        assert not known.help.endswith(".")
        assert not known.choices or field.default in known.choices
        required = field.default is dataclasses.MISSING  # with a guarantee, which may be off
        assert bool(known.unset) == (field.default in (None, ())) or required, name
        assert explain(name).endswith(".")


def test_the_explanation_of_a_setting_follows_the_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    others = "guaranteed, private, private-example, paper, plain"
    assert f"Default momentum; presets {others}: fedavg." in explain("server_optimizer")
    assert f"Default 0.2; presets {others}: 0." in explain("veil")
    assert explain("clients").endswith("presets guaranteed, private-example: 10; preset private: 1000.")
    texts = dict.fromkeys(PRESETS, "") | {
        "blind": "veil = 0.5",
        "paper": "veil = 0.2",
        "plain": "ratio = [2.0, 4.0]",
    }
    monkeypatch.setattr("dbcl.simulation.presets._preset_text", texts.__getitem__)
    assert "Default 0.2; preset blind: 0.5." in explain("veil")
    assert "Default 2; preset plain: 2-4." in explain("ratio")
