"""`dbcl privacy` before and after a run, and what `dbcl train` says of a guarantee."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from dbcl.errors import ConfigError
from dbcl.model import networks
from dbcl.privacy import PrivacyPlan
from dbcl.protocol import checkpoint
from dbcl.simulation import preset
from dbcl.simulation.build import privacy_plan
from dbcl.simulation.planning import planned, rms, weight_scale

Invoke = Callable[..., str]

SMALL = ["--clients", "40", "--fraction", "0.25", "--delta", "1e-3", "--epsilon", "50", "--clip", "0.05"]
TRAIN = ["train", "--preset", "private", *SMALL, "--rounds", "6"]


def words(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def test_before_a_run_it_says_what_the_preset_takes(invoke: Invoke) -> None:
    out = words(invoke("privacy", "--preset", "private"))
    for sentence in (
        "epsilon 8 at delta 1e-05 for one client",
        "100 of 1000 clients in each of 400 rounds, in turns",
        "separation 10 rounds at least between two turns of one client",
        "participations 40 of one client at most",
        "mu 1.666",
        "sigma 0.01016",
        "noise on W 0.04219, which is 0.93 times the initial weights of mnist-mlp",
        "neighbouring runs differ by one client, whose updates are zero in one of them",
        "as planned 0.93 1 ",
        "independent noise 2.37 2.55",
        "clip 0.2: no client's update is longer; they all count alike",
        "train dbcl train --preset private",
    ):
        assert sentence in out
    assert list(Path().iterdir()) == []


def test_json_has_the_plan_and_the_other_choices(invoke: Invoke) -> None:
    options = [
        "--preset",
        "private",
        "--epsilon",
        "4",
        "--clients",
        "2000",
        "--rounds",
        "100",
        "--server-optimizer",
        "momentum",
    ]
    facts = json.loads(invoke("privacy", *options, "--model", "cifar-cnn", "--shape", "3,32,32", "--json"))
    plan = PrivacyPlan(epsilon=4, delta=1e-5, clip=0.2, rounds=100, clients=2000, cohort=200, momentum=0.5)
    size = rms(networks.build("cifar-cnn", shape=(3, 32, 32)))
    assert facts["relative_noise"] == plan.relative(size)
    assert (facts["mu"], facts["sigma"], facts["promise"]) == (plan.mu, plan.sigma, plan.promise)
    assert (facts["separation"], facts["participations"], facts["useful"]) == (10, 10, True)
    others = {row["choice"]: row["relative_noise"] for row in facts["other_choices"]}
    assert others["half the clip"] == pytest.approx(facts["relative_noise"] / 2)
    assert others["independent noise"] > 1.3 * facts["relative_noise"]
    assert others["epsilon 1"] > others["epsilon 2"] > facts["relative_noise"] > others["epsilon 8"]


def test_the_picture(invoke: Invoke) -> None:
    out = invoke("privacy", "--preset", "private", "--epsilon", "4", "--clip", "0.1", "--out", "pictures/privacy.png")
    assert Path("pictures/privacy.png").read_bytes()[:4] == b"\x89PNG"
    assert "picture  pictures/privacy.png" in out
    assert "train    dbcl train --preset private --epsilon 4 --clip 0.1\n" in out
    with pytest.raises(ConfigError, match="--out is a folder"):
        invoke("privacy", "--out", "pictures")


def test_too_few_clients_are_told_of_the_other_unit_and_not_sent_to_train(invoke: Invoke) -> None:
    out = words(invoke("privacy", "--preset", "private", "--clients", "10", "--fraction", "1"))
    assert "10 clients in a round are too few to hide one of them. The remedy: one example as the unit" in out
    assert "dbcl train" not in out
    assert json.loads(invoke("privacy", "--preset", "private", "--clients", "10", "--json"))["useful"] is False
    with pytest.raises(ConfigError, match=r"too few to hide one of them. The remedy: one example as the unit"):
        invoke("train", "--preset", "private", "--clients", "10")
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--preset", "blind"],
            "these settings have no guarantee: give `epsilon` and `clip`, or take the preset private",
        ),
        (["--preset", "private", "--delta", "0.01"], "delta must be below 1 / 1000 (clients)"),
        (["--epsilon", "0"], "epsilon must be above 0"),
        (["--clip", "-1"], "clip must be above 0"),
        (
            ["--preset", "private", "--privacy-unit", "example"],
            "with `privacy_unit=example` clients take one step a round",
        ),
        (["--preset", "private-example", "--data", "mine:make"], "data of your own give `examples`"),
        (["nowhere"], "nowhere holds no run"),
        (["nowhere", "--epsilon", "8", "--out", "x.png"], "--epsilon, --out: for a run that is planned, and nowhere"),
        (["nowhere", "--examples", "8"], "--examples: for a run that is planned, and nowhere"),
    ],
)
def test_what_cannot_be_promised_is_one_clear_error(invoke: Invoke, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        invoke("privacy", *arguments)
    assert message in str(caught.value)


def test_train_says_what_is_promised_spent_and_secret(invoke: Invoke) -> None:
    out = invoke(*TRAIN, "--out", "run")
    said = words(out)
    config = preset("private", clients=40, fraction=0.25, delta=1e-3, epsilon=50.0, clip=0.05, rounds=6)
    plan = privacy_plan(config)
    assert plan is not None
    for sentence in (
        "of the weights averaged over about 20 rounds",
        "guarantee epsilon 50, delta 0.001 for one client; spent so far: epsilon 50",
        "model.safetensors is the mean of noisy models, which the guarantee covers",
        "checkpoints/ hold the clean W, which it does not: keep them secret",
        "server checks 1 update or more; norms clipped to 0.05",
        "The budget is spent: this run cannot go on.",
    ):
        assert sentence in said
    assert "veil" not in said
    assert "nan" not in said.lower()
    assert "--resume" not in said  # it would be refused
    server = checkpoint.load(Path("run/checkpoints")).part("server")
    weights, mean = server.part("weights").part("model"), server.part("mean")
    for name, tensor in safetensors.torch.load_file("run/model.safetensors").items():
        assert not torch.equal(tensor, weights.tensors[name])
        assert torch.equal(tensor, mean.tensors[name])
    with pytest.raises(ConfigError, match="the budget of this run is 6 rounds at epsilon 50: it cannot go on past"):
        invoke("train", "--resume", "run", "--rounds", "12")
    spent = words(invoke("privacy", "run"))
    assert f"promised epsilon 50 at delta 0.001 (mu {plan.mu:.4g}) for one client" in spent
    assert f"spent epsilon 50 at delta 0.001 (mu {plan.mu:.4g})" in spent
    assert "rounds 6 of 6 " in spent
    assert "participations 2 of one client at most, of 2" in spent
    assert plan.promise in spent
    assert "keep them secret" in spent
    assert "--target" not in spent


def test_a_run_that_stops_early_has_spent_less_and_may_go_on(invoke: Invoke) -> None:
    out = words(invoke(*TRAIN, "--patience", "1", "--target", "0.0001", "--out", "run"))
    assert "dbcl train --resume run --target 1 --patience 2" in out
    facts = json.loads(invoke("privacy", "run", "--json"))["guarantee"]
    assert (facts["holds"], facts["rounds"], facts["planned_rounds"]) == (True, 1, 6)
    assert (facts["most_participations"], facts["planned_participations"]) == (1, 2)
    assert 0 < facts["spent_epsilon"] < facts["epsilon"]
    assert "for a reason that does not depend on its data" in facts["spent_caveat"]
    assert (
        f"spent so far: epsilon {facts['spent_epsilon']:.3g} (but 50 counts: what it showed decided when to stop)"
        in out
    )
    assert "as by `target` or `patience`, the whole budget is spent" in words(invoke("privacy", "run"))
    report = json.loads(invoke("train", "--resume", "run", "--target", "1", "--patience", "9", "--json"))
    assert (report["rounds"], report["stopped_by"]) == (6, "rounds")
    assert report["guarantee"]["spent_epsilon"] == pytest.approx(50)
    assert math.isfinite(report["accuracy"])


def test_a_seed_takes_the_guarantee_away(invoke: Invoke) -> None:
    out = words(invoke(*TRAIN, "--rounds", "2", "--seed", "3", "--out", "run"))
    assert "guarantee none: --seed fixes its noise, and anyone who knows or guesses the seed can take that off" in out
    assert "spent" not in out.replace("The budget is spent", "")
    assert "covers" not in out
    assert json.loads(invoke("privacy", "run", "--json"))["guarantee"]["holds"] is False
    assert "This run has no guarantee: --seed fixes its noise" in words(invoke("privacy", "run"))


def test_a_run_without_epsilon_has_no_guarantee(invoke: Invoke) -> None:
    report = json.loads(
        invoke(
            "train", "--preset", "blind", "--fraction", "0.03", "--rounds", "1", "--seed", "0", "--out", "run", "--json"
        )
    )
    assert report["guarantee"] is None
    assert "run has no guarantee: it was trained without --epsilon." in invoke("privacy", "run")
    assert json.loads(invoke("privacy", "run", "--json")) == {"run": "run", "guarantee": None}


def test_plan_shows_the_noise_of_a_preset_with_a_guarantee(invoke: Invoke) -> None:
    facts = json.loads(invoke("plan", "mnist-mlp", "--preset", "private", "--json"))
    assert {row["veil"] for row in facts["tensors"]} == {"0.93"}
    assert facts["unprotected"] == []
    facts = json.loads(invoke("plan", "scatter-linear", "--preset", "private-example", "--examples", "8000", "--json"))
    config = planned(preset("private-example"), examples=8000, values=39_700)
    plan = privacy_plan(config, 8000, 39_700)
    assert plan is not None
    size = weight_scale(networks.build("scatter-linear", shape=(81, 7, 7)), plan)
    assert {float(row["veil"]) for row in facts["tensors"]} == {float(f"{plan.relative(size):.3g}")}
    assert "all of it carries the noise" in invoke("plan", "scatter-linear", "--preset", "guaranteed")


def test_examples_and_parties_decide_the_plan_and_the_accuracy_to_expect(invoke: Invoke) -> None:
    out = words(invoke("privacy", "--out", "p.png"))
    for sentence in (
        "epsilon 2 at delta 1e-05 for every example, nobody is trusted",
        "10 with 400 examples each, of whom 2 may collude with the server",
        "60; 4,000 of 4,000 examples in each",
        "about 1.9 points of accuracy",
        "up to 2 colluding clients and everyone who gets the model",
        "train dbcl train --preset guaranteed",
    ):
        assert sentence in out
    assert Path("p.png").read_bytes()[:4] == b"\x89PNG"
    out = invoke("privacy", "--preset", "private-example", "--data", "digits", "--data-dir", "here")
    assert "train    dbcl train --preset private-example --data digits --data-dir here\n" in out
    facts = json.loads(invoke("privacy", "--examples", "60000", "--clients", "5", "--epsilon", "1", "--json"))
    config = planned(preset("guaranteed", clients=5, epsilon=1.0), examples=60_000, values=39_700)
    plan = privacy_plan(config, 60_000, 39_700)
    assert plan is not None
    assert (facts["rounds"], facts["batch"], facts["noise"]) == (plan.rounds, 6000, plan.noise)
    losses = {(row["epsilon"], row["noise_by"]): row["loss"] for row in facts["forecast"]}
    assert losses[0.5, "clients"] > losses[1, "clients"] > losses[1, "server"] > losses[8, "server"]


def test_too_few_examples_are_told_of_the_choices_and_not_sent_to_train(invoke: Invoke) -> None:
    out = words(invoke("privacy", "--examples", "200"))
    assert "a preset without a guarantee, such as blind" in out
    assert "dbcl train" not in out
    assert json.loads(invoke("privacy", "--examples", "200", "--json"))["useful"] is False


def test_with_adam_the_noise_is_in_the_updates_and_the_command_says_what_that_costs(invoke: Invoke) -> None:
    adam = ["--server-optimizer", "adam", "--weight-cap", "90"]
    plan = privacy_plan(preset("private", server_optimizer="adam", weight_cap=90))
    assert plan is not None
    out = words(invoke("privacy", "--preset", "private", *adam))
    assert f"noise on an update {plan.noise:.4g} on each of 199,210 numbers of mnist-mlp" in out
    assert "average update is at most 0.2 long" in out
    assert "W itself carries it, and clients see W as it is. How much of it reaches W is not known ahead" in out
    assert "they count by their examples, 90 and more as one" in out
    out = words(invoke(*TRAIN, *adam, "--out", "run"))
    assert "on every number of an average update, before the server's optimiser" in out
    assert "checkpoints/ hold the noise of the last rounds, which it does not: keep them secret" in out
    assert "times the initial weights" not in out
    spent = words(invoke("privacy", "run"))
    assert "spent epsilon 50 at delta 0.001" in spent
    assert "hold the noise of the last rounds" in spent


@pytest.mark.parametrize("unit", ["client", "example"])
def test_an_update_that_is_no_number_counts_as_none_out_of_sight(invoke: Invoke, unit: str) -> None:
    """Of the first client, whose examples hold NaN: what a run with a guarantee says must not depend on them."""
    Path("sick.py").write_text(SICK)
    preset = TRAIN if unit == "client" else ["train", "--preset", "private-example", "--epsilon", "50", "--rounds", "3"]
    more = ["--data", "sick:make", "--model", "sick:net", "--delta", "1e-3", "--fraction", "1", "--rounds", "1"]
    out = invoke(*preset, *more, "--out", "run")
    assert "refused" not in words(out)
    (line,) = Path("run/metrics.jsonl").read_text().splitlines()
    assert (json.loads(line)["accepted"], len(json.loads(line)["refused"])) == (10, 0)


@pytest.mark.parametrize("model", ["zeros", "residual", "frozen"])
def test_own_models_train_with_a_guarantee_for_one_example(invoke: Invoke, model: str) -> None:
    """Weights that begin at 0, layers that are not in a row, and some that are not trained."""
    Path("own.py").write_text(OWN)
    more = ["--data", "own:make", "--model", f"own:{model}", "--epsilon", "50", "--delta", "1e-4", "--rounds", "3"]
    assert "epsilon 50" in words(invoke("train", "--preset", "private-example", *more, "--out", "run"))
    said = json.loads(invoke("privacy", "run", "--json"))["guarantee"]
    assert (said["spent_epsilon"], said["spent_caveat"]) == (pytest.approx(50), "")


OWN = """
import torch
from torch import nn

def make():
    y = torch.arange(400) % 2
    x = torch.randn(400, 8) + y[:, None]
    return [(x[:200], y[:200]), (x[200:], y[200:])], (x, y)

def zeros():
    net = nn.Linear(8, 2)
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    return net

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(x + torch.relu(self.first(x)))

def residual():
    return Residual()

def frozen():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    net[0].requires_grad_(False)
    return net
"""

SICK = """
import torch
from torch import nn

def make():
    parts = [(torch.randn(20, 8), torch.arange(20) % 2) for _ in range(10)]
    parts[0][0][:] = float("nan")
    return parts, (torch.randn(20, 8), torch.arange(20) % 2)

def net():
    return nn.Sequential(nn.Linear(8, 2))
"""
