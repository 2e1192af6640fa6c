"""Ordinary mistakes with data and models in Python: each is one sentence with the remedy, before any training."""

# ruff: noqa: E501

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbcl
from dbcl.engines import evaluate
from dbcl.errors import DbclError

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 2
VALUES = X[:, :1].clone()
HELD_OUT = (X, Y)


def net(outputs: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))


def clients(x: Any = X, y: Any = Y) -> list[tuple[Any, Any]]:
    return [(x[:6], y[:6]), (x[6:], y[6:])]


def with_value(tensor: Tensor, value: float) -> Tensor:
    changed = tensor.clone()
    changed[7] = value
    return changed


class Lazy(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """A dataset that is read example by example."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.x[row], self.y[row]


class Output(NamedTuple):
    logits: Tensor


class Wrapped(nn.Module):
    """Gives an object with logits, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Output:
        return Output(self.inner(x))


def simulate(model: Any = None, own: Any = None, held_out: Any = HELD_OUT, **more: Any) -> Callable[[], Any]:
    return lambda: dbcl.simulate(
        net() if model is None else model,
        clients() if own is None else own,
        held_out,
        **{"settings": "blind", "rounds": 1, **more},
    )


def regression(**more: Any) -> Callable[[], Any]:
    return simulate(net(1), clients(X, VALUES), (X, VALUES), loss=F.mse_loss, **more)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "NaN in a client's inputs": (simulate(own=clients(with_value(X, float("nan")))), r"client 1: 1 of 6 examples hold NaN .* inputs, the first of them example 1; leave them out or fill"),
    "infinity in a client's inputs": (simulate(own=clients(with_value(X, float("inf")))), r"client 1: 1 of 6 examples hold NaN or infinity"),
    "NaN in regression targets": (simulate(net(1), clients(X, with_value(VALUES, float("nan"))), (X, VALUES), loss=F.mse_loss), r"client 1: 1 of 6 .* their targets"),
    "NaN in one set for all": (simulate(own=(with_value(X, float("nan")), Y), clients=2), r"the training examples: 1 of 12"),
    "NaN in held-out inputs": (simulate(held_out=(with_value(X, float("nan")), Y)), r"the held-out examples: 1 of 12"),
    "NaN in held-out targets": (simulate(net(1), clients(X, VALUES), (X, with_value(VALUES, float("nan"))), loss=F.mse_loss), r"the held-out examples: 1 of 12 .* targets"),
    "NaN in a held-out dataset": (simulate(held_out=Lazy(with_value(X, float("nan")), Y)), r"the held-out examples: 1 of 12 .* example 7"),
    "targets without an axis": (simulate(net(1), clients(X, VALUES[:, 0]), (X, VALUES[:, 0]), loss=F.mse_loss), r"compares each output with every target; give both the same shape: targets\[:, None\]"),
    "a loss written by hand that broadcasts": (simulate(net(1), clients(X, VALUES[:, 0]), (X, VALUES[:, 0]), loss=lambda o, t: (o - t).abs().mean()), r"compares each output with every target"),
    "targets with an axis too many": (simulate(nn.Sequential(net(1), nn.Flatten(0)), clients(X, VALUES), (X, VALUES), loss=F.mse_loss), r"compares each output with every target"),
    "float64 arrays": (simulate(own=clients(X.double().numpy(), Y.numpy())), r"the inputs are torch.float64 and the weights torch.float32: cast .* x.astype\('float32'\)"),
    "a float64 held-out set": (simulate(held_out=(X.double(), Y)), r"the held-out examples: .* cast the inputs, x.to\(torch.float32\)"),
    "half-precision inputs": (simulate(own=clients(X.half())), r"the inputs are torch.float16"),
    "an output with logits": (simulate(Wrapped()), r"the network's output is a Output, so give a loss and a metric .*outputs.logits"),
    "inputs of another width": (simulate(own=clients(X[:, :3])), r"do not go together"),
    "a class that the network lacks": (simulate(own=clients(X, Y + 5)), r"hold the class 5, and the network has 2 outputs"),
    "a class below 0": (simulate(own=clients(X, Y - 1)), r"hold the class -1"),
    "targets that are no classes": (simulate(own=clients(X, VALUES)), r"no classes: give the loss .* `loss=torch.nn.functional.mse_loss`"),
    "an empty client": (simulate(own=[*clients(), (X[:0], Y[:0])]), r"client 2: a set of examples is empty"),
    "no clients": (simulate(own=[]), r"the list of clients is empty"),
    "one client, and nobody is trusted": (simulate(own=[(X, Y)], settings="guaranteed"), r"takes 2 clients or more, and there is 1; the preset private-example trusts the server"),
    "one client under secure aggregation": (simulate(own=[(X, Y)], settings="blind", secure_aggregation=True), r"8 clients or more .* a round has 1 of 1: the remedy is `clients=8`"),
    "inputs and targets of other lengths": (simulate(own=[(X[:6], Y[:5])]), r"client 0: every tensor needs a row for each example"),
    "clients of other widths": (simulate(own=[(X, Y), (X[:, :3], Y)]), r"the clients' examples differ in shape"),
    "a list of lists": (simulate(own=[[1, 2], [3, 4]]), r"an example must be a pair"),
    "a string for data": (simulate(own="mnist"), r"the training examples: examples are a pair"),
    "clients given twice": (simulate(clients=3), r"clients is a list of 2 clients already"),
    "a model class that is no module": (simulate(lambda: 3), r"must make a torch.nn.Module"),
    "a name for a model": (simulate("mnist-mlp"), r"model is a torch.nn.Module or a function"),
    "a loss of another shape": (simulate(loss=lambda outputs, targets: outputs), r"the loss must give one number for a batch"),
    "a loss that sums to a Python number": (regression(metric=lambda o, t: "good"), r"metric"),
    "an unknown setting": (simulate(round=3), r"unknown settings: round; did you mean rounds\?"),
    "a fraction in percent": (simulate(fraction=50), r"fraction must be above 0 and at most 1, got 50"),
    "an optimiser that is none": (simulate(optimizer="SDG"), r"optimizer must be one of .*SGD"),
    "more updates than clients": (simulate(min_updates=3), r"min_updates is 3, and a round has 2 of 2 clients"),
    "a GPU that is not there": (simulate(device="cuda:99"), r"CUDA"),
    "a guarantee without a clip": (simulate(epsilon=8.0), r"epsilon and clip go together"),
    "secure aggregation of two": (simulate(secure_aggregation=True), r"`secure_aggregation` adds up 8 clients or more \(`min_cohort`\), and a round .* `clients=8` with `fraction=1`$"),
    "secure aggregation in two lanes": (simulate(secure_aggregation=True, coverage="hidden"), r"8 clients or more .* in each of 2 lanes.* `clients=16` with `fraction=1`, or `lanes=1`"),
}  # fmt: skip


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_one_sentence_with_the_remedy(what: str) -> None:
    make, message = MISTAKES[what]
    with pytest.raises(DbclError) as error:
        make()
    said = str(error.value)
    assert re.search(message, said), said
    assert "--" not in said  # an option of the command, which nobody has typed


