"""A server that sees only sums: the weights of a run without it, up to rounding, and nothing but sums."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dbcl
from dbcl.engines import Engine, LocalEngine, LocalTraining, StackedEngine
from dbcl.engines.cohort import fixed_batch
from dbcl.engines.secure import SecureServer
from dbcl.errors import ConfigError, ProtocolError
from dbcl.privacy import PrivacyPlan
from dbcl.protocol import Update
from dbcl.protocol.secagg import SecAggConfig, SecureRounds, SumHistory, WeightedMean
from dbcl.protocol.secagg.quantizer import Quantizer
from dbcl.protocol.secagg.vectors import shaped
from dbcl.simulation import RunConfig
from dbcl.simulation.build import secagg_config
from dbcl.testing.nested import nested
from dbcl.transcripts import Recorder, Setting, Transcript

SEED = bytes(range(32))
CONFIG = SecAggConfig(clip=4.0, weight_cap=12, min_cohort=4)
FREE = dbcl.protocol.UpdateValidator(max_influence=None, outlier_factor=None)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def clients(count: int = 16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    sizes = [10 + number % 3 for number in range(count)]  # unequal on purpose
    return [(torch.randn(n, 10, generator=generator, dtype=torch.float64), torch.arange(n) % 3) for n in sizes]


def settings(**more: Any) -> dict[str, Any]:
    return nested({"coverage": "hidden", "insecure_seed": 0, "validator": FREE, **more})


def unprotected(**more: Any) -> dbcl.Server:
    """A server that sees every update, with the lanes of one that sees only sums."""
    return dbcl.Server(net(), **settings(**{"steady_lanes": True, **more}))


def secure(config: SecAggConfig = CONFIG, masked: bool = True, **more: Any) -> SecureServer:
    return SecureServer(net(), secagg=config, masked=masked, rounding_seed=SEED, **settings(**more))


def engine(server: dbcl.Server, kind: type[Engine] = LocalEngine, fraction: float = 0.5) -> Engine:
    made = kind(server, net(), clients(), LocalTraining(lr=0.1), fraction=fraction, seed=SEED)
    made.in_batches = True
    return made


def flat(server: dbcl.Server) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in server.weights().values()])


@pytest.mark.parametrize("lanes", [1, 2])
def test_masked_and_simulated_sums_are_the_same_numbers(lanes: int) -> None:
    ends, sent = [], []
    for kind, masked in ((LocalEngine, True), (LocalEngine, False), (StackedEngine, False)):
        server = secure(masked=masked, lanes=lanes)
        played = engine(server, kind)
        results = [played.play_round() for _ in range(3)]
        assert [result.report.lanes for result in results] == [(8,) if lanes == 1 else (4, 4)] * 3
        ends.append(flat(server))
        sent.append((results[-1].bytes_down, results[-1].bytes_up))
    assert torch.equal(ends[0], ends[1])
    torch.testing.assert_close(ends[0], ends[2], rtol=0, atol=1e-12)
    assert sent[0] == pytest.approx(sent[1], rel=1e-3)  # counted on the messages of one client of each group


@pytest.mark.parametrize("lanes", [1, 2])
def test_the_weights_are_those_in_the_clear_up_to_rounding(lanes: int) -> None:
    """Each value is off by less than a step, and a mean of n such by a step over the sum of the weights."""
    hidden, clear = secure(lanes=lanes), unprotected(lanes=lanes)
    for server in (hidden, clear):
        engine(server).play_round()
    names = [f"client {client}" for client in fixed_batch(16, 0.5, seed=SEED, round=0)]
    weights = [len(clients()[int(name.split()[1])][0]) / CONFIG.weight_cap for name in names]
    step, weight_error = Quantizer(CONFIG.clip, 8).step, 1 / ((1 << 15) - 1)
    # A lifted value is a sum over at most `ratio` lanes of one value each, with a sign; weights are rounded up as well.
    bound = lanes * (len(names) * step / sum(weights) + 2 * weight_error * CONFIG.clip)
    moved = flat(clear) - torch.cat([parameter.detach().flatten() for parameter in net().parameters()])
    assert float((flat(hidden) - flat(clear)).abs().max()) < bound
    assert float(moved.abs().max()) > 20 * step  # or the bound would say nothing


def test_a_bound_clips_every_update() -> None:
    server = secure(replace(CONFIG, clip=0.01), lanes=1)
    report = engine(server).play_round().report
    assert report.norm <= Quantizer(0.01, 8).longest(len(flat(server))) * (1 + 1e-9)
    assert (report.examples, report.metrics, report.clipped) == (0, {}, 0)  # nobody sees them


# Who is lost, and what that does


def answers(server: SecureServer, names: list[str], bad: str = "") -> dict[str, Update]:
    made = {}
    for name in names:
        broadcast = server.open_round(name)
        value = math.nan if name == bad else 0.01
        tensors = {key: torch.full_like(tensor, value) for key, tensor in broadcast.tensors.items()}
        made[name] = Update(server.round, broadcast.plan.digest, tensors, 6)
    return made


NAMES = [f"client {number}" for number in range(8)]
WITHOUT_3 = [name for name in NAMES if name != "client 3"]


@pytest.mark.parametrize("masked", [True, False])
def test_a_client_without_a_finite_update_adds_zeros(masked: bool, caplog: pytest.LogCaptureFixture) -> None:
    """If it left, its group would add up without it from then on, or not at all. No log tells of it."""
    server = secure(lanes=1, masked=masked)
    with caplog.at_level("DEBUG"):
        report = server.close_round(answers(server, NAMES, bad="client 3"))
    assert caplog.text == ""
    assert (report.accepted, report.refused) == (8, ())
    moved = flat(server) - torch.cat([parameter.flatten() for parameter in net().parameters()])
    assert torch.isfinite(moved).all()


def transposed(update: Update) -> Update:
    return replace(update, tensors={**update.tensors, "0.weight": update.tensors["0.weight"].T})


MALFORMED: dict[str, Callable[[Update], Any]] = {
    "no tensor": lambda own: replace(own, tensors={}),
    "a further tensor": lambda own: replace(own, tensors={**own.tensors, "more": torch.zeros(1)}),
    "a transposed tensor": transposed,
    "single precision": lambda own: replace(own, tensors={name: each.float() for name, each in own.tensors.items()}),
    "another round": lambda own: replace(own, round=7),
    "another plan": lambda own: replace(own, plan="ab" * 32),
    "examples that are no number": lambda own: replace(own, examples="many"),
    "examples that are no whole number": lambda own: replace(own, examples=5.5),
    "no tensors": lambda own: replace(own, tensors=None),  # type: ignore[arg-type]
    "lists": lambda own: replace(own, tensors={name: each.tolist() for name, each in own.tensors.items()}),
    "sparse tensors": lambda own: replace(own, tensors={name: each.to_sparse() for name, each in own.tensors.items()}),
    "tensors without values": lambda own: replace(own, tensors={n: each.to("meta") for n, each in own.tensors.items()}),
    "no update": lambda own: 3,
    "no bytes of an update": lambda own: b"DBCL",
}


SHARES = PrivacyPlan(
    epsilon=8, delta=1e-4, clip=0.2, unit="example", noise_by="clients", correlation="independent", fewest=6,
    colluders=1, rounds=4, separation=2, clients=8, cohort=8, examples=200, batch=100, values=115,
)  # fmt: skip
"""Silos that add shares of noise to sums of clipped gradients in float64."""


def silos(masked: bool = True, plan: PrivacyPlan = SHARES) -> SecureServer:
    return SecureServer(net(), privacy=plan, masked=masked, rounding_seed=SEED)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("what", MALFORMED)
def test_an_update_of_another_form_is_left_out_by_name(what: str, noise: bool, masked: bool) -> None:
    server = silos(masked) if noise else secure(lanes=1, masked=masked)
    made: dict[str, Any] = answers(server, NAMES)
    made["client 3"] = MALFORMED[what](made["client 3"])
    report = server.close_round(made)
    assert (report.accepted, len(report.refused)) == (7, 1)
    assert report.refused[0].startswith("client 3: ")


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_an_update_counts_in_any_kind_of_bytes(kind: Callable[[bytes], Any], masked: bool) -> None:
    ends = []
    for encoded in (False, True):
        server = secure(lanes=1, masked=masked)
        made: dict[str, Any] = answers(server, NAMES)
        if encoded:
            made = {name: kind(dbcl.encode(update)) for name, update in made.items()}
        server.close_round(made)
        ends.append(flat(server))
    assert torch.equal(*ends)


@pytest.mark.parametrize("masked", [True, False])
def test_no_sum_of_fewer_than_the_smallest_cohort_is_made(masked: bool) -> None:
    server = secure(replace(CONFIG, min_cohort=7), lanes=1, masked=masked)
    made: dict[str, Any] = answers(server, NAMES)
    for name in NAMES[:2]:
        made[name] = transposed(made[name])
    with pytest.raises(ProtocolError, match="no sum could be made"):
        server.close_round(made)
    assert server.round == 0


@pytest.mark.parametrize("masked", [True, False])
def test_a_sum_that_would_show_one_client_alone_is_not_made(masked: bool) -> None:
    server = secure(lanes=1, masked=masked)
    server.close_round(answers(server, NAMES))
    before = flat(server)
    with pytest.raises(ProtocolError, match="adds up with client 3 only"):
        server.close_round(answers(server, WITHOUT_3))
    assert torch.equal(flat(server), before)
    assert server.round == 1
    assert server.close_round(answers(server, NAMES)).accepted == 8  # the round goes on with all of them


def test_of_two_lanes_the_one_that_is_whole_counts() -> None:
    server = secure(replace(CONFIG, min_cohort=3), lanes=2)
    server.close_round(answers(server, NAMES))
    made = answers(server, NAMES)
    del made["client 3"]
    report = server.close_round(made)
    assert sorted(report.lanes) == [0, 4]
    assert any("adds up with client 3 only" in reason for reason in report.refused)


def test_too_few_clients_are_refused_before_anything_is_sent() -> None:
    server = secure(lanes=2)
    with pytest.raises(ProtocolError, match="a lane has 3 clients that were in no sum before, and 4 are the fewest"):
        server.close_round(answers(server, NAMES[:6]))
    assert server.round == 0


def test_lanes_are_groups_that_stay_together() -> None:
    server = secure(lanes=2)
    groups = set()
    for _ in range(6):
        server.close_round(answers(server, NAMES))
        groups |= {total.members for _, total in server.rounds.totals}
    assert groups == {tuple(NAMES[::2]), tuple(NAMES[1::2])}
    with pytest.raises(ConfigError, match="make it with steady_lanes=True"):
        SecureRounds(unprotected(steady_lanes=False), CONFIG)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {
                "privacy": PrivacyPlan(epsilon=8, delta=1e-5, clip=4.0, rounds=4, clients=16, cohort=8),
                "insecure_seed": None,
            },
            "rounding may stretch an update of norm 4 to 4.0",
        ),
    ],
)
def test_servers_that_cannot_add_securely(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        secure(**change)


def test_statistics_that_clients_measure_have_no_bound() -> None:
    model = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(ConfigError, match="use a normalisation without running statistics"):
        SecureServer(model, dbcl.SketchConfig(coverage="hidden"), secagg=CONFIG, calibration=torch.ones(4, 10))


def test_with_a_guarantee_the_sum_is_divided_by_the_planned_cohort() -> None:
    plan = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.5, rounds=4, clients=16, cohort=8)
    server = secure(SecAggConfig(clip=0.499, min_cohort=4), privacy=plan, lanes=1)
    start = flat(server)
    report = server.close_round(answers(server, WITHOUT_3))
    assert report.accepted == 7
    one = 0.01 * math.sqrt(sum(math.prod(part.sent_shape) for part in server.rounds.totals[0][0].tensors))
    assert float((flat(server) - start).norm()) == pytest.approx(7 / 8 * one, rel=0.01)
    tracker = server.keeper.tracker
    assert tracker is not None
    assert (tracker.uses("client 0"), tracker.uses("client 3")) == (1, 0)


@dataclass(frozen=True)
class Parks(WeightedMean):
    """A bad client, whose words move every coordinate of the sum to one place in the ring."""

    place: int = 0

    def words(self, vector: Any, examples: int, clients: int, rng: np.random.Generator | None = None) -> Any:
        words = super().words(vector, examples, clients, rng)
        words[:-1] = self.place & int(Quantizer(self.config.clip, clients).mask)
        return words


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("off", [-1, 0, 1])
@pytest.mark.parametrize("place", ["half the ring", "where the fold begins"])
def test_a_bad_client_does_not_make_another_one_count_for_more(place: str, off: int, masked: bool) -> None:
    """At half the ring a sum wraps around: a victim at its clip would move W by 15 times clip / cohort."""
    plan = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.5, rounds=4, clients=16, cohort=8)
    config = SecAggConfig(clip=0.4995, min_cohort=4)
    ring = Quantizer(config.clip, plan.cohort)
    parked = off + (1 << (ring.bits - 1) if place == "half the ring" else ring.largest)
    ends = []
    for value in (0.0, config.clip):
        server = secure(config, masked=masked, privacy=plan, lanes=1)
        made = {
            name: replace(own, tensors={n: 0 * t for n, t in own.tensors.items()})
            for name, own in answers(server, NAMES).items()
        }
        count = sum(tensor.numel() for tensor in made["client 0"].tensors.values())
        victim = {name: tensor + value / math.sqrt(count) for name, tensor in made["client 0"].tensors.items()}
        made["client 0"] = replace(made["client 0"], tensors=victim)
        server.client("client 7").encoding = Parks(config, parked)
        report = server.close_round(made)
        assert (report.accepted, report.refused) == (8, ())
        ends.append(flat(server))
    assert float((ends[1] - ends[0]).norm()) <= plan.clip / plan.cohort * 1.001


# Going on, and what is recorded


def test_a_run_that_goes_on_remembers_who_was_in_which_sum() -> None:
    ends = []
    for stops in (False, True):
        server = secure(lanes=1)
        for _ in range(3):
            server.close_round(answers(server, NAMES))
            if stops:
                state, server = server.state(), secure(lanes=1)
                server.load_state(state)
        with pytest.raises(ProtocolError, match="adds up with client 3 only"):
            server.close_round(answers(server, WITHOUT_3))
        ends.append(flat(server))
    assert torch.equal(*ends)
    with pytest.raises(ProtocolError, match="a run without secure aggregation"):
        secure().load_state(unprotected().state())
    with pytest.raises(ProtocolError, match="of another kind of server"):
        unprotected().load_state(secure().state())


def test_the_server_records_the_rounded_sums(tmp_path: Path) -> None:
    server = secure(lanes=1)
    played = engine(server)
    setting = Setting("net", (1, 1, 10), 3, LocalTraining().settings(), clients=16, cohort=8)
    played.observer = Recorder(tmp_path, ["server-sum"], server, setting)
    played.play_round()
    seen = Transcript(tmp_path / "server-sum")[0].updates
    assert list(seen) == ["sum"]
    plan, total = server.rounds.totals[0]
    for name, tensor in shaped(plan, total.values / total.weight).items():
        torch.testing.assert_close(seen["sum"].tensors[name].double(), tensor, rtol=1e-6, atol=1e-9)
    steps = total.values / Quantizer(CONFIG.clip, 8).step
    assert np.abs(steps - steps.round()).max() < 1e-6


@pytest.mark.parametrize("masked", [True, False])
def test_the_servers_transcript_holds_no_single_update(masked: bool, tmp_path: Path) -> None:
    server = secure(lanes=2, masked=masked)
    played = engine(server)
    setting = Setting("net", (1, 1, 10), 3, LocalTraining().settings(), clients=16, cohort=8)
    played.observer = Recorder(tmp_path, ["server", "server-sum"], server, setting)
    played.play_round()
    for party in ("server", "server-sum"):
        assert len(Transcript(tmp_path / party)[0].updates) == 2  # a sum for each lane


def test_updates_must_have_senders() -> None:
    server = secure(lanes=1)
    with pytest.raises(ProtocolError, match="give the updates by their senders"):
        server.close_round(list(answers(server, NAMES).values()))


def test_batches_are_fixed_and_all_come_as_often() -> None:
    seen = [tuple(fixed_batch(100, 0.16, seed=SEED, round=round)) for round in range(12)]
    assert sorted(client for batch in set(seen) for client in batch) == list(range(100))
    assert {len(batch) for batch in seen} <= {16, 17}
    assert all(seen.count(batch) == 2 for batch in seen)
    history = SumHistory()
    for batch in seen:
        history.add([str(client) for client in batch])


@pytest.mark.parametrize("seed", [SEED, None], ids=["fixed", "fresh"])
@pytest.mark.parametrize("masked", [True, False])
def test_every_simulated_silo_adds_noise_of_its_own(masked: bool, seed: bytes | None) -> None:
    """Without that of one of eight the sum would have 6 % less, and with the same noise of all 183 % more."""
    model, count = nn.Linear(8000, 1, bias=False).double(), 8000
    plan = replace(SHARES, values=count)
    server = SecureServer(model, privacy=plan, masked=masked, rounding_seed=seed)
    for round in range(2):
        zeros = {"weight": torch.zeros(1, count, dtype=torch.float64)}
        sent = {name: server.open_round(name).plan.digest for name in NAMES}
        server.close_round({name: Update(round, plan_digest, zeros, 1) for name, plan_digest in sent.items()})
        ((_, total),) = server.rounds.totals
        noise = plan.shares.scale * math.sqrt(len(NAMES)) * plan.clip / plan.shares.steps
        assert float(total.values.std()) == pytest.approx(noise, rel=5 / math.sqrt(2 * count))


# Settings


def test_settings_of_secure_aggregation() -> None:
    assert secagg_config(RunConfig(), lanes=2, largest=6, values=10) is None
    config = RunConfig.from_options(secure_aggregation=True, fraction=0.2)
    made = secagg_config(config, lanes=2, largest=600, values=10)
    assert made == SecAggConfig(clip=4.0, weight_cap=600, min_cohort=8)
    with pytest.raises(
        ConfigError, match=r"in each of 2 lanes, and a round has 10 of 100: the remedy is `fraction=0.16`"
    ):
        secagg_config(config.with_options(fraction=None), lanes=2, largest=600, values=10)
    with pytest.raises(ConfigError, match="the remedy is `clients=16` with `fraction=1`"):
        secagg_config(config.with_options(clients=10, fraction=1.0), lanes=2, largest=600, values=10)
    guarantee = {"epsilon": 8.0, "clip": 0.2}
    private = secagg_config(config.with_options(clients=1000, **guarantee), lanes=1, largest=60, values=178_110)
    assert private is not None
    assert Quantizer(private.clip, 64).longest(178_110) == pytest.approx(0.2)
    assert private.weight_cap == 1
    with pytest.raises(ConfigError, match="must be a multiple"):
        config.with_options(clients=1001, **guarantee)
