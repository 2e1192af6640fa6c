"""`dbcl.simulate`: any model, data, loss and metric, and the same run and audit as with built-in data."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dbcl
from dbcl.errors import ConfigError, DataError
from dbcl.simulation import Run, RunConfig, read_metrics
from dbcl_audit import audit as audits
from dbcl_audit.effort import AuditEffort
from dbcl_audit.report.page import page

BRIEF = AuditEffort(
    rounds=18, batch=4, estimators=("option I", "smoother"), own_batches=1, own_examples=8, images=1, steps=2,
    restarts=1, solver_steps=5, shadow_models=4, inverting=False, min_lag=4,
    run_rounds=6, all_rounds=6,  step_images=0, known_ends=False, fixed_images=1, fixed_rounds=6,
    fixed_steps=3,
)  # fmt: skip


def table(count: int = 120) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    return x, x[:, :1] - 2 * x[:, 1:2]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def r2(outputs: Tensor, targets: Tensor) -> Tensor:
    return 1 - (outputs - targets).square().sum() / (targets - targets.mean()).square().sum()


def hospitals() -> list[tuple[Tensor, Tensor]]:
    x, y = table()
    return [(x[at : at + 20], y[at : at + 20]) for at in range(0, 80, 20)]


def held_out() -> tuple[Tensor, Tensor]:
    x, y = table()
    return x[80:], y[80:]


SMALL: dict[str, Any] = {"loss": F.mse_loss, "lr": 0.05, "rounds": 4, "seed": 0, "batch_size": 5}


def test_a_regression_learns_and_leaves_a_whole_folder(tmp_path: Path) -> None:
    seen = []

    class Watch:
        def begin(self, folder: Path, settings: Any, round: int) -> None:
            seen.append(settings["loss"])

        def log(self, round: int, values: Any) -> None:
            seen.append(values["r2"])

        def end(self) -> None:
            seen.append("end")

    longer = {**SMALL, "rounds": 60, "server_momentum": 0.5}  # with more, the last weights of so small a run are noisy
    run = dbcl.simulate(
        net, hospitals(), held_out(), metric=r2, folder=tmp_path / "run", trackers=[Watch()], settings="blind", **longer
    )
    assert run.history[-1].score > 0.6 > 0.3 > run.history[0].score
    assert run.config.cohort == 4  # all hospitals in every round
    assert seen[0] == "mse_loss (in Python)"
    assert seen[1:-1] == [metrics.score for metrics in run.history]
    assert seen[-1] == "end"
    assert {"config.toml", "metrics.jsonl", "model.safetensors", "curves.png", "plan.txt"} <= {
        path.name for path in run.folder.iterdir()
    }
    assert read_metrics(run.folder) == run.history
    assert '"r2": ' in (run.folder / "metrics.jsonl").read_text()
    assert run._repr_png_()[:4] == b"\x89PNG"
    outputs = run.model(held_out()[0]).detach()
    assert float(r2(outputs, held_out()[1])) == pytest.approx(run.history[-1].score, abs=1e-6)


def test_the_loss_is_the_metric_where_none_is_given_and_less_of_it_is_better() -> None:
    run = dbcl.simulate(net, hospitals(), held_out(), settings="blind", **{**SMALL, "rounds": 30, "target": 2.0})
    losses = [metrics.loss for metrics in run.history]
    assert [metrics.score for metrics in run.history] == losses
    assert run.best.loss == min(losses)
    assert run.stopped_by == "target"
    assert losses[-1] <= 2.0 < min(losses[:-1])


@pytest.mark.parametrize("engine", ["stacked", "local"])
def test_one_set_is_divided_and_every_kind_of_source_gives_the_same_weights(engine: str) -> None:
    x, y = table()
    weights = []
    for source in ((x, y), TensorDataset(x, y), DataLoader(TensorDataset(x, y), batch_size=7)):
        run = dbcl.simulate(net, source, held_out(), clients=6, fraction=0.5, engine=engine, settings="blind", **SMALL)
        assert (run.config.clients, run.config.cohort) == (6, 3)
        weights.append(torch.cat([p.detach().flatten() for p in run.model.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


def test_classes_of_ones_own_take_the_fast_path_and_a_given_cross_entropy_too() -> None:
    x = torch.randn(90, 6, generator=torch.Generator().manual_seed(1))
    y = x[:, :3].argmax(dim=1)
    clients = [(x[:40], y[:40]), (x[40:60], y[40:60])]
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    runs = [
        dbcl.simulate(model, clients, (x[60:], y[60:]), loss=loss, rounds=5, seed=0, lr=0.1, settings="blind")
        for loss in (None, F.cross_entropy, nn.CrossEntropyLoss, nn.CrossEntropyLoss())
    ]
    assert {run.engine.path for run in runs} == {"stages"}  # type: ignore[attr-defined]
    assert len({run.history[-1].loss for run in runs}) == 1
    smooth = dbcl.simulate(
        model,
        clients,
        (x[60:], y[60:]),
        loss=nn.CrossEntropyLoss(label_smoothing=0.1),
        rounds=1,
        seed=0,
        settings="blind",
    )
    assert (smooth.engine.path, smooth.history[0].metric) == ("loop", "loss")  # type: ignore[attr-defined]
    assert smooth.engine.why == "the loss CrossEntropyLoss is computed for one client at a time"  # type: ignore[attr-defined]


def test_a_run_of_objects_goes_on_with_the_same_objects_and_no_others(tmp_path: Path) -> None:
    whole = dbcl.simulate(net, hospitals(), held_out(), settings="blind", **SMALL)
    short = {**SMALL, "rounds": 2}
    dbcl.simulate(net, hospitals(), held_out(), folder=tmp_path / "run", settings="blind", **short)
    run = dbcl.simulate(net, hospitals(), held_out(), folder=tmp_path / "run", resume=True, settings="blind", **SMALL)
    assert [metrics.round for metrics in run.history] == [1, 2, 3, 4]
    assert [m.loss for m in run.history] == [m.loss for m in whole.history]
    with pytest.raises(ConfigError, match=r"other settings: lr was 0.05 and is 0.1; a run may change rounds, target"):
        dbcl.simulate(
            net, hospitals(), held_out(), folder=tmp_path / "run", resume=True, settings="blind", **{**SMALL, "lr": 0.1}
        )
    with pytest.raises(ConfigError, match=r"other settings: veil was 0.2 and is 0.3;"):
        dbcl.simulate(
            net,
            hospitals(),
            held_out(),
            folder=tmp_path / "run",
            resume=True,
            settings="blind",
            **{**SMALL, "veil": 0.3},
        )
    with pytest.raises(ConfigError, match="holds a run already"):
        dbcl.simulate(net, hospitals(), held_out(), folder=tmp_path / "run", settings="blind", **SMALL)
    with pytest.raises(ConfigError, match=r"the model of this run, net, was given in Python: go on by dbcl.simulate"):
        Run.resume(tmp_path / "run")


def test_without_a_folder_nothing_stays() -> None:
    run = dbcl.simulate(net, hospitals(), held_out(), settings="blind", **SMALL)
    folder = run.folder
    assert folder.exists()
    del run
    assert not folder.exists()


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [("AdamW", "cosine"), (torch.optim.RMSprop, lambda round: 0.5**round), ("sgd", "constant")],
)
def test_optimisers_and_schedules(optimizer: Any, schedule: Any) -> None:
    run = dbcl.simulate(
        net, hospitals(), held_out(), optimizer=optimizer, lr_schedule=schedule, settings="blind", **SMALL
    )
    training = run.engine.training
    rates = [training.rate(round) / 0.05 for round in range(4)]
    expected = {
        "cosine": [(1 + math.cos(math.pi * r / 4)) / 2 for r in range(4)],
        "constant": [1.0] * 4,
    }.get(schedule if isinstance(schedule, str) else "", [1, 0.5, 0.25, 0.125])
    assert rates == pytest.approx(expected)
    assert training.optimizer.__name__ == {"AdamW": "AdamW", "sgd": "SGD"}.get(str(optimizer), "RMSprop")


class Dictionary(nn.Module):
    """A segmentation: takes a picture by name, gives a dictionary, as torchvision's do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 2, 1)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        return {"out": self.head(torch.relu(self.body(image)))}