def test_there_are_thirty_mistakes() -> None:
    assert len(MISTAKES) >= 30


@pytest.mark.parametrize("settings", ["blind", "veil", "plain"])
@pytest.mark.parametrize("engine", ["stacked", "local"])
def test_one_client_trains(settings: str, engine: str) -> None:
    """Its lane alone moves the weights in a round, and in the end all of them have moved."""
    wide = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    start = copy.deepcopy(wide.state_dict())
    run = dbcl.simulate(
        wide,
        [(X, X[:, 0].gt(0).long())],
        (X, X[:, 0].gt(0).long()),
        settings=settings,
        engine=engine,
        rounds=20,
        seed=0,
    )
    assert all(metrics.accepted == 1 for metrics in run.history)
    assert run.contributions.rejected == {}
    assert run.best.score > 0.8
    for name, W in run.server.model.state_dict().items():
        assert not torch.equal(W, start[name]), name


def test_what_looks_like_broadcasting_and_is_none_is_taken() -> None:
    def squeezes(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs.squeeze(-1), targets)

    run = dbcl.simulate(net(1), clients(X, VALUES[:, 0]), (X, VALUES[:, 0]), loss=squeezes, rounds=1, settings="blind")
    assert np.isfinite(run.history[-1].loss)
    both = lambda outputs, targets: F.gaussian_nll_loss(outputs[:, :1], targets, outputs[:, 1:].exp())  # noqa: E731
    run = dbcl.simulate(net(2), clients(X, VALUES), (X, VALUES), loss=both, rounds=1, settings="blind")
    assert np.isfinite(run.history[-1].loss)


def test_resuming_with_other_data_is_refused(tmp_path: Path) -> None:
    dbcl.simulate(net(), clients(), HELD_OUT, rounds=1, folder=tmp_path / "run", settings="blind")
    with pytest.raises(
        DbclError, match="the examples, the clients' or the held-out ones, are not those that this run began with"
    ):
        dbcl.simulate(net(), clients(X + 1), HELD_OUT, rounds=2, folder=tmp_path / "run", resume=True, settings="blind")
    with pytest.raises(DbclError, match=r"examples, the clients' or .* are not those"):
        dbcl.simulate(
            net(),
            clients(X.flip(0), Y.flip(0)),
            HELD_OUT,
            rounds=2,
            folder=tmp_path / "run",
            resume=True,
            settings="blind",
        )
    with pytest.raises(DbclError, match="or the held-out ones, are not those"):
        dbcl.simulate(net(), clients(), (X + 1, Y), rounds=2, folder=tmp_path / "run", resume=True, settings="blind")
    again = dbcl.simulate(net(), clients(), HELD_OUT, rounds=2, folder=tmp_path / "run", resume=True, settings="blind")
    assert again.history[-1].round == 2


def test_one_example_of_many_that_has_changed_is_other_data(tmp_path: Path) -> None:
    x, y = torch.randn(300, 4, generator=torch.Generator().manual_seed(1)), torch.arange(300) % 2
    dbcl.simulate(net(), [(x, y)], HELD_OUT, rounds=1, folder=tmp_path / "run", settings="blind")
    other = x.clone()
    other[101] += 1
    with pytest.raises(DbclError, match="are not those that this run began with"):
        dbcl.simulate(net(), [(other, y)], HELD_OUT, rounds=2, folder=tmp_path / "run", resume=True, settings="blind")


def test_evaluating_on_nan_is_refused_and_a_model_of_nan_is_not() -> None:
    with pytest.raises(DbclError, match="the held-out examples: 1 of 12"):
        evaluate(net(), Lazy(with_value(X, float("nan")), Y))
    model = net()
    torch.nn.init.constant_(model[0].weight, float("nan"))  # type: ignore[arg-type]
    assert np.isnan(evaluate(model, HELD_OUT).loss)


def test_resuming_with_another_model_says_what_differs(tmp_path: Path) -> None:
    dbcl.simulate(net(), clients(), HELD_OUT, rounds=1, folder=tmp_path / "run", settings="blind")
    wider = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 2))
    with pytest.raises(DbclError, match=r"0.weight has shape \(9, 4\) here and \(8, 4\) in the checkpoint"):
        dbcl.simulate(wider, clients(), HELD_OUT, rounds=2, folder=tmp_path / "run", resume=True, settings="blind")
