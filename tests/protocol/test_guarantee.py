"""A server with a guarantee: each condition of it, and what happens when it is broken."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dbcl
import dbcl.protocol.admission
from dbcl import optim
from dbcl.engines import ServerSession
from dbcl.errors import PlanError, ProtocolError
from dbcl.privacy import CorrelatedVeil, PrivacyPlan
from dbcl.protocol import Admission, Admitted, Aggregate, Tally, checkpoint

PLAN = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.5, rounds=4, clients=8, cohort=4)
FIRST, SECOND = ["ann", "bob", "cleo", "dan"], ["eve", "fay", "gus", "hal"]


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def private(kind: type[dbcl.Server] = dbcl.Server, plan: PrivacyPlan = PLAN, **more: Any) -> dbcl.Server:
    return kind(net(), privacy=plan, insecure_seed=0, **more)


Lengths = Mapping[str, float]
"""How long a client's update is, as a multiple of the clip."""


def updates(server: dbcl.Server, lengths: Lengths, examples: Mapping[str, int] | None = None) -> dict[str, dbcl.Update]:
    """Updates of these lengths, in a direction of each client's own."""
    made = {}
    for client, length in lengths.items():
        broadcast = server.open_round(client)
        generator = torch.Generator().manual_seed(sum(client.encode()))
        drawn = {n: torch.randn(t.shape, dtype=t.dtype, generator=generator) for n, t in broadcast.tensors.items()}
        unit = PLAN.clip * length / dbcl.privacy.norm(drawn)
        count = (examples or {}).get(client, 10)
        tensors = {name: unit * each for name, each in drawn.items()}
        made[client] = dbcl.Update(server.round, broadcast.plan.digest, tensors, count, {"loss": length})
    return made


def play(server: dbcl.Server, clients: list[str], length: float = 0.5) -> dbcl.RoundReport:
    return server.close_round(updates(server, dict.fromkeys(clients, length)))


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors.values()])


def sent(server: dbcl.Server, *clients: str) -> list[bytes]:
    return [dbcl.encode(server.open_round(client)) for client in clients]


# How far one client can move the weights, whatever it and the others send


class DividesByAnswers(dbcl.Server):
    def average(self, admission: Admission) -> Aggregate:
        made = super().average(admission)
        share = PLAN.cohort / len(admission.accepted)
        return replace(made, sum={name: tensor * share for name, tensor in made.sum.items()})

    @staticmethod
    def _projected(privacy: PrivacyPlan, changes: dict[str, Tensor], *rest: Any) -> dict[str, Tensor]:
        return changes


class WeighsByExamples(dbcl.Server):
    def _admission(self, accepted: Mapping[str, Admitted], refused: Mapping[str, str]) -> Admission:
        made = super()._admission(accepted, refused)
        weighed = {who: replace(each, weight=each.update.examples / 10) for who, each in made.accepted.items()}
        return replace(made, accepted=weighed)

    @staticmethod
    def _projected(privacy: PrivacyPlan, changes: dict[str, Tensor], *rest: Any) -> dict[str, Tensor]:
        return changes


class HasNoClip(dbcl.Server):
    def _keep(self, privacy: PrivacyPlan) -> None:
        super()._keep(privacy)
        self.door = replace(self.door, norm_bound=None)

    @staticmethod
    def _projected(privacy: PrivacyPlan, changes: dict[str, Tensor], *rest: Any) -> dict[str, Tensor]:
        return changes


class RefusesOutliers(dbcl.Server):
    def _keep(self, privacy: PrivacyPlan) -> None:
        super()._keep(privacy)
        self.door = replace(self.door, max_times_median=10.0)


class BalancesInfluence(dbcl.Server):
    def _keep(self, privacy: PrivacyPlan) -> None:
        super()._keep(privacy)
        self.door = replace(self.door, max_influence=1.5)


SITUATIONS: dict[str, tuple[Lengths, Mapping[str, int]]] = {
    "all answer": ({"ann": 1.0, "bob": 0.3, "cleo": 0.1, "dan": 1.0}, {}),
    "it is the only one to answer": ({"ann": 1.0}, {}),
    "its update is long": ({"ann": 1e6, "bob": 1.0, "cleo": 1.0, "dan": 1.0}, {}),
    "it has many examples": ({"ann": 1.0, "bob": 1.0, "cleo": 1.0, "dan": 1.0}, {"ann": 1000}),
    "it moves the median": ({"ann": 1.0, "bob": 0.001, "cleo": 1.0}, {}),
}
"""Of each client its length and its examples; of ann the data are then set to zero."""
KINDS = {
    "shared": {"lanes": 1},
    "lanes": {"lanes": 2},
    "grouped": {"grouped": True},
    "plain": {"sketch": "identity-v1"},
}


