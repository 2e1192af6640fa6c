"""Who receives which broadcast: to train, to evaluate, or both; and what its transcript then holds."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower

import dbcl
from dbcl.config import SketchConfig
from dbcl.flower import DoubleBlind, GuaranteeMod, LocalGrid, blinded, reply
from dbcl.privacy import PrivacyPlan
from dbcl.testing.nested import nested
from dbcl.transcripts import Recorder, Setting, Transcript, Truth
from flower.test_rounds import TRAINING, CrashError, CrashingGrid, altered, clients, net

NODES = 8
ROUNDS = 6
Told = dict[int, set[int]]


def some(**more: Any) -> flower.FedAvg:
    """A quarter of the nodes in a round, and Flower's default for who evaluates: all."""
    return flower.FedAvg(**{"fraction_train": 0.25, **more})


def play(inner: flower.Strategy, rounds: int = ROUNDS, **settings: Any) -> tuple[DoubleBlind, Told, Told]:
    """A run, and by round who was sent its broadcast to train and who to evaluate."""
    told: dict[str, Told] = {"train": {}, "evaluate": {}}

    def note(message: Message) -> None:
        if message.metadata.dst_node_id >= 1000:
            round = dbcl.protocol.decode_broadcast(message.content["dbcl"]["broadcast"]).round
            told[message.metadata.message_type].setdefault(round, set()).add(message.metadata.dst_node_id - 1000)

    strategy = DoubleBlind(inner, net(), **nested({"coverage": "hidden", **settings}))
    strategy.start(LocalGrid(clients(), NODES, hook=note), num_rounds=rounds)
    return strategy, told["train"], told["evaluate"]


def warnings(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    found = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    return [text for text in found if word in text]


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_nobody_sees_a_round_that_it_takes_no_part_in(
    share: float, lanes: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="flwr.dbcl"):
        strategy, trained, evaluated = play(some(fraction_evaluate=share), lanes=lanes, insecure_seed=1)
    assert sorted(trained) == list(range(ROUNDS))
    assert {len(nodes) for nodes in trained.values()} == {2}
    for round, nodes in evaluated.items():
        assert 1 <= round <= ROUNDS
        assert nodes <= trained.get(round, nodes)
        assert len(nodes) <= 2
    if share == 1.0:
        assert all(evaluated[round] == trained[round] for round in range(1, ROUNDS))
        assert f"of {NODES} nodes that were chosen to evaluate, 2 train in the next round" in caplog.text
    assert warnings(caplog, "evaluate") == []
    assert len(strategy.reports) == ROUNDS


def test_evaluating_changes_nothing_of_the_training() -> None:
    with_it, without = (
        play(some(fraction_evaluate=share), insecure_seed=3, lanes=1)[0].server.model.state_dict()
        for share in (1.0, 0.0)
    )
    assert all(tensor.equal(without[name]) for name, tensor in with_it.items())


def test_lanes_of_a_cohort_differ_by_one_node_at_most_though_nodes_evaluate() -> None:
    """Lanes are given out in the order in which nodes ask: onlookers would take the places of some of them."""
    lanes: dict[int, list[int]] = {}

    def note(sent: Any, answers: Any) -> None:
        for client in answers:
            lanes.setdefault(sent[client].round, []).append(sent[client].plan.lane)

    play(some(), observer=note, lanes=2)
    assert [sorted(found) for found in lanes.values()] == [[0, 1]] * ROUNDS


def test_all_evaluate_where_that_is_asked_for_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="flwr.dbcl"):
        _, trained, evaluated = play(some(), evaluate_cohort_only=False)
    assert [len(evaluated[round]) for round in range(1, ROUNDS + 1)] == [NODES] * ROUNDS
    assert {len(nodes) for nodes in trained.values()} == {2}
    (said,) = warnings(caplog, "evaluate")
    assert said.startswith("100% of the nodes evaluate and 25% train in a round: ")
    assert "fraction_evaluate=0.0, and evaluate_fn on the server" in said


