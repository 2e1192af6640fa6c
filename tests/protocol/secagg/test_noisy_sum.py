"""Shares of noise under secure aggregation: what everybody together can tell, and what a client never does."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import norm as normal
from torch import nn

import dbcl
from dbcl.errors import ConfigError, PlanError, ProtocolError
from dbcl.privacy import NoiseStream, PrivacyPlan
from dbcl.privacy.distributed import NoiseShares
from dbcl.protocol import Broadcast, Update
from dbcl.protocol.secagg import NoisySum, Registry, SecureClient, SecureRounds, SigningKey
from dbcl.protocol.secagg.encoding import noisy_config
from dbcl.protocol.secagg.messages import Masked, Survivors, decode_message, encode_message

Array = NDArray[np.float64]
VALUES = 20_000


def plan_of(*, silos: int = 5, colluders: int = 2, rounds: int = 6, separation: int = 3, **changes: Any) -> PrivacyPlan:
    facts: dict[str, Any] = {
        "epsilon": 4.0,
        "delta": 1e-5,
        "clip": 0.1,
        "unit": "example",
        "noise_by": "clients",
        "colluders": colluders,
        "rounds": rounds,
        "separation": separation,
        "clients": silos,
        "cohort": silos,
        "examples": 600,
        "batch": 200,
        "values": VALUES,
    }
    return PrivacyPlan(**{**facts, **changes})


def broadcast_of(values: int, round: int) -> Broadcast:
    server = dbcl.Server(nn.Linear(values, 1, bias=False), dbcl.config.UNSKETCHED, insecure_seed=round)
    server.sequence.restart(round, [])
    return server.open_round()


def answer(broadcast: Broadcast, values: Array, kind: torch.dtype = torch.float64) -> Update:
    change = {"weight": torch.from_numpy(values)[None].to(kind)}
    return Update(broadcast.round, broadcast.plan.digest, change, examples=1)


# What everybody together can tell


def seen(plan: PrivacyPlan, canary: Array, silos: list[NoisySum], known: list[NoisySum]) -> Array:
    """Play the rounds, with a canary in the data of silo 0; return what the server and the colluders see. (T, d)"""
    rows = []
    for round in range(plan.rounds):
        broadcast = broadcast_of(VALUES, round)
        words = np.zeros(VALUES, dtype=np.uint32)
        for number, silo in enumerate(silos):
            data = canary if number == 0 and round % plan.separation == 0 else np.zeros(VALUES)
            vector, _ = silo.vector(answer(broadcast, data), broadcast)
            words += silo.words(vector, 1, len(silos))
        total = NoisySum(plan).total(words, len(silos), ()).values
        own = sum(silo.vector(answer(broadcast, np.zeros(VALUES)), broadcast)[0] for silo in known)
        rows.append(total / NoisySum(plan).grid - own)
    return np.stack(rows)


def measured_mu(plan: PrivacyPlan, silos: list[NoisySum], colluders: list[NoisySum]) -> tuple[float, float]:
    """Return mu and the AUC of the best test for a canary in one of many coordinates, each of which is a run."""
    there = np.arange(VALUES) < VALUES // 2
    y = seen(plan, np.where(there, plan.clip, 0.0), silos, colluders)
    covariance = np.cov(y[:, ~there]) + 1e-6 * np.eye(plan.rounds)
    scores = np.linalg.solve(covariance, np.arange(plan.rounds) % plan.separation == 0) @ y
    one, other = scores[there], scores[~there]
    spread = math.sqrt((one.var(ddof=1) + other.var(ddof=1)) / 2)
    ranks = np.argsort(np.argsort(scores))
    auc = (ranks[there].sum() - len(one) * (len(one) - 1) / 2) / (len(one) * len(other))
    return (one.mean() - other.mean()) / spread, float(auc)


def silos_of(plan: PrivacyPlan, kind: type[NoiseStream] = NoiseStream) -> list[NoisySum]:
    return [NoisySum(plan, kind(plan.shares, bytes([number + 1]) * 32)) for number in range(plan.clients)]


ERROR = math.sqrt(4 / VALUES + 1 / VALUES)  # of mu: of two means over half of the coordinates, and of the spread


@pytest.mark.parametrize("size", [(3, 1, 4, 2), (5, 2, 6, 3), (10, 2, 12, 4)])
def test_the_best_test_finds_a_canary_as_well_as_the_theorem_allows(size: tuple[int, int, int, int]) -> None:
    silos, colluders, rounds, separation = size
    plan = plan_of(silos=silos, colluders=colluders, rounds=rounds, separation=separation)
    # A canary in one coordinate has no part in the rounding of the others, for which the plan has 1 % more noise.
    allowed = plan.mu * plan.shares.steps / plan.shares.sensitivity
    mu, auc = measured_mu(plan, silos_of(plan), silos_of(plan)[silos - colluders :])
    assert abs(mu - allowed) < 4 * ERROR * (1 + allowed)
    assert abs(auc - normal.cdf(allowed / math.sqrt(2))) < 4 * 0.5 / math.sqrt(VALUES)


class Changed(NoiseStream):
    """A mutant of a client's noise."""

    def _step(self, broadcast: bytes) -> torch.Tensor:
        return self.change(super()._step(broadcast))

    def change(self, noise: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Without(Changed):
    """No noise of one silo."""

    def change(self, noise: torch.Tensor) -> torch.Tensor:
        return noise * (self._key[0] != 1)


class Replayed(Changed):
    """The noise of the first half of the run again in the second, as after a restart from the beginning."""

    def change(self, noise: torch.Tensor) -> torch.Tensor:
        first = self.__dict__.setdefault("first", [])
        half = self._mechanism.rounds // 2
        if self.round <= half:
            first.append(noise)
        return noise if self.round <= half else first[self.round - 1 - half]


class Multiplied(NoiseStream):
    """C z in place of C^-1 z."""

    def __init__(self, shares: NoiseShares, key: bytes) -> None:
        super().__init__(shares, key)
        strategy = self._mechanism.strategy
        wrong = replace(strategy, numerator=(1.0,), denominator=strategy.numerator)
        self._mechanism = replace(self._mechanism, strategy=wrong)


@pytest.mark.parametrize("mutant", [Without, Replayed, Multiplied])
def test_noise_that_is_missing_or_has_another_correlation_is_seen(mutant: type[NoiseStream]) -> None:
    plan = plan_of(silos=3, colluders=1, rounds=6, separation=2)
    sound, _ = measured_mu(plan, silos_of(plan), silos_of(plan)[2:])
    broken, _ = measured_mu(plan, silos_of(plan, mutant), silos_of(plan, mutant)[2:])
    assert sound < plan.mu + 4 * ERROR * (1 + plan.mu) < broken


def test_noise_that_does_not_count_on_colluders_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    stated = plan_of(silos=5, colluders=3).mu
    monkeypatch.setattr(NoiseShares, "honest", property(lambda self: self.clients))
    plan = plan_of(silos=5, colluders=3)
    mu, _ = measured_mu(plan, silos_of(plan), silos_of(plan)[2:])
    assert mu > 1.4 * stated


def test_data_and_noise_are_rounded_separately() -> None:
    """With the same noise, vectors of different data differ by their rounded data: never by a rounding with noise."""
    plan = plan_of(values=1000)
    data = np.random.default_rng(0).normal(size=1000) * 0.01
    broadcast = broadcast_of(1000, 0)
    one, other = (
        NoisySum.of_client(plan, bytes(32)).vector(answer(broadcast, values), broadcast)[0]
        for values in (data, np.zeros(1000))
    )
    assert np.array_equal(one - other, np.rint(data / NoisySum(plan).grid).astype(np.int64))


def test_words_hold_the_noise_and_the_values_and_nothing_else() -> None:
    """A word with the number of examples would not be covered."""
    plan = plan_of(values=3)
    encoding = NoisySum.of_client(plan)
    assert encoding.more_words == 0
    broadcast = broadcast_of(3, 0)
    vector, examples = encoding.vector(replace(answer(broadcast, np.ones(3)), examples=77), broadcast)
    assert (len(vector), examples) == (3, 1)


@pytest.mark.parametrize("values", [1e30, -1e30])
def test_values_beyond_the_limit_are_clamped(values: float) -> None:
    plan = plan_of(values=4)
    encoding, broadcast = NoisySum.of_client(plan, bytes(32)), broadcast_of(4, 0)
    noise = NoisySum.of_client(plan, bytes(32)).vector(answer(broadcast, np.zeros(4)), broadcast)[0]
    vector, _ = encoding.vector(answer(broadcast, np.full(4, values)), broadcast)
    assert set(vector - noise) == {int(math.copysign(encoding.limit, values))}
    words = sum(encoding.words(vector, 1, 5) for _ in range(5))
    assert abs(NoisySum(plan).total(words, 5, ()).values).max() <= 5 * (encoding.limit + 1e6) * encoding.grid


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_count_as_zeros_without_a_word(bad: float, caplog: pytest.LogCaptureFixture) -> None:
    plan, broadcast = plan_of(values=4), broadcast_of(4, 0)
    made = [
        NoisySum.of_client(plan, bytes(32)).vector(answer(broadcast, np.array(values)), broadcast)[0]
        for values in ([bad, 1.0, 1.0, 1.0], [0.0] * 4)
    ]
    assert np.array_equal(*made)
    assert not caplog.text


def test_a_sum_in_float32_is_refused() -> None:
    plan, broadcast = plan_of(values=4), broadcast_of(4, 0)
    narrow = Update(0, broadcast.plan.digest, {"weight": torch.zeros(1, 4)}, 1)
    with pytest.raises(ProtocolError, match="in float64"):
        NoisySum.of_client(plan).vector(narrow, broadcast)


# What a client never does


class Silos:
    """The clients of a plan, and a server over messages that tests may change; `more` clients than were planned."""

    def __init__(self, plan: PrivacyPlan, *, values: int = 6, more: int = 0) -> None:
        self.plan = replace(plan, values=values)
        torch.manual_seed(0)
        self.server = dbcl.Server(nn.Linear(values, 1, bias=False), privacy=self.plan)
        self.config = noisy_config(self.plan)
        keys = {f"silo {number}": SigningKey() for number in range(self.plan.clients + more)}
        self.registry = Registry({name: key.public for name, key in keys.items()})
        self.clients = {
            name: SecureClient(name, key, self.config, self.registry, NoisySum.of_client(self.plan))
            for name, key in keys.items()
        }
        self.rounds = SecureRounds(self.server, self.config)
        self.data = {name: np.full(values, 0.01 * number) for number, name in enumerate(self.clients)}
        self.refusals: list[str] = []
        self.messages: list[tuple[str, bytes]] = []

    def begin(self, sent: Mapping[str, bytes], away: tuple[str, ...] = ()) -> dict[str, bytes]:
        answers = {}
        for name, data in sent.items():
            if name in away:
                continue
            broadcast = dbcl.protocol.decode_broadcast(data)
            try:
                kind = torch.float64 if self.plan.unit == "example" else torch.float32
                answers[name] = self.clients[name].begin(broadcast, answer(broadcast, self.data[name], kind))
            except ProtocolError as error:
                self.refusals.append(str(error))
        return answers

    def ask(self, sent: Mapping[str, bytes], away: tuple[str, ...] = ()) -> dict[str, bytes]:
        answers = {}
        for name, data in sent.items():
            self.messages.append((name, data))
            if name in away:
                continue
            try:
                answers[name] = self.clients[name].answer(data)
            except ProtocolError as error:
                self.refusals.append(str(error))
        return answers

    def play(self, names: list[str] | None = None, *, begin: tuple[str, ...] = (), ask: tuple[str, ...] = ()) -> Any:
        """Play a round; some clients are away for the broadcast, or for all that follows."""
        self.refusals.clear()
        return self.rounds.play(
            names or list(self.clients), lambda sent: self.begin(sent, begin), lambda sent: self.ask(sent, ask)
        )

    def restart(self, name: str) -> None:
        """Replace a client by another process with its state."""
        old = self.clients[name]
        new = SecureClient(name, SigningKey(), self.config, self.registry, NoisySum.of_client(self.plan))
        new.load_state(old.state())
        self.clients[name] = new


def test_a_round_moves_the_weights_by_the_noisy_sum() -> None:
    silos = Silos(plan_of())
    before = silos.server.model.weight.detach().clone()
    report = silos.play()
    assert (report.accepted, report.examples, report.metrics) == (5, 0, {})
    moved = (silos.server.model.weight.detach() - before).flatten().double().numpy()
    ((_, total),) = silos.rounds.totals
    assert moved == pytest.approx(total.values / silos.plan.per_round, rel=1e-4, abs=1e-7)
    noise = silos.plan.shares.noise(5) * NoisySum(silos.plan).grid
    assert noise / 100 < np.abs(total.values - sum(silos.data.values())).max() < 6 * noise


def test_a_round_counts_with_all_silos_only_and_the_next_one_goes_on() -> None:
    silos = Silos(plan_of())
    silos.play()
    with pytest.raises(ProtocolError, match="no sum could be made"):
        silos.play(ask=("silo 3",))
    assert silos.server.round == 1
    assert silos.play().accepted == 5  # the same round with the same bytes, and all are there


def test_a_round_without_all_silos_is_refused_by_each_of_them() -> None:
    """Whatever the server claims: a client counts the members of the roster and of the list of survivors itself."""
    silos = Silos(plan_of())
    fewer = replace(silos.config, min_cohort=3)
    silos.rounds.config = fewer
    any_group(silos)
    with pytest.raises(ProtocolError):
        silos.play(["silo 0", "silo 1", "silo 2", "silo 3"])
    assert any("there must be 5 to" in refusal for refusal in silos.refusals)


def any_group(silos: Silos) -> None:
    """Let the server ask any clients for a sum."""
    silos.rounds._noisy_group = lambda broadcast, clients, refused: [  # type: ignore[method-assign]
        silos.rounds._group(broadcast, clients, whole=False)
    ]


def test_a_round_with_more_silos_than_planned_is_refused_by_each_of_them() -> None:
    """All of them are known: the words have no room for the noise of more."""
    silos = Silos(plan_of(), more=1)
    any_group(silos)
    with pytest.raises(ProtocolError):
        silos.play()
    assert sum("6 clients, and there must be 5 to 5" in refusal for refusal in silos.refusals) == 6


def test_the_silos_are_the_same_in_every_round() -> None:
    """All of them are known: a sum with the noise of another silo in place of one has another covariance."""
    silos = Silos(plan_of(), more=1)
    names = list(silos.clients)
    silos.play(names[:5])
    for name in names[:5]:
        silos.restart(name)
    with pytest.raises(ProtocolError, match="no sum could be made"):
        silos.play(names[1:])
    assert sum("the same clients in every round" in refusal for refusal in silos.refusals) == 4
    assert silos.play(names[:5]).accepted == 5


def test_a_list_without_one_silo_is_signed_by_no_silo() -> None:
    silos = Silos(plan_of())

    def shorten(sent: Mapping[str, bytes]) -> dict[str, bytes]:
        changed = dict(sent)
        for name, data in sent.items():
            if silos.clients[name]._round.next_step == "agree":  # type: ignore[union-attr]
                whole = decode_message(Survivors, data)
                changed[name] = encode_message(replace(whole, survivors=whole.survivors[:-1]))
        return silos.ask(changed)

    with pytest.raises(ProtocolError, match="no sum could be made"):
        silos.rounds.play(list(silos.clients), silos.begin, shorten)
    assert sum("a sum of 4 clients would be shown" in refusal for refusal in silos.refusals) == 4
    assert sum("a list of survivors that cannot be" in refusal for refusal in silos.refusals) == 1


@pytest.mark.parametrize(("cohort", "fewest", "colluders"), [(10, 10, 2), (10, 8, 2), (100, 60, 20), (5, 3, 1)])
def test_no_group_has_a_threshold_for_fewer_colluders_than_planned(cohort: int, fewest: int, colluders: int) -> None:
    """Or two lists of survivors could both have enough signatures, and a server both secrets of a client."""
    sizes = {"clients": 2 * cohort, "cohort": cohort, "fewest": fewest, "colluders": colluders}
    config = noisy_config(plan_of(**{**FLEET, **sizes}))
    for count in range(fewest, cohort + 1):
        assert config.colluders(count) >= colluders
        assert 2 * config.threshold(count) > count + colluders


def test_a_round_has_one_vector_whatever_the_data_are_by_then() -> None:
    """Asked again, a silo sends what it sent: another vector would show the difference of their noise."""
    silos = Silos(plan_of())
    with pytest.raises(ProtocolError):
        silos.play(ask=("silo 3",))
    first = {name: client._vector.copy() for name, client in silos.clients.items()}
    silos.data = {name: data + 0.05 for name, data in silos.data.items()}
    for name in ("silo 0", "silo 1"):
        silos.restart(name)
    silos.play()
    for name, client in silos.clients.items():
        assert np.array_equal(client._vector, first[name])


def test_a_mutant_that_draws_anew_for_a_retry_would_show_its_data() -> None:
    """The same rounds with a fresh vector in each attempt: averaging them removes the noise."""
    plan, broadcast = plan_of(values=4), broadcast_of(4, 0)
    made = []
    for attempt in range(400):
        encoding = NoisySum.of_client(plan, attempt.to_bytes(32, "big"))
        made.append(encoding.vector(answer(broadcast, np.full(4, 0.05)), broadcast)[0])
    noise = plan.shares.scale / math.sqrt(400)
    assert np.abs(np.mean(made, axis=0) - 0.05 / NoisySum(plan).grid).max() < 5 * noise < plan.shares.scale / 2


def test_another_broadcast_of_a_round_or_an_earlier_round_is_not_answered() -> None:
    silos = Silos(plan_of())
    silos.play()
    with pytest.raises(ProtocolError):
        silos.play(ask=("silo 4",))
    with torch.no_grad():
        silos.server.model.weight.add_(1.0)
    silos.server.sequence.current = None
    with pytest.raises(ProtocolError):
        silos.play()
    assert all("another broadcast of round 1" in refusal for refusal in silos.refusals)
    silos.server.sequence.restart(0, [])
    with pytest.raises(ProtocolError):
        silos.play()
    assert all("answers no earlier one" in refusal for refusal in silos.refusals)


def test_a_round_may_be_left_out_and_its_noise_is_drawn_all_the_same() -> None:
    silos, whole = Silos(plan_of()), {}
    silos.play()
    whole = {name: client.encoding.stream.round for name, client in silos.clients.items()}  # type: ignore[attr-defined]
    silos.server.sequence.restart(3, [])
    silos.play()
    assert set(whole.values()) == {1}
    assert {client.encoding.stream.round for client in silos.clients.values()} == {4}  # type: ignore[attr-defined]


def test_the_budget_ends_on_the_client() -> None:
    silos = Silos(plan_of(rounds=2))
    broadcast = broadcast_of(6, 2)
    with pytest.raises(ProtocolError, match="the budget of 2 rounds is spent"):
        silos.clients["silo 0"].begin(broadcast, answer(broadcast, np.zeros(6)))


FLEET: dict[str, Any] = {
    "unit": "client",
    "fewest": 3,
    "colluders": 1,
    "separation": 1,
    "participations": 6,
    "examples": 0,
    "batch": 0,
    "clients": 6,
    "cohort": 5,
    "delta": 1e-3,
}
"""Cohorts that change: one client is the unit, and some may drop out."""


def test_a_fleet_adds_up_with_whoever_is_there() -> None:
    fleet = Silos(plan_of(**FLEET))
    names = list(fleet.clients)
    assert fleet.play(names[:4]).accepted == 4
    assert fleet.play(names[1:6]).accepted == 5  # the next round may have other clients
    with pytest.raises(ProtocolError, match="planned for 3 to 5"):
        fleet.play(names[:2])


def test_what_was_masked_for_one_group_is_not_masked_for_another_in_the_same_round() -> None:
    """Two sums of a round over different groups would differ by the update of a client with hardly any noise."""
    fleet = Silos(plan_of(**FLEET))
    names = list(fleet.clients)
    silent = ("silo 0", "silo 1", "silo 2")

    def until_masked(sent: Mapping[str, bytes]) -> dict[str, bytes]:
        masks = all(fleet.clients[name]._round.next_step == "mask" for name in sent)  # type: ignore[union-attr]
        answers = fleet.ask(sent)
        return {name: data for name, data in answers.items() if not (masks and name in silent)}

    with pytest.raises(ProtocolError, match="no sum could be made"):
        fleet.rounds.play(names[:5], fleet.begin, until_masked)
    for name in names[:4]:
        fleet.restart(name)
    with pytest.raises(ProtocolError, match="no sum could be made"):
        fleet.play(names[:4])
    assert sum("a round has one sum" in refusal for refusal in fleet.refusals) == 4
    assert fleet.play(names[:5]).accepted == 5


def test_one_list_of_survivors_is_signed_in_a_round() -> None:
    fleet = Silos(plan_of(**FLEET))
    names = list(fleet.clients)[:5]
    seen: dict[str, bytes] = {}

    def stop_before_the_end(sent: Mapping[str, bytes]) -> dict[str, bytes]:
        if all(fleet.clients[name]._round.next_step == "reveal" for name in sent):  # type: ignore[union-attr]
            return {}
        seen.update(sent)
        return fleet.ask(sent)

    with pytest.raises(ProtocolError):
        fleet.rounds.play(names, fleet.begin, stop_before_the_end)
    signed = decode_message(Survivors, seen["silo 0"]).survivors
    assert len(signed) == 5

    def one_is_late(sent: Mapping[str, bytes]) -> dict[str, bytes]:
        masks = all(fleet.clients[name]._round.next_step == "mask" for name in sent)  # type: ignore[union-attr]
        return {name: data for name, data in fleet.ask(sent).items() if not (masks and name == "silo 4")}

    for name in names:
        fleet.restart(name)
    fleet.refusals.clear()
    with pytest.raises(ProtocolError, match="no sum could be made"):
        fleet.rounds.play(names, fleet.begin, one_is_late)
    assert sum("another list of survivors was signed" in refusal for refusal in fleet.refusals) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon": 9.0},
        {"delta": 1e-6},
        {"rounds": 7},
        {"clip": 0.2},
        {"colluders": 0},
        {"clients": 4, "cohort": 4},
        {"separation": 2},
        {"correlation": "independent"},
        {"examples": 700},
        {"batch": 300},
    ],
)
def test_clients_that_agreed_to_another_plan_do_not_take_part(change: dict[str, Any]) -> None:
    silos = Silos(plan_of())
    name = "silo 2"
    other = replace(silos.plan, **{"participations": 0, **change})
    old = silos.clients[name]
    silos.clients[name] = SecureClient(
        name, old.identity, noisy_config(other), silos.registry, NoisySum.of_client(other)
    )
    with pytest.raises(ProtocolError, match="no sum could be made"):
        silos.play()
    assert any("another broadcast" in refusal or "must be" in refusal for refusal in silos.refusals)