def moved(kind: type[dbcl.Server], situation: str, **more: Any) -> float:
    """How far the weights of two neighbouring runs are apart after a round, in units of clip / cohort."""
    lengths, examples = SITUATIONS[situation]
    ends = []
    for length in (lengths["ann"], 0.0):
        server = private(kind, **more)
        server.close_round(updates(server, {**lengths, "ann": length}, examples))
        ends.append(flat(server.weights()))
    return float((ends[0] - ends[1]).norm()) / (PLAN.clip / PLAN.cohort)


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_client_moves_the_weights_by_its_clip_over_the_cohort(kind: str, situation: str) -> None:
    assert moved(dbcl.Server, situation, **KINDS[kind]) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize(
    ("mutant", "situation"),
    [
        (DividesByAnswers, "it is the only one to answer"),
        (WeighsByExamples, "it has many examples"),
        (HasNoClip, "its update is long"),
        (RefusesOutliers, "it moves the median"),
        (BalancesInfluence, "it moves the median"),
    ],
)
def test_a_server_that_breaks_a_condition_lets_one_client_move_more(mutant: type[dbcl.Server], situation: str) -> None:
    assert moved(mutant, situation, lanes=1) > 1.3


def test_the_clip_is_one_over_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def longest(tensors: Mapping[str, Tensor]) -> float:
        return max(float(tensor.norm()) for tensor in tensors.values())

    monkeypatch.setattr(dbcl.Server, "_projected", staticmethod(HasNoClip._projected))
    monkeypatch.setattr(dbcl.protocol.admission, "norm", longest)
    assert moved(dbcl.Server, "its update is long") > 1.1


def test_the_updates_of_a_stack_are_treated_as_one_by_one() -> None:
    lengths = {"ann": 3.0, "bob": 0.3, "cleo": 0.001}
    ends = []
    for stacked in (False, True):
        server = private(lanes=1)
        each = updates(server, lengths, {"ann": 1000})
        first = next(iter(each.values()))
        tensors = {name: torch.stack([one.tensors[name] for one in each.values()]) for name in first.tensors}
        plans, counts = tuple(one.plan for one in each.values()), tuple(one.examples for one in each.values())
        together = dbcl.protocol.UpdateStack(0, tuple(each), plans, tensors, counts, ({},) * 3)
        report = server.close_round(together if stacked else each)
        ends.append((flat(server.weights()), report.accepted, server.ledger.state()))
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=0, atol=1e-14)
    assert ends[0][1:] == ends[1][1:]


@pytest.mark.parametrize("kind", KINDS)
def test_with_nothing_to_clip_the_step_is_the_lifted_sum_over_the_planned_cohort(kind: str) -> None:
    server = private(**KINDS[kind])
    before = flat(server.weights())
    answers = updates(server, {"ann": 0.9, "bob": 0.2, "cleo": 0.4}, {"bob": 999})
    expected = torch.zeros_like(before)
    for client, update in answers.items():
        sketches = server.open_round(client).sketches()
        expected += flat(
            {name: sketches[name].lift(t) if name in sketches else t for name, t in update.tensors.items()}
        )
    server.close_round(answers)
    torch.testing.assert_close(flat(server.weights()) - before, expected / 4, rtol=0, atol=1e-14)


# What leaves


def test_a_report_tells_nothing_of_data() -> None:
    server = private()
    answers = updates(server, {"ann": 5.0, "bob": 0.2}, {"ann": 77})
    answers["bob"] = replace(answers["bob"], tensors={n: t * math.nan for n, t in answers["bob"].tensors.items()})
    report = server.close_round(answers)
    assert (report.accepted, report.clipped, report.examples, report.metrics) == (2, 0, 0, {})
    assert math.isnan(report.norm)
    assert report.refused == ()
    assert (server.ledger.uses("ann"), server.ledger.uses("bob")) == (1, 1)