class OfItsOwn(flower.Strategy):
    """A strategy without Flower's fractions: two nodes in turn train, and all evaluate."""

    def __init__(self) -> None:
        self.inner = flower.FedAvg()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        first = 2 * server_round % NODES
        messages = list(self.inner.configure_train(server_round, arrays, config, grid))
        return [each for each in messages if each.metadata.dst_node_id - 1000 in (first, first + 1)]

    def configure_evaluate(self, *arguments: Any) -> Iterable[Message]:
        return self.inner.configure_evaluate(*arguments)

    def aggregate_train(self, *arguments: Any) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return self.inner.aggregate_train(*arguments)

    def aggregate_evaluate(self, *arguments: Any) -> MetricRecord | None:
        return self.inner.aggregate_evaluate(*arguments)

    def summary(self) -> None:
        """Nothing to say."""


@pytest.mark.parametrize("cohort_only", [True, False])
def test_any_strategy_is_held_to_it_or_told_of(cohort_only: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="flwr.dbcl"):
        _, trained, evaluated = play(OfItsOwn(), evaluate_cohort_only=cohort_only)
    assert trained[2] == {6, 7}
    assert evaluated[2] == (trained[2] if cohort_only else set(range(NODES)))
    said = warnings(caplog, "sees the broadcast")
    assert [text.split(":")[0] for text in said] == (
        [] if cohort_only else ["6 nodes have seen round 2 and do not train in it"]
    )


def test_what_the_strategy_is_configured_with_arrives_in_rounds_that_were_drawn_before() -> None:
    seen: list[Any] = []
    app = clients(before=lambda client, round, message: seen.append(dict(message.content["config"])))  # type: ignore[arg-type, return-value]
    DoubleBlind(some(), net(), SketchConfig(coverage="hidden")).start(
        LocalGrid(app, NODES), num_rounds=3, train_config=ConfigRecord({"lr": 0.5})
    )
    assert seen == [{"lr": 0.5, "server-round": round} for round in (1, 1, 2, 2, 3, 3)]


# --- transcripts ----------------------------------------------------------------------------------------------------


def recorder(folder: Path, strategy: DoubleBlind) -> Recorder:
    setting = Setting("net", (1, 1, 20), 3, TRAINING.settings(), clients=NODES, cohort=2)
    return Recorder(folder, [*map(str, range(NODES)), "server"], strategy.server, setting)


def rounds_of(folder: Path, client: int) -> tuple[list[int], list[int]]:
    """The rounds that a client has seen, and those in which it has an update."""
    if not any((folder / f"client-{client}").glob("*.safetensors")):
        return [], []
    transcript = Transcript(folder / f"client-{client}")
    return transcript.rounds, [seen.round for seen in transcript if seen.updates]


@pytest.mark.parametrize("cohort_only", [True, False])
def test_a_transcript_has_every_broadcast_that_reached_the_client(tmp_path: Path, cohort_only: bool) -> None:
    told: dict[str, Told] = {"train": {}, "evaluate": {}}

    def note(message: Message) -> None:
        if message.metadata.dst_node_id >= 1000:
            round = dbcl.protocol.decode_broadcast(message.content["dbcl"]["broadcast"]).round
            told[message.metadata.message_type].setdefault(message.metadata.dst_node_id - 1000, set()).add(round)

    strategy = DoubleBlind(
        some(), net(), SketchConfig(coverage="hidden"), evaluate_cohort_only=cohort_only, insecure_seed=2
    )
    strategy.observer = recorder(tmp_path, strategy)
    strategy.start(LocalGrid(clients(), NODES, hook=note), num_rounds=ROUNDS)
    for client in range(NODES):
        trained, evaluated = (told[phase].get(client, set()) for phase in ("train", "evaluate"))
        assert rounds_of(tmp_path, client) == (sorted(trained | evaluated), sorted(trained))
        if not cohort_only:
            assert evaluated == set(range(1, ROUNDS + 1))  # with the last, which nobody trained in
    assert Transcript(tmp_path / "server").rounds == list(range(ROUNDS))
    assert len(Truth(tmp_path).cohort(1)) == 2
    assert len(Truth(tmp_path).weights(ROUNDS)) == 6
    assert not (tmp_path / "truth" / f"{ROUNDS + 1:06d}.safetensors").exists()


