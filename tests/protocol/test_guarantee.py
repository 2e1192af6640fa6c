"""A server with a guarantee: each condition of it, and what happens when it is broken."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dbcl
import dbcl.protocol.validation
from dbcl import optim
from dbcl.errors import PlanError, ProtocolError
from dbcl.privacy import CorrelatedNoise, PrivacyPlan
from dbcl.protocol import Aggregate, AggregationStats, UpdateValidator, checkpoint
from dbcl.protocol.guarantee import DifferentialPrivacy
from dbcl.protocol.round_keys import RoundKeys
from dbcl.protocol.validation import AcceptedUpdate
from dbcl.testing.nested import nested

PLAN = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.5, rounds=4, clients=8, cohort=4)
FIRST, SECOND = ["ann", "bob", "cleo", "dan"], ["eve", "fay", "gus", "hal"]


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def private(plan: PrivacyPlan = PLAN, **more: Any) -> dbcl.Server:
    return dbcl.Server(net(), privacy=plan, insecure_seed=0, **nested({"coverage": "hidden", **more}))


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
    "plain": {"sketch": "identity-v1"},
}


def moved(situation: str, **more: Any) -> float:
    """How far the weights of two neighbouring runs are apart after a round, in units of clip / cohort."""
    lengths, examples = SITUATIONS[situation]
    ends = []
    for length in (lengths["ann"], 0.0):
        server = private(**more)
        server.close_round(updates(server, {**lengths, "ann": length}, examples))
        ends.append(flat(server.weights()))
    return float((ends[0] - ends[1]).norm()) / (PLAN.clip / PLAN.cohort)


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_client_moves_the_weights_by_its_clip_over_the_cohort(kind: str, situation: str) -> None:
    assert moved(situation, **KINDS[kind]) == pytest.approx(1.0, abs=1e-9)


restrict = DifferentialPrivacy.restrict


def restricted(**changes: Any) -> Callable[..., UpdateValidator]:
    """A `restrict` that leaves something of the validator as it must not be."""
    return lambda keeper, validator: replace(restrict(keeper, validator), **changes)


def projects_nothing(keeper: DifferentialPrivacy, changes: dict[str, Tensor], size: float, count: int) -> Any:
    return changes


def weighs_by_examples(keeper: DifferentialPrivacy, accepted: Mapping[str, AcceptedUpdate]) -> Any:
    return {who: replace(each, weight=each.update.examples / 10) for who, each in accepted.items()}


def divides_by_answers(keeper: DifferentialPrivacy, weights: Collection[float]) -> float:
    return float(len(weights))


MUTANTS: dict[str, tuple[str, dict[str, Callable[..., Any]]]] = {
    "divides by answers": (
        "it is the only one to answer",
        {"denominator": divides_by_answers, "project": projects_nothing},
    ),
    "weighs by examples": ("it has many examples", {"weigh": weighs_by_examples, "project": projects_nothing}),
    "has no clip": ("its update is long", {"restrict": restricted(norm_bound=None), "project": projects_nothing}),
    "rejects outliers": ("it moves the median", {"restrict": restricted(outlier_factor=10.0)}),
    "bounds influence": ("it moves the median", {"restrict": restricted(max_influence=1.5)}),
}
"""Of each broken keeper of the guarantee the situation that shows it, and the hooks that are broken."""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_server_that_breaks_a_condition_lets_one_client_move_more(
    mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    situation, hooks = MUTANTS[mutant]
    for name, broken in hooks.items():
        assert name in vars(DifferentialPrivacy)  # or nothing would be broken
        monkeypatch.setattr(DifferentialPrivacy, name, broken)
    assert moved(situation, lanes=1) > 1.3


def test_the_clip_is_one_over_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def longest(tensors: Mapping[str, Tensor]) -> float:
        return max(float(tensor.norm()) for tensor in tensors.values())

    monkeypatch.setattr(DifferentialPrivacy, "project", projects_nothing)
    monkeypatch.setattr(dbcl.protocol.validation, "norm", longest)
    assert moved("its update is long") > 1.1


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
        ends.append((flat(server.weights()), report.accepted, server.keeper.tracker.state()))
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_of_the_weights_takes_nothing_from_the_guarantee(dtype: torch.dtype) -> None:
    """What one of 6,000 examples adds is below the spacing of float32 values; paired runs show the planned mu."""
    plan = PrivacyPlan(
        epsilon=8, delta=1e-6, clip=1e-4, rounds=8, clients=1, cohort=1, unit="example", examples=24_000, batch=6000,
        separation=4,
    )  # fmt: skip
    pair = [
        dbcl.Server(net().to(dtype), dbcl.SketchConfig(sketch="identity-v1", lanes=1), privacy=plan, insecure_seed=0)
        for _ in range(2)
    ]
    moved, generator = [], torch.Generator().manual_seed(0)
    for round in range(plan.rounds):
        before = [flat(server.weights()).clone() for server in pair]
        broadcast = pair[0].open_round()
        drawn = {n: torch.randn(t.shape, dtype=dtype, generator=generator) for n, t in broadcast.tensors.items()}
        length = dbcl.privacy.norm(drawn)
        for server, extra in zip(pair, (1.0 if round % plan.separation == 0 else 0.0, 0.0), strict=True):
            size = plan.clip * (0.1 * plan.batch + extra) / length
            sums = {name: size * tensor for name, tensor in drawn.items()}
            digest = server.open_round().plan.digest
            server.close_round({"ann": dbcl.Update(round, digest, sums, examples=6000)})
        one, other = (flat(server.weights()) - was for server, was in zip(pair, before, strict=True))
        moved.append((one - other).numpy())
    (C,) = (np.tril(c[np.abs(np.subtract.outer(range(8), range(8)))]) for c in [plan.strategy.coefficients(8)])
    assert np.linalg.norm(C @ np.stack(moved)) / plan.sigma == pytest.approx(plan.mu, rel=0.01)


# What leaves


def test_a_report_tells_nothing_of_data() -> None:
    server = private()
    answers = updates(server, {"ann": 5.0, "bob": 0.2}, {"ann": 77})
    answers["bob"] = replace(answers["bob"], tensors={n: t * math.nan for n, t in answers["bob"].tensors.items()})
    report = server.close_round(answers)
    assert (report.accepted, report.clipped, report.examples, report.metrics) == (2, 0, 0, {})
    assert math.isnan(report.norm)
    assert report.refused == ()
    assert (server.keeper.tracker.uses("ann"), server.keeper.tracker.uses("bob")) == (1, 1)


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
    noisy = server.noisy_weights()
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
    server = dbcl.Server(
        net().bfloat16(), dbcl.SketchConfig(lanes=1, coverage="hidden"), privacy=PLAN, insecure_seed=0, ema_decay=0.9
    )
    expected: dict[str, Tensor] = {}
    for round, clients in enumerate([FIRST, SECOND]):
        server.close_round(updates(server, dict.fromkeys(clients, 0.5)))
        shown = server.noisy_weights()
        assert {tensor.dtype for tensor in shown.values()} == {torch.float32}
        assert torch.equal(flat(shown) / PLAN.grid, (flat(shown) / PLAN.grid).round())
        for name, each in shown.items():
            expected[name] = expected.get(name, each).lerp(each, 1 - round / (round + 10))
    for name, parameter in server.released.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, expected[name].bfloat16())


def test_frozen_parameters_hold_no_data_so_their_base_stays_what_it_is() -> None:
    def adapted() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 6).double().requires_grad_(False), *net()[1:])

    server = dbcl.Server(adapted(), dbcl.SketchConfig(send_frozen=True, coverage="all"), privacy=PLAN, insecure_seed=0)
    before = dbcl.encode(server.base())
    play(server, FIRST)
    assert dbcl.encode(server.base()) == before
    assert set(server.noisy_weights()) == {"2.weight", "2.bias"}


def test_the_covariance_of_what_is_released_is_the_planned_one() -> None:
    """The rows of a layer are 2,000 runs of a model with two parameters: nothing but the noise moves."""
    plan = replace(PLAN, rounds=5, clients=9, cohort=3, participations=0, separation=0, momentum=0.5, lr=0.7)
    layer = nn.Linear(2, 2000, bias=False).double()
    server = dbcl.Server(layer, dbcl.SketchConfig(sketch="identity-v1"), privacy=plan, ema_decay=0.5)
    start = layer.weight.detach().clone()
    noises, released = [server.noisy_weights()["weight"] - start], []
    for round in range(plan.rounds):
        senders = [f"{(3 * round + place) % 9}" for place in range(3)]
        server.close_round(updates(server, dict.fromkeys(senders, 0.0)))
        noises.append(server.noisy_weights()["weight"] - start)
        released.append(server.released.weight.detach() - start)
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
        decay = min(0.5, (t - 1) / (t + 9))
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
    return dbcl.Server.load(folder, net(), dbcl.SketchConfig(coverage="hidden"), privacy=PLAN)


def secure() -> dbcl.Server:
    return dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), privacy=PLAN)


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
    server.load_state(server.state())
    assert sent(server, "ann", "bob") == seen


def likeness(server: dbcl.Server) -> float:
    """How much alike what two rounds add to the noise is, from the second on: the largest correlation."""
    added = []
    for round in range(PLAN.rounds):
        before = server.noisy_weights()
        play(server, (FIRST, SECOND)[round % 2], length=0.0)
        added.append(flat(server.noisy_weights()) - flat(before))
    return float(torch.corrcoef(torch.stack(added[1:])).fill_diagonal_(0).abs().max())


def test_no_noise_is_used_for_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert likeness(private()) < 0.85  # what follows another is correlated with it, as planned
    drawn = CorrelatedNoise._drawn
    monkeypatch.setattr(RoundKeys, "_draw", lambda *arguments: bytes(32))
    assert likeness(private()) < 0.85  # the same key in every round draws anew all the same
    monkeypatch.setattr(CorrelatedNoise, "_drawn", lambda self, key, round, *more: drawn(self, key, 0, *more))
    assert likeness(private()) > 0.99


def change(server: dbcl.Server) -> None:
    with torch.no_grad():
        server.model[0].weight.mul_(1.01)


@pytest.mark.parametrize(
    "then", [lambda server: server.open_round(), lambda server: server.state(), lambda server: server.noisy_weights()]
)
@pytest.mark.parametrize("seeded", [False, True])
def test_weights_that_somebody_changes_between_rounds_are_refused(
    seeded: bool, then: Callable[[dbcl.Server], Any]
) -> None:
    server = private() if seeded else secure()
    play(server, FIRST)
    change(server)
    with pytest.raises(ProtocolError, match="the weights were changed from outside"):
        then(server)


def test_weights_that_somebody_changes_in_a_round_are_refused_when_it_closes() -> None:
    server = private()
    answers = updates(server, {"ann": 0.5})
    change(server)
    with pytest.raises(ProtocolError, match="the weights were changed from outside"):
        server.close_round(answers)
    assert server.keeper.tracker.uses("ann") == 0


def test_the_first_weights_hold_no_data_and_may_be_set() -> None:
    server = private()
    change(server)
    play(server, FIRST)
    assert server.round == 1


def test_nothing_goes_back() -> None:
    server = secure()
    early = server.state()
    play(server, FIRST)
    late, other = server.state(), secure()
    play(other, FIRST)
    for state in (early, other.state()):
        with pytest.raises(ProtocolError, match="nothing goes back: this server is at round 1"):
            server.load_state(state)
    server.load_state(late)
    assert (server.round, server.keeper.tracker.uses("ann")) == (1, 1)


def test_a_damaged_checkpoint_is_not_passed_over(tmp_path: Path) -> None:
    server = secure()
    server.save(tmp_path)
    play(server, FIRST)
    newest = server.save(tmp_path)
    newest.write_bytes(newest.read_bytes()[:-9])
    with pytest.raises(ProtocolError, match=r"round-00000001.dbcl is damaged, and round-00000000.dbcl has a guarantee"):
        dbcl.Server.load(tmp_path, net(), dbcl.SketchConfig(coverage="hidden"), privacy=PLAN)
    newest.unlink()
    assert dbcl.Server.load(tmp_path, net(), dbcl.SketchConfig(coverage="hidden"), privacy=PLAN).round == 0
    plain = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"))
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
        dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), privacy=other).load_state(server.state())
    for one, two in (
        (dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden")), server),
        (secure(), dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"))),
    ):
        with pytest.raises(ProtocolError, match="another guarantee"):
            one.load_state(two.state())


# The tracker and the budget


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


@pytest.mark.parametrize("where", ["step", "noise.end"])
def test_a_step_that_fails_spends_nothing_and_can_be_taken_again(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server, undisturbed = private(), private()
    for each in (server, undisturbed):
        play(each, FIRST)
    answers = updates(server, dict.fromkeys(SECOND, 0.5))
    seen, before = sent(server, *SECOND), server.state()

    def fail(*arguments: Any) -> None:
        raise MemoryError

    def half(changes: Mapping[str, Tensor]) -> None:
        step(changes)
        fail()

    step = server.trained.step
    with monkeypatch.context() as patched:
        if where == "step":
            patched.setattr(server.trained, "step", half)
        else:
            patched.setattr(server.noise, "end", fail)
        with pytest.raises(MemoryError):
            server.close_round(answers)
    after = server.state()
    assert after.values == before.values
    assert all(torch.equal(after.tensors[name], tensor) for name, tensor in before.tensors.items())
    assert sent(server, *SECOND) == seen
    server.close_round(answers)
    play(undisturbed, SECOND)
    assert sent(server, "ann") == sent(undisturbed, "ann")
    assert server.keeper.tracker.state() == undisturbed.keeper.tracker.state()


def test_an_aggregate_of_somebodys_own_is_counted_and_bounded() -> None:
    server = private(lanes=1)
    play(server, FIRST)
    shapes = server.open_round().tensors
    before = flat(server.weights())
    ones = {name: torch.ones_like(tensor) for name, tensor in shapes.items()}
    small = {name: tensor * 1e-3 for name, tensor in ones.items()}
    for sums, stats, reason in (
        (small, AggregationStats(), "a guarantee counts participations, and the senders are not known"),
        (small, AggregationStats(senders=("ann",)), "'ann': took part in round 0, and may again from round 2 on"),
    ):
        with pytest.raises(ProtocolError, match=reason):
            server.close(Aggregate(sums, weight=1.0, count=1), stats)
        assert torch.equal(flat(server.weights()), before)
        assert (server.round, server.keeper.tracker.uses("ann"), server.keeper.tracker.uses("eve")) == (1, 1, 0)
    server.close(Aggregate(ones, weight=1.0, count=1), AggregationStats(senders=("eve",)))
    assert (server.round, server.keeper.tracker.uses("eve")) == (2, 1)
    moved = float((flat(server.weights()) - before).norm())  # projected, since refusing it would tell of data
    assert moved == pytest.approx(PLAN.clip / PLAN.cohort, rel=2e-3)


def test_after_the_last_round_its_model_may_be_shown_and_nothing_more() -> None:
    server = private()
    for round in range(PLAN.rounds):
        play(server, (FIRST, SECOND)[round % 2])
    released, true = flat(server.noisy_weights()), flat(server.weights())
    answers = updates(server, dict.fromkeys([*FIRST, "new"], 0.5))
    with pytest.raises(ProtocolError, match=r"needs 1\n.*the budget of 4 rounds is spent"):
        server.close_round(answers)
    assert torch.equal(flat(server.noisy_weights()), released)
    assert torch.equal(flat(server.weights()), true)
    with pytest.raises(ProtocolError, match="the budget of 4 rounds is spent: nothing more may leave"):
        server.noise.begin(5, bytes(32), server.model)
    resumed = private()
    resumed.load_state(server.state())
    assert torch.equal(flat(resumed.noisy_weights()), released)
    with pytest.raises(ProtocolError, match="the budget of 4 rounds is spent"):
        resumed.close_round(answers)


def test_what_the_guarantee_was_not_planned_for_is_refused() -> None:
    with pytest.raises(PlanError, match=r"was planned for Workload\(momentum=0.0"):
        private(optimizer=optim.momentum(0.9))
    with pytest.raises(PlanError, match=r"1.running_mean is measured by clients"):
        dbcl.Server(
            nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)),
            dbcl.SketchConfig(coverage="hidden"),
            privacy=PLAN,
        )


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
        dbcl.Server(net().half(), dbcl.SketchConfig(coverage="hidden"), privacy=OF_EXAMPLES)


def test_a_clip_that_drowns_in_the_rounding_of_the_weights_is_refused() -> None:
    """Clients send differences of weights, so their values have the spacing of the weights."""
    small = replace(OF_EXAMPLES, clip=1e-5)
    with pytest.raises(PlanError, match=r"what clients round in them may move an update by .* a larger lr"):
        dbcl.Server(net().float(), dbcl.SketchConfig(coverage="hidden"), privacy=small)
    dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), privacy=small)  # in float64
    dbcl.Server(
        net().float(), dbcl.SketchConfig(coverage="hidden"), privacy=replace(PLAN, clip=1e-5)
    )  # the server clips after the rounding


def test_with_a_known_seed_nothing_is_promised() -> None:
    assert (
        dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), privacy=PLAN).noise.guarantee().startswith("(epsilon")
    )
    assert (
        dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), privacy=PLAN, insecure_seed=0)
        .noise.guarantee()
        .startswith("none")
    )