SICK: dict[str, Callable[[dbcl.Update], dbcl.Update]] = {
    "NaN": lambda each: replace(each, tensors={name: tensor * math.nan for name, tensor in each.tensors.items()}),
    "infinity": lambda each: replace(each, tensors={name: tensor / 0 for name, tensor in each.tensors.items()}),
    "far too long": lambda each: replace(each, tensors={name: tensor * 1e200 for name, tensor in each.tensors.items()}),
    "no examples": lambda each: replace(each, examples=0),
    "too many examples": lambda each: replace(each, examples=10**12),
    "a metric that is no number": lambda each: replace(each, metrics={"loss": math.nan}),
}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("kind", SICK)
def test_no_value_decides_whether_an_update_counts(kind: str, stacked: bool) -> None:
    """A client whose data are set to zero is its neighbour, so nothing but the noisy weights may tell them apart."""
    reports, ends = [], []
    for sick in (SICK[kind], lambda each: each):
        server = private(lanes=1)
        answers: Any = updates(server, {"ann": 0.5, "bob": 0.2})
        answers["bob"] = sick(answers["bob"])
        if stacked:
            plans, counts = zip(*((each.plan, each.examples) for each in answers.values()), strict=True)
            tensors = {n: torch.stack([each.tensors[n] for each in answers.values()]) for n in answers["bob"].tensors}
            metrics = tuple(each.metrics for each in answers.values())
            answers = dbcl.protocol.UpdateStack(0, tuple(answers), plans, tensors, counts, metrics)
        reports.append(replace(server.close_round(answers), norm=0.0))
        ends.append(flat(server.weights()))
    assert reports[0] == reports[1]
    assert reports[0].accepted == 2
    assert float((ends[0] - ends[1]).norm()) <= PLAN.clip / PLAN.cohort * (1 + 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_all_clients_of_a_round_see_one_noisy_model_on_a_grid(kind: str) -> None:
    server = private(**KINDS[kind])
    play(server, FIRST)
    noisy = server.shown()
    for client in SECOND:
        broadcast = server.open_round(client)
        for name, tensor in broadcast.tensors.items():
            sketch = broadcast.sketches().get(name)
            assert torch.equal(tensor, noisy[name] if sketch is None else sketch.apply(noisy[name]))
    steps = flat(noisy) / PLAN.grid
    assert torch.equal(steps, steps.round())
    apart = flat(noisy) - flat(server.weights())
    assert 0.5 * PLAN.sigma < float(apart.square().mean().sqrt()) < 2 * PLAN.sigma


def test_half_precision_is_noised_in_float32_and_averaged_there() -> None:
    server = dbcl.Server(net().bfloat16(), privacy=PLAN, insecure_seed=0, lanes=1)
    session = ServerSession(server, ema_decay=0.9)
    expected = {name: tensor.clone() for name, tensor in server.weights().items()}
    for round, clients in enumerate([FIRST, SECOND]):
        session.close(updates(server, dict.fromkeys(clients, 0.5)))
        shown = server.shown()
        assert {tensor.dtype for tensor in shown.values()} == {torch.float32}
        assert torch.equal(flat(shown) / PLAN.grid, (flat(shown) / PLAN.grid).round())
        for name, mean in expected.items():
            mean.data.lerp_(shown[name], 1 - (round + 1) / (round + 11))
    for name, parameter in session.released.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, expected[name].bfloat16())


def test_frozen_parameters_hold_no_data_so_their_base_stays_what_it_is() -> None:
    def adapted() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 6).double().requires_grad_(False), *net()[1:])

    server = dbcl.Server(adapted(), send_frozen=True, cover="all", privacy=PLAN, insecure_seed=0)
    before = dbcl.encode(server.base())
    play(server, FIRST)
    assert dbcl.encode(server.base()) == before
    assert set(server.shown()) == {"2.weight", "2.bias"}


