"""Runs with a guarantee: the engines agree, a run that goes on is the whole run, and what it leaves in its folder."""

import dataclasses
import json
import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import dbcl
from dbcl.data import examples_of
from dbcl.engines import Engine, LocalEngine, LocalTraining, StackedEngine
from dbcl.errors import ConfigError, ProtocolError
from dbcl.privacy import PrivacyPlan, UpdateNoise
from dbcl.protocol import checkpoint
from dbcl.simulation import Run, RunConfig
from dbcl.testing.engine import SEED, net

CLIENTS = 6
PLAN = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.1, rounds=6, clients=CLIENTS, cohort=2)


def examples(client: int) -> Any:
    generator = torch.Generator().manual_seed(client)
    count = 6 + 3 * client
    return examples_of((torch.randn(count, 10, dtype=torch.float64, generator=generator), torch.arange(count) % 3))


def played(
    kind: type[Engine], *, rounds: int = PLAN.rounds, clip: float = PLAN.clip, in_turns: bool = True, **more: Any
) -> dbcl.Server:
    torch.manual_seed(1)
    sketch = dbcl.SketchConfig(coverage="hidden", **more)
    server = dbcl.Server(net(), sketch, privacy=PLAN, insecure_seed=0, ema_decay=0.5)
    own, training = [examples(client) for client in range(CLIENTS)], LocalTraining(lr=0.3, batch_size=4, epochs=2)
    engine = kind(server, net(), own, training, fraction=1 / 3, seed=SEED, noise=UpdateNoise(clip), in_turns=in_turns)
    for _ in range(rounds):
        engine.play_round()
    return server


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().flatten() for _, tensor in tensors])


@pytest.mark.parametrize("kind", [{"lanes": 1}, {"lanes": 2}])
def test_the_engines_give_the_same_weights(kind: dict[str, Any]) -> None:
    ours, reference = played(StackedEngine, **kind), played(LocalEngine, **kind)
    weights = [flat(server.weights().items()) for server in (ours, reference)]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-10)
    torch.testing.assert_close(
        flat(ours.released.named_parameters()), flat(reference.released.named_parameters()), rtol=0, atol=PLAN.grid
    )
    assert ours.keeper.tracker.state() == reference.keeper.tracker.state()
    assert {ours.keeper.tracker.uses(f"client {client}") for client in range(CLIENTS)} == {2}


def test_the_engines_agree_where_clients_come_back_too_early() -> None:
    ours, reference = (played(kind, rounds=3, in_turns=False) for kind in (StackedEngine, LocalEngine))
    weights = [flat(server.weights().items()) for server in (ours, reference)]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-10)
    uses = {client: count for client, (count, _) in reference.keeper.tracker.state().values["uses"].items()}
    assert max(uses.values()) == 1
    assert sum(uses.values()) < 6  # drawn anew, somebody was refused
    assert ours.keeper.tracker.state() == reference.keeper.tracker.state()


OF_EXAMPLES = PrivacyPlan(
    epsilon=8, delta=1e-5, clip=0.03, unit="example", rounds=6, separation=2, clients=CLIENTS, cohort=CLIENTS,
    examples=200, batch=100,
)  # fmt: skip
STEPS = LocalTraining(lr=0.3, batch_size=4)
STEP = LocalTraining(lr=0.3, steps=1, example_clip=0.1, separation=2)


@pytest.mark.parametrize("kind", [LocalEngine, StackedEngine])
@pytest.mark.parametrize(
    ("plan", "training"),
    [(PLAN, STEPS), (dataclasses.replace(PLAN, weight_cap=9), STEPS), (OF_EXAMPLES, STEP)],
    ids=["clients", "clients with a cap", "examples"],
)
def test_neither_bytes_nor_counts_tell_of_data(kind: type[Engine], plan: PrivacyPlan, training: LocalTraining) -> None:
    """Losses of other lengths in digits, a client of other size, one whose data are no numbers: nothing changes.

    If one example is the unit, the sizes of the clients' data sets are public.
    """
    told = []
    for scale in (1.0, 1e-3, 1234.5, math.nan):
        torch.manual_seed(1)
        sketch = dbcl.SketchConfig(lanes=1, coverage="hidden")
        server = dbcl.Server(net(), sketch, privacy=plan, insecure_seed=0)
        count = 7 if scale == 1.0 and plan.unit == "client" else 120
        first = examples_of((torch.ones(count, 10).double() * scale, torch.zeros(count).long()))
        own = [first, *(examples(client) for client in range(1, CLIENTS))]
        engine = kind(server, net(), own, training, fraction=plan.cohort / plan.clients, seed=SEED)
        engine.in_turns = True
        rounds = [engine.play_round() for _ in range(3)]
        told.append(
            [(each.bytes_up, each.report.accepted, each.report.refused, each.report.examples) for each in rounds]
        )
    assert told == [told[0]] * 4


def test_the_validator_clips_where_a_client_does_not() -> None:
    honest, careless = (played(LocalEngine, rounds=3, clip=clip) for clip in (PLAN.clip, 1e6))
    weights = [flat(server.weights().items()) for server in (honest, careless)]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-10)


def small(**settings: Any) -> RunConfig:
    made = {"clients": 10, "fraction": 0.3, "seed": 0, "rounds": 6, "epsilon": 8.0, "clip": 0.05, "ema_decay": 0.9}
    return RunConfig.from_options(**{**made, **settings})


