"""`dbcl train` and `dbcl audit` with a model, data, a loss and a metric of one's own, named as module:function."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dbcl.errors import ConfigError, DataError
from dbcl.simulation import from_toml, read_metrics

Invoke = Callable[..., str]

OWN = """
import torch
from torch import nn

def hospitals():
    x = torch.randn(120, 8, generator=torch.Generator().manual_seed(0))
    y = x[:, :1] - 2 * x[:, 1:2]
    parts = [(x[at : at + 20], y[at : at + 20]) for at in range(0, 80, 20)]
    return parts, (x[80:], y[80:]), {"old": (x[:80, 3] > 0).numpy()}

class Lazy(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        return self.x[row], self.y[row]

def one_sick():
    parts, held_out, _ = hospitals()
    parts[2][0][3] = torch.nan
    return [Lazy(*part) for part in parts], held_out

def one_set():
    train, held_out, _ = hospitals()
    return train[0], held_out

def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

def r2(outputs, targets):
    return 1 - (outputs - targets).square().sum() / (targets - targets.mean()).square().sum()

def halved(round):
    return 0.5**round

def adam(parameters, lr):
    return torch.optim.Adam(parameters, lr=lr, weight_decay=0.01)

def nothing():
    return None

def four():
    return 1, 2, 3, 4
"""
MSE = ("--loss", "torch.nn.functional:mse_loss")
OURS = ("--model", "own_data:net", "--data", "own_data:hospitals", *MSE, "--lr", "0.05", "--batch-size", "5")


@pytest.fixture(autouse=True)
def own_file(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("own_data.py").write_text(OWN)
    monkeypatch.delitem(sys.modules, "own_data", raising=False)


def test_a_client_that_was_rejected_is_named_at_the_end(invoke: Invoke) -> None:
    given = (
        "train",
        "--preset",
        "blind",
        "--model",
        "own_data:net",
        "--data",
        "own_data:one_sick",
        *MSE,
        "--rounds",
        "3",
        "--seed",
        "0",
    )
    assert "client 2: rejected in 3 of 3 rounds" in " ".join(invoke(*given).replace("│", " ").split())
    facts = json.loads(invoke(*given, "--json"))
    assert facts["clients"]["rejected"].keys() == {"client 2"}
    assert "client 2: rejected in 3 of 3 rounds" in " ".join(invoke(*given, "--quiet").split())


def test_own_data_are_trained_on_resumed_and_audited(invoke: Invoke) -> None:
    output = invoke(
        "train",
        "--preset",
        "blind",
        *OURS,
        "--metric",
        "own_data:r2",
        "--rounds",
        "3",
        "--seed",
        "0",
        "--transcripts",
        "0",
    )
    folder = Path("runs/001-blind-own_data-hospitals")
    assert "test r2" in output
    assert "own_data:net on own_data:hospitals, 4 clients" in output
    assert from_toml((folder / "config.toml").read_text()).cohort == 4
    assert [metrics.metric for metrics in read_metrics(folder)] == ["r2"] * 3
    with pytest.raises(ConfigError, match=r"name code that would be run .model own_data:net, .*, add .allow_code=True"):
        invoke("train", "--resume", str(folder), "--rounds", "5")
    with pytest.raises(ConfigError, match=r"name code that would be run"):
        invoke("train", "--resume", str(folder), "--model", "own_data:net")  # not all of it
    with pytest.raises(ConfigError, match=r"has another model; with --resume it cannot change"):
        invoke("train", "--resume", str(folder), "--model", "own_data:other")
    with pytest.raises(ConfigError, match=r"name code that would be run"):
        invoke("audit", str(folder))
    code = ("--model", "own_data:net", "--data", "own_data:hospitals", *MSE, "--metric", "own_data:r2")
    invoke("train", "--resume", str(folder), "--rounds", "4", *code)  # the same again is as good as --allow-code
    report = json.loads(invoke("train", "--resume", str(folder), "--rounds", "5", "--json", "--allow-code"))
    assert report["rounds"] == 5
    assert report["r2"] == read_metrics(folder)[-1].score
    whole = json.loads(
        invoke("train", "--preset", "blind", *OURS, "--metric", "own_data:r2", "--rounds", "5", "--seed", "0", "--json")
    )
    assert whole["r2"] == report["r2"]
    audited = invoke("audit", str(folder), "--quick", "--allow-code")
    assert "not attacked: images and labels: the loss is not the cross entropy of classes" in audited
    assert "│ old " in audited
    page = (folder / "audit.html").read_text()
    assert "<p>Not attacked:</p>" in page


def test_one_set_is_divided_by_the_settings(invoke: Invoke) -> None:
    settings = ("--model", "own_data:net", "--data", "own_data:one_set", *MSE)
    output = invoke(
        "train", "--preset", "blind", *settings, "--clients", "5", "--rounds", "1", "--lr-schedule", "own_data:halved"
    )
    assert "own_data:net on own_data:one_set, 5 clients" in output
    assert "test loss" in output
    invoke(
        "train",
        "--preset",
        "blind",
        *settings,
        "--clients",
        "2",
        "--rounds",
        "2",
        "--optimizer",
        "own_data:adam",
        "--target",
        "100",
    )
    assert len(read_metrics(Path("runs/002-blind-own_data-one_set"))) == 1  # a loss below 100 was the target


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("--data", "own_data:nothing"), "must give .training examples, held-out examples., .* it gave a NoneType"),
        (("--data", "own_data:four"), "it gave a tuple of 4"),
        (("--data", "own_data:missing"), "cannot import the data 'own_data:missing'"),
        (("--data", "own_data:hospitals", "--model", "mnist-mlp"), "mnist-mlp is made for the built-in datasets"),
        (("--loss", "own_data:net"), "do not go together"),
        (("--loss", "mse"), "loss must be cross-entropy or module:function, got 'mse'"),
        (("--metric", "r2"), "metric must be loss or module:function, got 'r2'"),
        (("--optimizer", "Adamm"), "optimizer must be one of"),
        (("--target", "nan"), "target must be finite"),
    ],
)
def test_what_is_wrong_is_one_sentence(invoke: Invoke, settings: tuple[str, ...], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        invoke("train", "--preset", "blind", *OURS, *settings)
    assert not Path("runs").exists()