def test_the_covariance_of_what_is_released_is_the_planned_one() -> None:
    """The rows of a layer are 2,000 runs of a model with two parameters: nothing but the noise moves."""
    plan = replace(PLAN, rounds=5, clients=9, cohort=3, participations=0, separation=0, momentum=0.5, lr=0.7)
    layer = nn.Linear(2, 2000, bias=False).double()
    server = dbcl.Server(layer, sketch="identity-v1", privacy=plan, optimizer=optim.momentum(0.5, lr=0.7))
    session, start = ServerSession(server, ema_decay=0.5), layer.weight.detach().clone()
    noises, released = [server.shown()["weight"] - start], []
    for round in range(plan.rounds):
        senders = [f"{(3 * round + place) % 9}" for place in range(3)]
        session.close(updates(server, dict.fromkeys(senders, 0.0)))
        noises.append(server.shown()["weight"] - start)
        released.append(session.released.weight.detach() - start)
    seen = torch.stack(noises).reshape(6, -1).numpy()
    n, own = plan.rounds, plan.mechanism
    A, C = (np.tril(column[np.abs(np.subtract.outer(np.arange(n), np.arange(n)))]) for column in _columns(own, n))
    B = A @ np.linalg.inv(C)
    expected = np.zeros((n + 1, n + 1))
    expected[0, 0], expected[1:, 1:] = 0.7**2, B @ B.T
    found = seen @ seen.T / seen.shape[1] / plan.sigma**2
    bound = 5 * np.sqrt((expected**2 + np.outer(expected.diagonal(), expected.diagonal())) / seen.shape[1])
    assert (np.abs(found - expected) < bound).all()
    mean = np.zeros(n + 1)  # how the released model is made of what was shown
    for t in range(1, n + 1):
        decay = min(0.5, t / (t + 10))
        mean = decay * mean + (1 - decay) * np.eye(n + 1)[t]
    variance = mean @ expected @ mean
    assert float(released[-1].square().mean()) / plan.sigma**2 == pytest.approx(variance, rel=5 * math.sqrt(2 / 4000))


def _columns(own: Any, n: int) -> Iterator[np.ndarray]:
    yield np.asarray(own.workload.coefficients(n))
    yield np.asarray(own.strategy.coefficients(n))


# One noise for one W, and none twice


def reopened(server: dbcl.Server, folder: Path) -> dbcl.Server:
    """What a new process makes of the checkpoint."""
    server.save(folder)
    return dbcl.Server.load(folder, net(), privacy=PLAN)


def secure() -> dbcl.Server:
    return dbcl.Server(net(), privacy=PLAN)


@pytest.mark.parametrize("played", [0, 1, 2])
def test_a_round_that_is_opened_again_shows_the_same(played: int, tmp_path: Path) -> None:
    server = secure()
    for clients in (FIRST, SECOND)[:played]:
        play(server, clients)
    closed = reopened(server, tmp_path / "closed")
    seen = sent(server, "ann", "bob")
    assert sent(server, "ann", "bob") == seen
    assert sent(closed, "ann", "bob") == seen  # the crash was before the broadcast, and after it:
    assert sent(reopened(server, tmp_path / "open"), "ann", "bob") == seen
    server.load_state_dict(server.state_dict())
    assert sent(server, "ann", "bob") == seen


def likeness(server: dbcl.Server) -> float:
    """How much alike what two rounds add to the noise is, from the second on: the largest correlation."""
    added = []
    for round in range(PLAN.rounds):
        before = server.shown()
        play(server, (FIRST, SECOND)[round % 2], length=0.0)
        added.append(flat(server.shown()) - flat(before))
    return float(torch.corrcoef(torch.stack(added[1:])).fill_diagonal_(0).abs().max())


def test_no_noise_is_used_for_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert likeness(private()) < 0.85  # what follows another is correlated with it, as planned
    drawn = CorrelatedVeil._drawn
    monkeypatch.setattr(dbcl.Server, "_new_key", lambda *arguments: bytes(32))
    assert likeness(private()) < 0.85  # the same key in every round draws anew all the same
    monkeypatch.setattr(CorrelatedVeil, "_drawn", lambda self, key, round, *more: drawn(self, key, 0, *more))
    assert likeness(private()) > 0.99


def change(server: dbcl.Server) -> None:
    with torch.no_grad():
        server.model[0].weight.mul_(1.01)


@pytest.mark.parametrize(
    "then", [lambda server: server.open_round(), lambda server: server.state_dict(), lambda server: server.shown()]
)
@pytest.mark.parametrize("seeded", [False, True])
def test_weights_that_somebody_changes_between_rounds_are_refused(
    seeded: bool, then: Callable[[dbcl.Server], Any]
) -> None:
    server = private() if seeded else secure()
    play(server, FIRST)
    change(server)
    with pytest.raises(ProtocolError, match="somebody has changed the weights"):
        then(server)


def test_weights_that_somebody_changes_in_a_round_are_refused_when_it_closes() -> None:
    server = private()
    answers = updates(server, {"ann": 0.5})
    change(server)
    with pytest.raises(ProtocolError, match="somebody has changed the weights"):
        server.close_round(answers)
    assert server.ledger.uses("ann") == 0