def test_a_client_needs_a_registry_and_its_state_keeps_the_noise() -> None:
    plan = plan_of(values=6)
    with pytest.raises(ConfigError, match="the server could invent all other clients"):
        SecureClient("ann", SigningKey(), noisy_config(plan), None, NoisySum.of_client(plan))
    silos = Silos(plan_of())
    silos.play()
    before = silos.clients["silo 1"].encoding.state()
    silos.restart("silo 1")
    after = silos.clients["silo 1"].encoding.state()
    assert before.values == after.values
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())
    other = NoisySum.of_client(replace(silos.plan, epsilon=8.0))  # the noise so far had another scale
    with pytest.raises(ProtocolError, match="of another plan"):
        other.load_state(before)
    plain = dbcl.protocol.secagg.SecureClient("silo 1", SigningKey(), dbcl.SecAggConfig(), silos.registry)
    with pytest.raises(ProtocolError, match="another guarantee"):
        plain.load_state(silos.clients["silo 1"].state())


def test_no_message_shows_a_value() -> None:
    """What leaves a silo is masked: its vector is in none of its messages."""
    silos = Silos(plan_of())
    sent: list[bytes] = []
    honest = silos.ask

    def ask(messages: Mapping[str, bytes]) -> dict[str, bytes]:
        answers = honest(messages)
        sent.extend(answers.values())
        return answers

    silos.rounds.play(list(silos.clients), silos.begin, ask)
    encoding = NoisySum(silos.plan)
    masked = [decode_message(Masked, data).packed for data in sent if _is_masked(data)]
    assert len(masked) == 5
    assert {len(each) for each in masked} == {-(-6 * encoding.bits(5) // 8)}


def _is_masked(data: bytes) -> bool:
    try:
        decode_message(Masked, data)
    except ProtocolError:
        return False
    return True


# The server's side


def test_a_server_refuses_what_the_guarantee_does_not_cover() -> None:
    plan = plan_of(values=7)
    net = nn.Linear(6, 1)
    with pytest.raises(PlanError, match="leave out the sketch and the veil"):
        dbcl.Server(net, dbcl.SketchConfig(sketch="identity-v1"), privacy=plan)
    with pytest.raises(PlanError, match="planned for 8 values, and an update has 7"):
        dbcl.Server(net, privacy=replace(plan, values=8))
    with pytest.raises(PlanError, match="without running statistics"):
        dbcl.Server(nn.Sequential(nn.Linear(6, 1), nn.BatchNorm1d(1)), privacy=replace(plan, values=11))
    server = dbcl.Server(net, privacy=plan)
    broadcast = server.open_round("ann")
    tensors = {name: torch.zeros_like(tensor) for name, tensor in broadcast.tensors.items()}
    with pytest.raises(ProtocolError, match=r"use dbcl.engines.secure.SecureServer"):
        server.close_round({"ann": Update(0, broadcast.plan.digest, tensors, 1)})
    with pytest.raises(ConfigError, match="noisy_config"):
        SecureRounds(server, dbcl.SecAggConfig(clip=1.0))


def test_the_terms_are_plain_values_in_a_fixed_order() -> None:
    plan = plan_of(values=6)
    assert json.loads(json.dumps(asdict(plan))) == asdict(plan)
    assert NoisySum(plan).binding(bytes(32)) == NoisySum(replace(plan)).binding(bytes(32))
    assert NoisySum(plan).binding(bytes(32)) != NoisySum(replace(plan, epsilon=5.0)).binding(bytes(32))


def test_clients_agree_on_the_grid_and_the_scale_that_they_derive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of dbcl may derive others from the same plan."""
    own = NoisySum(plan_of(values=6)).binding(bytes(32))
    monkeypatch.setattr("dbcl.privacy.accounting.STEPS_SUM", 1000)
    assert NoisySum(plan_of(values=6)).binding(bytes(32)) != own
