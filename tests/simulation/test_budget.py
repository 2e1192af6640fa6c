"""What other choices would give, and what a run has spent."""

import dataclasses
import math
from pathlib import Path

import pytest

from dbcl.errors import ConfigError, ProtocolError
from dbcl.privacy import PrivacyPlan
from dbcl.protocol import checkpoint
from dbcl.simulation import Run, preset, read_metrics
from dbcl.simulation.build import privacy_plan
from dbcl.simulation.metrics import RoundMetrics, as_text
from dbcl.simulation.plots import curves
from dbcl.simulation.privacy_budget import Account, account_in, account_of, choices, noise_by_epsilon, plan_of, units_in

PLAN = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=400, clients=1000, cohort=100)


def test_choices_are_plans_of_their_own() -> None:
    found = dict(choices(PLAN, rms=0.05))
    expected = {
        "epsilon 1": {"epsilon": 1.0},
        "epsilon 2": {"epsilon": 2.0},
        "epsilon 4": {"epsilon": 4.0},
        "half the clip": {"clip": 0.1},
        "twice the clip": {"clip": 0.4},
        "half the rounds, 200": {"rounds": 200},
        "twice the rounds, 800": {"rounds": 800},
        "half the cohort, 50": {"cohort": 50},
        "twice the cohort, 200": {"cohort": 200},
        "independent noise": {"correlation": "independent"},
    }
    given = {name: getattr(PLAN, name) for name in ("epsilon", "delta", "clip", "rounds", "clients", "cohort")}
    assert list(found) == list(expected)
    for name, changes in expected.items():
        assert found[name] == pytest.approx(PrivacyPlan(**{**given, **changes}).relative(0.05))


def test_choices_that_cannot_be_are_left_out() -> None:
    alone = PrivacyPlan(epsilon=3, delta=1e-3, clip=1, rounds=1, clients=3, cohort=1, correlation="independent")
    names = [name for name, _ in choices(alone, rms=1.0)]
    assert not [name for name in names if name.startswith(("half the rounds", "half the cohort"))]
    assert {"epsilon 8", "twice the rounds, 2", "twice the cohort, 2", "banded noise"} <= set(names)
    everybody = PrivacyPlan(epsilon=3, delta=1e-3, clip=1, rounds=4, clients=3, cohort=3)
    assert not [name for name, _ in choices(everybody, rms=1.0) if name.startswith("twice the cohort")]


def test_the_curve_meets_the_plans() -> None:
    curve = noise_by_epsilon(PLAN, 0.05, [0.5, 4.0])
    for correlation, values in curve.items():
        there = [dataclasses.replace(PLAN, correlation=correlation, epsilon=each).relative(0.05) for each in (0.5, 4.0)]
        assert values == pytest.approx(there)


def test_examples_are_counted_by_whoever_plans() -> None:
    settings = {"privacy_unit": "example", "algorithm": "sgd", "fraction": 1.0, "clients": 2, "ema_decay": 0.9}
    config = preset("private", separation=10, **settings)
    with pytest.raises(ConfigError, match='unit "example" needs examples'):
        plan_of(config)
    assert (units_in(config), units_in(preset("private")), units_in(preset("blind"))) == (4000, 0, 0)
    with pytest.raises(ConfigError, match="privacy_unit: without `epsilon` there is no guarantee"):
        preset("blind", privacy_unit="example")
    with pytest.raises(ConfigError, match="data of your own give `examples`"):
        units_in(preset("private-example", data="mine:make"))
    with pytest.raises(ConfigError, match=r"or give their number by `examples`$"):
        units_in(preset("private-example", data="mnist"), "nowhere")
    plan = plan_of(config, examples=6000)
    assert (plan.unit, plan.batch, plan.separation) == ("example", 600, 10)
    assert {"half the batch, separation 20", "twice the batch, separation 5", "half the clip or lr"} <= {
        name for name, _ in choices(plan, rms=0.05)
    }


SMALL = {"clients": 40, "fraction": 0.25, "rounds": 8, "delta": 1e-3, "epsilon": 50.0, "clip": 0.05}


def test_a_run_is_accounted_while_it_plays_and_by_its_folder(tmp_path: Path) -> None:
    run = Run.start(preset("private", **SMALL), tmp_path / "run")
    nothing = account_in(tmp_path / "run")
    assert nothing is not None
    assert (nothing.rounds, nothing.turns, nothing.spent.epsilon) == (0, 0, 0.0)
    played = run.play()
    for _ in range(5):
        next(played)
    played.close()
    account = account_in(tmp_path / "run")
    plan = privacy_plan(preset("private", **SMALL))
    assert plan is not None
    assert account == account_of(run) == Account(plan, 5, 2, insecure=False)
    assert account.facts()["spent_epsilon"] == account.plan.spent(rounds=5, participations=2).epsilon
    assert 0 < account.spent.epsilon < 50
    again = Run.resume(tmp_path / "run")
    assert len(list(again.play())) == 3
    whole = account_in(tmp_path / "run")
    assert whole is not None
    assert (whole.rounds, whole.turns) == (8, 2)
    assert whole.spent.epsilon == pytest.approx(50)


def test_nothing_that_clients_measured_is_written(tmp_path: Path) -> None:
    run = Run.start(preset("private", **SMALL), tmp_path / "run")
    history = list(run.play())
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert text.count('"train_loss": null') == text.count('"clipped": null') == 8
    assert "NaN" not in text
    back = read_metrics(tmp_path / "run")
    assert [dataclasses.replace(each, train_loss=0.0) for each in back] == [
        dataclasses.replace(each, train_loss=0.0) for each in history
    ]
    assert all(math.isnan(each.train_loss) for each in back)
    assert not {"train_loss", "clipped"} & history[0].numbers().keys()
    assert next(iter(history[0].numbers())) == "accuracy"
    said = (tmp_path / "run" / "plan.txt").read_text()
    assert "the validator: 1 update or more; norms clipped to 0.05\n" in said
    assert "the guarantee: (epsilon 50, delta 0.001) differential privacy" in said


def test_a_score_that_is_no_number_is_null_and_stays_on_the_curves() -> None:
    metrics = RoundMetrics(1, math.nan, math.nan, 1.2, 10, 10, 3, [], 0, 0.1)
    assert as_text([metrics]).count("null") == 2
    assert math.isnan(RoundMetrics.of_line(metrics.line()).score)
    assert math.isnan(metrics.numbers()["accuracy"])


def test_the_picture_draws_no_curve_of_losses_that_it_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    drawn: list[str | None] = []
    plot = Axes.plot

    def noted(self, *values, **style):
        drawn.append(style.get("label"))
        return plot(self, *values, **style)

    monkeypatch.setattr(Axes, "plot", noted)
    line = RoundMetrics(1, 0.5, 1.0, math.nan, 10, 10, 3, [], None, 0.1).line()
    assert curves([line, {**line, "round": 2}], "a run")[:4] == b"\x89PNG"
    assert drawn == [None, "the model, held-out"]


def test_checkpoints_that_do_not_say_are_refused(tmp_path: Path) -> None:
    Run.start(preset("private", **SMALL), tmp_path / "run")
    (path,) = (tmp_path / "run" / "checkpoints").glob("*.dbcl")
    state = checkpoint.load(path.parent)
    del state.values["server"]["guarantee"]["participation"]
    checkpoint.save(path.parent, 0, state)
    with pytest.raises(ProtocolError, match="does not hold the guarantee and the participations"):
        account_in(tmp_path / "run")
    path.unlink()
    with pytest.raises(ProtocolError, match="no whole checkpoint"):
        account_in(tmp_path / "run")