def test_the_first_weights_hold_no_data_and_may_be_set() -> None:
    server = private()
    change(server)
    play(server, FIRST)
    assert server.round == 1


def test_nothing_goes_back() -> None:
    server = secure()
    early = server.state_dict()
    play(server, FIRST)
    late, other = server.state_dict(), secure()
    play(other, FIRST)
    for state in (early, other.state_dict()):
        with pytest.raises(ProtocolError, match="nothing goes back: this server is at round 1"):
            server.load_state_dict(state)
    server.load_state_dict(late)
    assert (server.round, server.ledger.uses("ann")) == (1, 1)


def test_a_damaged_checkpoint_is_not_passed_over(tmp_path: Path) -> None:
    server = secure()
    server.save(tmp_path)
    play(server, FIRST)
    newest = server.save(tmp_path)
    newest.write_bytes(newest.read_bytes()[:-9])
    with pytest.raises(ProtocolError, match=r"round-00000001.dbcl is damaged, and round-00000000.dbcl has a guarantee"):
        dbcl.Server.load(tmp_path, net(), privacy=PLAN)
    newest.unlink()
    assert dbcl.Server.load(tmp_path, net(), privacy=PLAN).round == 0
    plain = dbcl.Server(net())
    plain.save(tmp_path / "plain")
    (tmp_path / "plain" / "round-00000001.dbcl").write_bytes(b"half")
    assert checkpoint.load(tmp_path / "plain").values["round"]["number"] == 0


def test_a_guarantee_cannot_be_exchanged_under_the_same_noise() -> None:
    """Half the clip at the right epsilon needs the same noise; but what has been shown was clipped at the whole."""
    server = secure()
    play(server, FIRST)
    mu = PLAN.mu / 2
    other = replace(PLAN, clip=PLAN.clip / 2, epsilon=dbcl.privacy.epsilon_of(mu, PLAN.delta))
    assert other.sigma == pytest.approx(PLAN.sigma, rel=1e-6)
    object.__setattr__(other, "sigma", PLAN.sigma)
    with pytest.raises(ProtocolError, match="another guarantee"):
        dbcl.Server(net(), privacy=other).load_state_dict(server.state_dict())
    for one, two in ((dbcl.Server(net()), server), (secure(), dbcl.Server(net()))):
        with pytest.raises(ProtocolError, match="another guarantee"):
            one.load_state_dict(two.state_dict())


# The ledger and the budget


def test_updates_without_senders_are_refused() -> None:
    server = private()
    with pytest.raises(ProtocolError, match="counts who takes part: give the updates as a dictionary"):
        server.close_round(list(updates(server, {"ann": 0.5}).values()))
    assert server.round == 0


def test_who_comes_back_too_early_or_too_often_is_refused() -> None:
    server = private()
    play(server, FIRST)
    assert play(server, ["ann", "eve"]).refused == ("ann: took part in round 0, and may again from round 2 on",)
    assert play(server, ["ann", "eve"]).refused == ("eve: took part in round 1, and may again from round 3 on",)
    with pytest.raises(ProtocolError, match="ann: took part 2 times, which is all"):
        play(server, ["ann"])
    assert server.round == 3