def test_who_was_refused_or_did_not_answer_has_seen_the_broadcast(tmp_path: Path) -> None:
    def twist(client: int, round: int, answer: Message) -> Message:
        if client == 1 and round == 1:
            raise ValueError("out of paper")
        return altered(answer, lambda update: dbcl.Update(9, "ab", {}, 1)) if client == 2 and round == 0 else answer

    strategy = DoubleBlind(flower.FedAvg(fraction_evaluate=0.0), net(), SketchConfig(coverage="hidden"))
    strategy.observer = recorder(tmp_path, strategy)
    strategy.start(LocalGrid(clients(twist), NODES), num_rounds=2)
    assert [report.accepted for report in strategy.reports] == [NODES - 1, NODES - 1]
    assert rounds_of(tmp_path, 0) == ([0, 1], [0, 1])
    assert rounds_of(tmp_path, 1) == ([0, 1], [0])
    assert rounds_of(tmp_path, 2) == ([0, 1], [1])
    assert sorted(Truth(tmp_path).cohort(0)) == [0, 1, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_a_run_that_goes_on_remembers_who_was_shown_the_open_round(tmp_path: Path, late: bool, lanes: int) -> None:
    """The run dies in its second training, before or after the messages; another cohort may then be asked."""

    def make() -> DoubleBlind:
        strategy = DoubleBlind(
            some(),
            net(),
            SketchConfig(lanes=lanes, coverage="hidden"),
            evaluate_cohort_only=False,
            checkpoint=tmp_path / "kept",
        )
        strategy.observer = recorder(tmp_path / "seen", strategy)
        return strategy

    with pytest.raises(CrashError):
        make().start(CrashingGrid(clients(), NODES, at=3, late=late), num_rounds=3)
    make().start(LocalGrid(clients(), NODES), num_rounds=3)
    for client in range(NODES):
        assert rounds_of(tmp_path / "seen", client)[0][-3:] == [1, 2, 3]
    make().start(LocalGrid(clients(), NODES), num_rounds=3)  # nothing is left to play, and nothing is forgotten
    for client in range(NODES):
        assert rounds_of(tmp_path / "seen", client)[0][-3:] == [1, 2, 3]
    make().start(LocalGrid(clients(), NODES), num_rounds=4)
    for client in range(NODES):
        assert rounds_of(tmp_path / "seen", client)[0][-4:] == [1, 2, 3, 4]
    assert Transcript(tmp_path / "seen" / "server").rounds == [0, 1, 2, 3]


# --- few nodes ------------------------------------------------------------------------------------------------------


def test_few_nodes_in_a_round_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="flwr.dbcl"):
        play(some(), rounds=3)
    (said,) = warnings(caplog, "fewer than")
    assert said.startswith("2 nodes train in a round: with fewer than 10, ")
    assert "AUC 0.95" in said
    assert "DoubleBlind(privacy=...)" in said


QUIET: dict[str, Callable[[], tuple[int, DoubleBlind]]] = {
    "ten": lambda: (10, DoubleBlind(flower.FedAvg(fraction_evaluate=0.0), net(), SketchConfig(coverage="hidden"))),
    "no secrets": lambda: (
        4,
        DoubleBlind(flower.FedAvg(fraction_evaluate=0.0), net(), SketchConfig(coverage="hidden"), insecure_seed=0),
    ),
    "no veil": lambda: (
        4,
        DoubleBlind(flower.FedAvg(fraction_evaluate=0.0), net(), SketchConfig(veil=0.0, coverage="hidden")),
    ),
    "a guarantee": lambda: (
        4,
        DoubleBlind(
            flower.FedAvg(fraction_evaluate=0.0),
            net(),
            SketchConfig(coverage="hidden"),
            privacy=PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=4, clients=4, cohort=4),
        ),
    ),
}


@pytest.mark.parametrize("case", QUIET)
def test_otherwise_there_is_no_such_warning(case: str, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    nodes, strategy = QUIET[case]()
    app = clients()
    privacy = strategy.server.privacy
    if privacy is not None:
        app = ClientApp(mods=[GuaranteeMod(privacy, tmp_path)])
        app.train()(lambda message, context: reply(blinded(net(), message), message, examples=5))
    with caplog.at_level(logging.WARNING, logger="flwr.dbcl"):
        strategy.start(LocalGrid(app, nodes), num_rounds=1)
    assert strategy.reports[0].accepted == nodes
    assert warnings(caplog, "fewer than") == []
