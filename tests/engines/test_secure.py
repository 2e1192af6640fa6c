"""A server that sees only sums: the same weights as in the clear, up to rounding, and nothing but sums."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dbcl
from dbcl.engines import Engine, LocalEngine, LocalTraining, ServerSession, StackedEngine
from dbcl.engines.cohort import fixed_batch
from dbcl.engines.secure import SecureSession
from dbcl.errors import ConfigError, ProtocolError
from dbcl.privacy import PrivacyPlan
from dbcl.protocol import Update
from dbcl.protocol.secagg import Rosters, Terms
from dbcl.protocol.secagg.ring import Ring
from dbcl.protocol.secagg.rounds import shaped
from dbcl.run import RunConfig
from dbcl.transcripts import Recorder, Setting, Transcript

SEED = bytes(range(32))
TERMS = Terms(bound=4.0, most=12, min_cohort=4)
FREE = dbcl.Door(max_influence=None, max_times_median=None)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def clients(count: int = 16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    sizes = [10 + number % 3 for number in range(count)]  # unequal on purpose
    return [(torch.randn(n, 10, generator=generator, dtype=torch.float64), torch.arange(n) % 3) for n in sizes]


def server(**more: Any) -> dbcl.Server:
    return dbcl.Server(net(), **{"steady_lanes": True, "insecure_seed": 0, "door": FREE, **more})


def secure(terms: Terms = TERMS, masked: bool = True, **more: Any) -> SecureSession:
    return SecureSession(server(**more), terms, masked=masked, seed=SEED)


def engine(session: ServerSession, kind: type[Engine] = LocalEngine, fraction: float = 0.5) -> Engine:
    made = kind(session, net(), clients(), LocalTraining(lr=0.1), fraction=fraction, seed=SEED)
    made.in_batches = True
    return made


def flat(session: ServerSession) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in session.server.weights().values()])


@pytest.mark.parametrize("lanes", [1, 2])
def test_masked_and_simulated_sums_are_the_same_numbers(lanes: int) -> None:
    ends, sent = [], []
    for kind, masked in ((LocalEngine, True), (LocalEngine, False), (StackedEngine, False)):
        session = secure(masked=masked, lanes=lanes)
        played = engine(session, kind)
        results = [played.play_round() for _ in range(3)]
        assert [result.report.lanes for result in results] == [(8,) if lanes == 1 else (4, 4)] * 3
        ends.append(flat(session))
        sent.append((results[-1].bytes_down, results[-1].bytes_up))
    assert torch.equal(ends[0], ends[1])
    torch.testing.assert_close(ends[0], ends[2], rtol=0, atol=1e-12)
    assert sent[0] == pytest.approx(sent[1], rel=1e-3)  # counted on the messages of one client of each group


@pytest.mark.parametrize("lanes", [1, 2])
def test_the_weights_are_those_in_the_clear_up_to_rounding(lanes: int) -> None:
    """Each value is off by less than a step, and a mean of n such by a step over the sum of the weights."""
    hidden, clear = secure(lanes=lanes), ServerSession(server(lanes=lanes))
    for session in (hidden, clear):
        engine(session).play_round()
    names = [f"client {client}" for client in fixed_batch(16, 0.5, seed=SEED, round=0)]
    weights = [len(clients()[int(name.split()[1])][0]) / TERMS.most for name in names]
    step, weight_error = Ring(TERMS.bound, 8).step, 1 / ((1 << 15) - 1)
    # A lifted value is a sum over at most `ratio` lanes of one value each, with a sign; weights are rounded up as well.
    bound = lanes * (len(names) * step / sum(weights) + 2 * weight_error * TERMS.bound)
    moved = flat(clear) - torch.cat([parameter.detach().flatten() for parameter in net().parameters()])
    assert float((flat(hidden) - flat(clear)).abs().max()) < bound
    assert float(moved.abs().max()) > 20 * step  # or the bound would say nothing


def test_a_bound_clips_every_update() -> None:
    session = secure(replace(TERMS, bound=0.01), lanes=1)
    report = engine(session).play_round().report
    assert report.norm <= Ring(0.01, 8).longest(len(flat(session))) * (1 + 1e-9)
    assert (report.examples, report.metrics, report.clipped) == (0, {}, 0)  # nobody sees them


# Who is lost, and what that does


def answers(session: SecureSession, names: list[str], bad: str = "") -> dict[str, Update]:
    made = {}
    for name in names:
        broadcast = session.open(name)
        value = math.nan if name == bad else 0.01
        tensors = {key: torch.full_like(tensor, value) for key, tensor in broadcast.tensors.items()}
        made[name] = Update(session.round, broadcast.plan.digest, tensors, 6)
    return made


NAMES = [f"client {number}" for number in range(8)]


@pytest.mark.parametrize("masked", [True, False])
def test_a_client_without_a_finite_update_sends_nothing(masked: bool) -> None:
    session = secure(lanes=1, masked=masked)
    report = session.close(answers(session, NAMES, bad="client 3"))
    assert (report.accepted, len(report.refused)) == (7, 1)
    assert report.refused[0].startswith("client 3: ")
    moved = flat(session) - torch.cat([parameter.flatten() for parameter in net().parameters()])
    assert torch.isfinite(moved).all()


@pytest.mark.parametrize("masked", [True, False])
def test_a_sum_that_would_show_one_client_alone_is_not_made(masked: bool) -> None:
    session = secure(lanes=1, masked=masked)
    session.close(answers(session, NAMES))
    before = flat(session)
    with pytest.raises(ProtocolError, match="would show client 3 alone"):
        session.close(answers(session, NAMES, bad="client 3"))
    assert torch.equal(flat(session), before)
    assert session.round == 1
    assert session.close(answers(session, NAMES)).accepted == 8  # the round goes on with all of them


def test_of_two_lanes_the_one_that_is_whole_counts() -> None:
    session = secure(replace(TERMS, min_cohort=3), lanes=2)
    session.close(answers(session, NAMES))
    report = session.close(answers(session, NAMES, bad="client 3"))
    assert sorted(report.lanes) == [0, 4]
    assert any("would show client 3 alone" in reason for reason in report.refused)


def test_too_few_clients_are_refused_before_anything_is_sent() -> None:
    session = secure(lanes=2)
    with pytest.raises(ProtocolError, match="a lane has 3 clients, and 4 are the fewest"):
        session.close(answers(session, NAMES[:6]))
    assert session.round == 0


def test_lanes_are_groups_that_stay_together() -> None:
    session = secure(lanes=2)
    groups = set()
    for _ in range(6):
        session.close(answers(session, NAMES))
        groups |= {total.members for _, total in session.rounds.totals}
    assert groups == {tuple(NAMES[::2]), tuple(NAMES[1::2])}
    with pytest.raises(ConfigError, match="make it with steady_lanes=True"):
        secure(steady_lanes=False)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"grouped": True}, "nothing to add"),
        (
            {
                "privacy": PrivacyPlan(epsilon=8, delta=1e-5, clip=4.0, rounds=4, clients=16, cohort=8),
                "insecure_seed": None,
            },
            "rounding may stretch an update of length 4 to 4.0",
        ),
    ],
)
def test_servers_that_cannot_add_securely(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        secure(**change)


def test_statistics_that_clients_measure_have_no_bound() -> None:
    model = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(ConfigError, match="use a normalisation without running statistics"):
        SecureSession(dbcl.Server(model, steady_lanes=True), TERMS)


def test_with_a_guarantee_the_sum_is_divided_by_the_planned_cohort() -> None:
    plan = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.5, rounds=4, clients=16, cohort=8)
    own = server(privacy=plan, lanes=1)
    session = SecureSession(own, Terms(bound=0.499, min_cohort=4), seed=SEED)
    start = flat(session)
    report = session.close(answers(session, NAMES, bad="client 3"))
    assert report.accepted == 7
    one = 0.01 * math.sqrt(sum(math.prod(part.sent_shape) for part in session.rounds.totals[0][0].tensors))
    assert float((flat(session) - start).norm()) == pytest.approx(7 / 8 * one, rel=0.01)
    assert own.ledger is not None
    assert (own.ledger.uses("client 0"), own.ledger.uses("client 3")) == (1, 0)


# Going on, and what is recorded


def test_a_run_that_goes_on_remembers_who_was_in_which_sum() -> None:
    ends = []
    for stops in (False, True):
        session = secure(lanes=1)
        for _ in range(3):
            session.close(answers(session, NAMES))
            if stops:
                state, session = session.state(), secure(lanes=1)
                session.load_state(state)
        with pytest.raises(ProtocolError, match="would show client 3 alone"):
            session.close(answers(session, NAMES, bad="client 3"))
        ends.append(flat(session))
    assert torch.equal(*ends)
    with pytest.raises(ProtocolError, match="a run without secure aggregation"):
        secure().load_state(ServerSession(server()).state())


def test_the_server_records_the_rounded_sums(tmp_path: Path) -> None:
    session = secure(lanes=1)
    played = engine(session)
    setting = Setting("net", (1, 1, 10), 3, LocalTraining().settings(), clients=16, cohort=8)
    played.observer = Recorder(tmp_path, ["server-sum"], session, setting)
    played.play_round()
    seen = Transcript(tmp_path / "server-sum")[0].updates
    assert list(seen) == ["sum"]
    plan, total = session.rounds.totals[0]
    for name, tensor in shaped(plan, total.values / total.weight).items():
        torch.testing.assert_close(seen["sum"].tensors[name].double(), tensor, rtol=1e-6, atol=1e-9)
    steps = total.values / Ring(TERMS.bound, 8).step
    assert np.abs(steps - steps.round()).max() < 1e-6


def test_updates_must_have_senders() -> None:
    session = secure(lanes=1)
    with pytest.raises(ProtocolError, match="give the updates by their senders"):
        session.close(list(answers(session, NAMES).values()))


def test_batches_are_fixed_and_all_come_as_often() -> None:
    seen = [tuple(fixed_batch(100, 0.16, seed=SEED, round=round)) for round in range(12)]
    assert sorted(client for batch in set(seen) for client in batch) == list(range(100))
    assert {len(batch) for batch in seen} <= {16, 17}
    assert all(seen.count(batch) == 2 for batch in seen)
    rosters = Rosters()
    for batch in seen:
        names = [str(client) for client in batch]
        assert rosters.singled_out(names) == []
        rosters.add(names)


# Settings


def test_settings_of_secure_aggregation() -> None:
    assert RunConfig().terms(lanes=2, most=6, length=10) is None
    config = RunConfig(secure_aggregation=True, fraction=0.2)
    assert config.terms(lanes=2, most=600, length=10) == Terms(bound=4.0, most=600, min_cohort=8)
    with pytest.raises(
        ConfigError, match=r"in each of 2 lanes, and a round has 10 of 100: the remedy is --fraction 0.16"
    ):
        replace(config, fraction=None).terms(lanes=2, most=600, length=10)
    with pytest.raises(ConfigError, match="the remedy is --clients 16 --fraction 1"):
        replace(config, clients=10, fraction=1.0).terms(lanes=2, most=600, length=10)
    private = replace(config, epsilon=8.0, clip=0.2, clients=1000).terms(lanes=1, most=60, length=178_110)
    assert private is not None
    assert Ring(private.bound, 64).longest(178_110) == pytest.approx(0.2)
    assert private.most == 1
    for change, complaint in (
        ({"buckets": "grouped"}, "each is alone"),
        ({"epsilon": 8.0, "clip": 0.2, "clients": 1001}, "must be a multiple"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            replace(config, **change)


def test_without_the_extra_the_command_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['Crypto'] = None; from dbcl.__main__ import main; sys.argv = sys.argv[1:]; main()"
    command = ["dbcl", "train", "--secure-aggregation", "--fraction", "0.2", "--rounds", "1"]
    ran = subprocess.run([sys.executable, "-c", code, *command], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 2
    assert "pip install '.[secure]'" in " ".join(ran.stderr.split())
    assert "Traceback" not in ran.stderr