def files(folder: Path) -> dict[str, bytes]:
    kept = [*sorted(folder.glob("checkpoints/*")), folder / "model.safetensors"]
    return {path.name: path.read_bytes() for path in kept}


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("seconds", "train_loss")} for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run.start(small(), tmp_path_factory.mktemp("whole") / "run")
    assert len(list(run.play())) == 6
    return run


def test_a_run_that_goes_on_is_the_whole_run_bit_for_bit(whole: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = Run.start(small(), folder)
    rounds = first.play()
    assert len(list(islice(rounds, 3))) == 3
    rounds.close()  # as a process that ends here
    second = Run.resume(folder)
    assert second.server.keeper.tracker.most_uses == 1
    assert len(list(second.play())) == 3
    assert files(folder) == files(whole.folder)
    assert metrics(folder) == metrics(whole.folder)


@pytest.mark.parametrize("played", [0, 1, 2])
def test_a_run_with_fresh_secrets_goes_on_after_any_round(played: int, tmp_path: Path) -> None:
    rounds = Run.start(small(seed=None, rounds=3), tmp_path / "run").play()
    assert len(list(islice(rounds, played))) == played
    rounds.close()
    second = Run.resume(tmp_path / "run")
    assert second.server.round == played
    assert len(list(second.play())) == 3 - played


def test_what_is_released_is_noisy_and_the_rest_says_nothing_of_data(whole: Run) -> None:
    released = safetensors.torch.load_file(whole.folder / "model.safetensors")
    server = whole.server
    for name, tensor in server.weights().items():
        assert torch.equal(released[name], dict(whole.server.released.named_parameters())[name])
        assert float((released[name] - tensor.detach()).abs().max()) > 0.1 * whole.server.privacy.sigma
    for line in metrics(whole.folder):
        assert (line["clipped"] or 0, line["refused"], line["accepted"]) == (0, [], 3)
    for line in (whole.folder / "metrics.jsonl").read_text().splitlines():
        assert '"train_loss": NaN' in line or '"train_loss": null' in line
    modes = {path.stat().st_mode & 0o077 for path in (whole.folder / "checkpoints").iterdir()}
    assert modes == {0}


def test_a_budget_is_spent_once_and_ends(whole: Run) -> None:
    again = Run.resume(whole.folder)
    tracker = again.server.keeper.tracker
    assert tracker.state() == whole.server.keeper.tracker.state()
    assert tracker.most_uses == again.server.privacy.participations == 2
    before = files(whole.folder)
    assert list(again.play()) == []
    assert files(whole.folder) == before
    with pytest.raises(ConfigError, match="budget of this run is 6 rounds at epsilon 8: it cannot go on past them"):
        Run.resume(whole.folder, rounds=7)
    with pytest.raises(ProtocolError, match="the budget of 6 rounds is spent"):
        again.engine.play_round()


def test_a_damaged_checkpoint_ends_a_run_with_a_guarantee(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = Run.start(small(rounds=2), folder)
    rounds = run.play()
    next(rounds)
    rounds.close()
    newest = folder / "checkpoints" / "round-00000001.dbcl"
    assert checkpoint.newest(folder / "checkpoints") == 1
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(ProtocolError, match="would use a round's updates twice"):
        Run.resume(folder)


def test_a_run_goes_on_with_the_same_data_in_the_same_order_only(tmp_path: Path) -> None:
    """Reordered, an example would come back before its separation."""
    model, x, y = nn.Linear(8, 2), torch.randn(60, 8), torch.arange(60) % 2
    settings: dict[str, Any] = {"settings": "private-example", "epsilon": 50.0, "delta": 1e-3, "separation": 3}

    def trained(order: Tensor, **more: Any) -> Run:
        hospitals = [(x[order[:30]], y[order[:30]]), (x[order[30:]], y[order[30:]])]
        return dbcl.simulate(model, hospitals, (x, y), folder=tmp_path / "run", **settings, rounds=4, **more)

    order = torch.arange(60)
    assert len(trained(order, target=0.001).history) == 1
    for other in (order.flip(0), torch.cat([order[1:30], order[:1], order[30:]])):
        with pytest.raises(ProtocolError, match="not those that this run began with, or come in another order"):
            trained(other, resume=True)
    assert len(trained(order, resume=True).history) == 4


def test_the_default_gives_the_same_in_one_piece_in_two_and_by_each_engine(tmp_path: Path) -> None:
    x = torch.randn(600, 8, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()

    class Stop:
        def begin(self, folder: Path, settings: Any, round: int) -> None: ...

        def log(self, round: int, values: Any) -> None:
            if round == 2:
                raise KeyboardInterrupt

        def end(self) -> None: ...

    def trained(name: str, **more: Any) -> Run:
        return dbcl.simulate(
            lambda: nn.Linear(8, 2), (x[:500], y[:500]), (x[500:], y[500:]), clients=4, epsilon=8.0, rounds=5, seed=3,
            folder=tmp_path / name, **more,
        )  # fmt: skip

    whole = trained("whole")
    with pytest.raises(KeyboardInterrupt):
        trained("parts", trackers=[Stop()])
    for other in (trained("parts", resume=True), trained("local", engine="local")):
        assert len(other.history) == 5
        assert torch.equal(other.model.weight, whole.model.weight)