def pixel_loss(output: dict[str, Tensor], masks: Tensor) -> Tensor:
    return F.cross_entropy(output["out"], masks)


class MeanIoU:
    """A metric that is given batches one by one, as torchmetrics' are."""

    def reset(self) -> None:
        self.both = self.either = 0

    def update(self, output: dict[str, Tensor], masks: Tensor) -> None:
        found, true = output["out"].argmax(dim=1) == 1, masks == 1
        self.both += int((found & true).sum())
        self.either += int((found | true).sum())

    def compute(self) -> float:
        return self.both / max(1, self.either)


def test_dictionaries_in_and_out_and_a_metric_that_streams() -> None:
    x = torch.randn(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    masks = (x[:, 0] > 0).long()
    clients = [({"image": x[at : at + 10]}, masks[at : at + 10]) for at in (0, 10, 20)]
    held = {"image": x[30:]}, masks[30:]
    run = dbcl.simulate(
        Dictionary, clients, held, loss=pixel_loss, metric=MeanIoU, lr=0.5, rounds=30, seed=0, settings="blind"
    )
    assert run.history[-1].metric == "MeanIoU"
    assert run.history[-1].score > 0.9


def test_a_metric_sees_all_outputs_at_once() -> None:
    calls = []

    def spread(outputs: Tensor, targets: Tensor) -> float:
        calls.append(len(outputs))
        return float(outputs.std())

    x, y = table(2100)
    dbcl.simulate(net, [(x[:10], y[:10])], (x, y), metric=spread, settings="blind", **{**SMALL, "rounds": 1})
    assert calls == [2100]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"clients": hospitals()[0], "loss": None}, ConfigError, "the targets are torch.float32 and no classes"),
        (
            {"loss": lambda outputs, targets: outputs - targets},
            ConfigError,
            r"one number.*got a tensor of shape \(2, 1\)",
        ),
        ({"loss": lambda outputs, targets: 1.0}, ConfigError, "one number for a batch, as a tensor.*got float"),
        ({"loss": lambda outputs, targets: outputs.nothing}, ConfigError, "do not go together: 'Tensor' object has no"),
        ({"clients": []}, DataError, "the list of clients is empty"),
        ({"clients": [3]}, DataError, "client 0: examples are a pair"),
        ({"held_out": 3}, DataError, "the held-out examples: examples are a pair"),
        ({"clients": [*hospitals(), DataLoader(TensorDataset(*table()))]}, DataError, "give all in one way"),
        ({"clients": [*hospitals(), (torch.zeros(3, 9), torch.zeros(3, 1))]}, DataError, "differ in shape or kind"),
        ({"model": 3}, ConfigError, "model is a torch.nn.Module or a function that makes one, got int"),
        ({"model": lambda: 3}, ConfigError, "made a int, and must make a torch.nn.Module"),
        ({"metric_mode": "more"}, ConfigError, "metric_mode must be 'higher' or 'lower', got 'more'"),
        ({"optimizer": "Nadam2"}, ConfigError, "optimizer must be one of ASGD, .*, or module:factory; got 'Nadam2'"),
        ({"optimizer": "AdamW", "momentum": 0.5}, ConfigError, "momentum is that of SGD; set it where AdamW is made"),
        ({"lr_schedule": "steps"}, ConfigError, "lr_schedule must be constant, cosine or module:function"),
        ({"lr_schedule": lambda round: -1.0}, ConfigError, "the schedule gives round 0 the learning rate -0.05"),
        (
            {"partition": "dirichlet", "clients": table()},
            ConfigError,
            "divides by class, and these targets are no tensor",
        ),
        (
            {"properties": {"old": [True]}},
            DataError,
            "'old' must be True or False for each of the 80 training examples",
        ),
        ({"settings": "nothing"}, ConfigError, "no preset 'nothing'"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(change: dict[str, Any], error: type, message: str) -> None:
    given = {"model": net, "clients": hospitals(), "held_out": held_out(), "settings": "blind", **SMALL, **change}
    with pytest.raises(error, match=message):
        dbcl.simulate(given.pop("model"), given.pop("clients"), given.pop("held_out"), **given)


def test_a_list_of_clients_and_a_number_of_them_is_a_contradiction() -> None:
    with pytest.raises(ConfigError, match="clients is a list of 4 clients already; give one set to divide it among 3"):
        dbcl.simulate(net, hospitals(), held_out(), clients=3, settings="blind", **SMALL)
    with pytest.raises(ConfigError, match="unknown settings: nothing"):
        dbcl.simulate(net, hospitals(), held_out(), nothing=3, settings="blind")


def test_an_audit_of_ones_own_data_runs_what_makes_sense_and_says_what_does_not(tmp_path: Path) -> None:
    old = (table()[0][:80, 3] > 0).numpy()
    run = dbcl.simulate(
        net,
        hospitals(),
        held_out(),
        properties={"old": old},
        folder=tmp_path / "run",
        transcripts=("0",),
        settings="blind",
        **SMALL,
    )
    found = audits.audit(run.folder, effort=BRIEF, task=run.task)
    assert found.not_attacked == {"images and labels": "the loss is not the cross entropy of classes"}
    assert found.property_name == "old"
    assert not any(finding.failures or math.isnan(finding.value) for finding in found.findings)
    assert "This audit is incomplete" not in page(found)
    kinds = {(finding.target, finding.adversary) for finding in found.findings}
    assert {("update", "client"), ("property", "server"), ("property", "client"), ("membership", "anyone")} <= kinds
    assert not any("4.bias" in finding.note for finding in found.findings if finding.measure == "cosine")
    without = dbcl.simulate(net, hospitals(), held_out(), folder=tmp_path / "without", settings="blind", **SMALL)
    found = audits.audit(without.folder, effort=BRIEF, task=without.task)
    assert found.not_attacked["property"] == "no property of these examples is known; it can be given with the data"


def test_pictures_of_ones_own_are_attacked_as_pictures(tmp_path: Path) -> None:
    x = torch.rand(40, 1, 12, 12, generator=torch.Generator().manual_seed(0)) * 4 - 1
    y = torch.arange(40) % 3
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(400, 3))
    run = dbcl.simulate(
        model,
        [(x[:15], y[:15]), (x[15:30], y[15:30])],
        (x[30:], y[30:]),
        rounds=2,
        folder=tmp_path / "r",
        settings="blind",
    )
    assert run.task.pictures is not None
    from dbcl_audit.image_quality import span

    assert span(run.task.pictures) == pytest.approx((float(x[:30].min()), float(x[:30].max())), abs=1e-5)
    found = audits.audit(run.folder, effort=BRIEF, task=run.task)
    assert {"image", "label", "membership", "update"} <= {finding.target for finding in found.findings}
    assert list(found.not_attacked) == ["property"]


def test_given_data_decide_how_many_clients_there_are() -> None:
    from dbcl.objective import Objective
    from dbcl.simulation.task import given

    task = given(lambda seed: net(), hospitals(), held_out(), objective=Objective.from_loss(F.mse_loss))
    assert task.adapt(RunConfig()).cohort == 4
    assert task.adapt(RunConfig(fraction=0.5)).cohort == 2
    assert np.concatenate(task.division or []).tolist() == list(range(80))