@pytest.mark.parametrize("where", ["_step", "veil.end"])
def test_a_step_that_fails_spends_nothing_and_can_be_taken_again(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server, undisturbed = private(), private()
    for each in (server, undisturbed):
        play(each, FIRST)
    answers = updates(server, dict.fromkeys(SECOND, 0.5))
    seen, before = sent(server, *SECOND), server.state_dict()

    def fail(*arguments: Any) -> None:
        raise MemoryError

    def half(weights: Mapping[str, Tensor], changes: Mapping[str, Tensor]) -> None:
        step(weights, changes)
        fail()

    step = server._step
    with monkeypatch.context() as patched:
        patched.setattr(
            server if where == "_step" else server.veil, where.removeprefix("veil."), half if where == "_step" else fail
        )
        with pytest.raises(MemoryError):
            server.close_round(answers)
    after = server.state_dict()
    assert after["values"] == before["values"]
    assert all(torch.equal(after["tensors"][name], tensor) for name, tensor in before["tensors"].items())
    assert sent(server, *SECOND) == seen
    server.close_round(answers)
    play(undisturbed, SECOND)
    assert sent(server, "ann") == sent(undisturbed, "ann")
    assert server.ledger.state() == undisturbed.ledger.state()


def test_an_aggregate_of_somebodys_own_is_counted_and_bounded() -> None:
    server = private(lanes=1)
    play(server, FIRST)
    shapes = server.open_round().tensors
    before = flat(server.weights())
    ones = {name: torch.ones_like(tensor) for name, tensor in shapes.items()}
    small = {name: tensor * 1e-3 for name, tensor in ones.items()}
    for sums, tally, reason in (
        (small, Tally(), "the tally does not say so"),
        (small, Tally(senders=("ann",)), "'ann': took part in round 0, and may again from round 2 on"),
    ):
        with pytest.raises(ProtocolError, match=reason):
            server.close(Aggregate(sums, weight=1.0, count=1), tally)
        assert torch.equal(flat(server.weights()), before)
        assert (server.round, server.ledger.uses("ann"), server.ledger.uses("eve")) == (1, 1, 0)
    server.close(Aggregate(ones, weight=1.0, count=1), Tally(senders=("eve",)))
    assert (server.round, server.ledger.uses("eve")) == (2, 1)
    moved = float((flat(server.weights()) - before).norm())  # projected, since refusing it would tell of data
    assert moved == pytest.approx(PLAN.clip / PLAN.cohort, rel=2e-3)


def test_after_the_last_round_its_model_may_be_shown_and_nothing_more() -> None:
    server = private()
    for round in range(PLAN.rounds):
        play(server, (FIRST, SECOND)[round % 2])
    released, true = flat(server.shown()), flat(server.weights())
    answers = updates(server, dict.fromkeys([*FIRST, "new"], 0.5))
    with pytest.raises(ProtocolError, match=r"needs 1\n.*the budget of 4 rounds is spent"):
        server.close_round(answers)
    assert torch.equal(flat(server.shown()), released)
    assert torch.equal(flat(server.weights()), true)
    with pytest.raises(ProtocolError, match="the budget of 4 rounds is spent: nothing more may leave"):
        server.veil.begin(5, bytes(32), server.model)
    resumed = private()
    resumed.load_state_dict(server.state_dict())
    assert torch.equal(flat(resumed.shown()), released)
    with pytest.raises(ProtocolError, match="the budget of 4 rounds is spent"):
        resumed.close_round(answers)


def test_what_the_guarantee_was_not_planned_for_is_refused() -> None:
    with pytest.raises(PlanError, match=r"was planned for Workload\(momentum=0.0"):
        private(optimizer=optim.momentum(0.9))
    with pytest.raises(PlanError, match=r"1.running_mean is what clients measure"):
        dbcl.Server(nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), privacy=PLAN)


OF_EXAMPLES = PrivacyPlan(
    epsilon=8, delta=1e-5, clip=0.5, rounds=4, clients=8, cohort=8, unit="example", examples=80, batch=8, separation=10
)


@pytest.mark.parametrize("length", [3.0, 1e6, math.nan])
def test_where_one_example_is_the_unit_a_sum_is_no_longer_than_its_gradients(length: float) -> None:
    """A client that does not clip moves the weights by as many clips as it states examples, and by a batch at most."""
    for stated, counted in ((2, 2), (10**9, 8)):
        ends = []
        for ann in (length, 0.0):
            server = private(plan=OF_EXAMPLES, lanes=1, sketch="identity-v1")
            report = server.close_round(updates(server, {"ann": ann, "bob": 0.5}, {"ann": stated, "bob": 1}))
            assert (report.accepted, report.refused) == (2, ())
            ends.append(flat(server.weights()))
        assert float((ends[0] - ends[1]).norm()) <= counted * OF_EXAMPLES.clip / OF_EXAMPLES.batch * (1 + 1e-5)


def test_where_one_example_is_the_unit_half_precision_is_refused() -> None:
    private(wire="float16")  # of clients, whose updates are clipped as they arrive
    for settings in ({"wire": "float16"}, {"wire": "bfloat16"}):
        with pytest.raises(PlanError, match=r"0.bias travels in half precision, whose rounding may enlarge"):
            private(plan=OF_EXAMPLES, **settings)
    with pytest.raises(PlanError, match=r"0.bias travels in half precision, whose rounding may enlarge"):
        dbcl.Server(net().half(), privacy=OF_EXAMPLES)


def test_with_a_known_seed_nothing_is_promised() -> None:
    assert dbcl.Server(net(), privacy=PLAN).veil.guarantee().startswith("(epsilon")
    assert dbcl.Server(net(), privacy=PLAN, insecure_seed=0).veil.guarantee().startswith("none")
