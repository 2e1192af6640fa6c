"""DoubleBlind under secure aggregation, over real messages: every message is answered by an app made anew."""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import context_from_proto, context_to_proto, message_to_proto
from flwr.proto.message_pb2 import Context as ContextBytes
from flwr.serverapp import strategy as flower
from torch import Tensor, nn

import dbcl
from dbcl.engines.secure import SecureServer
from dbcl.errors import ConfigError, ProtocolError
from dbcl.files import locked
from dbcl.flower import DoubleBlind, KeyRegistry, LocalGrid, SecureMod, blinded, reply
from dbcl.flower.grid import FIRST_NODE
from dbcl.privacy import PrivacyPlan
from dbcl.protocol import decode_broadcast
from dbcl.protocol.secagg import SecAggConfig, SecureClient, SigningKey
from dbcl.protocol.secagg.messages import Advert, decode_message
from dbcl.protocol.secagg.quantizer import LEVELS
from dbcl.testing.nested import nested

NODES = 6
CONFIG = SecAggConfig(clip=4.0, weight_cap=40, min_cohort=3, colluding=0.0)  # 4 of 6 must help
MOD = SecureMod(CONFIG)
EXCHANGES = range(1, 6)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))


def examples(node: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(node)
    count = 10 + node - FIRST_NODE
    x = torch.randn(count, 10, generator=generator)
    return x, x[:, :3].argmax(1)


def trained(message: Message, node: int) -> nn.Module:
    x, y = examples(node)
    model = blinded(net(), message)
    nn.functional.cross_entropy(model(x), y).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return model


def clients(mod: SecureMod | None = None) -> ClientApp:
    app = ClientApp(mods=[] if mod is None else [mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = trained(message, context.node_id)
        return reply(model, message, examples=len(examples(context.node_id)[0]), metrics={"loss": 0.123456789})

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return reply(None, message, examples=7, metrics={"loss": 0.123456789})

    return app


class FaultError(Exception):
    """What a node dies of."""


class Nodes(LocalGrid):
    """Nodes that are another process at every message, as far as anything in Python can tell.

    `faults` has for a node and an exchange (1 to 5) either "raises" or "silent": then its answer is lost on the way. A
    fault happens in one round, in all where `always` is set, or one time where `once` is.
    """

    def __init__(self, mod: SecureMod | None = MOD, nodes: int = NODES) -> None:
        super().__init__(clients(mod), nodes)
        self.mod = mod
        self.client_app = self.process  # type: ignore[assignment]
        self.faults: dict[tuple[int, int], str] = {}
        self.always = self.once = False
        self.absent: set[int] = set()
        self.before: Callable[[int], None] = lambda exchange: None
        self.sent: list[Message] = []
        self.came: list[Message] = []
        self._exchange = 0

    def process(self, message: Message, context: Context) -> Message:
        node = context.node_id
        if self.faults.get((node, self._exchange)) == "raises":
            raise FaultError(f"of {node}")
        own = context_from_proto(ContextBytes.FromString(context_to_proto(context).SerializeToString()))
        try:
            return clients(self.mod)(message, own)
        finally:
            context.state = own.state

    def get_node_ids(self) -> list[int]:
        return [node for node in self.contexts if node not in self.absent]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        sent = list(messages)
        if "hello" in sent[0].content["dbcl"]:
            return super().send_and_receive(sent)
        self._exchange = 1 if "broadcast" in sent[0].content["dbcl"] else self._exchange + 1
        self.before(self._exchange)
        self.sent += sent
        came = super().send_and_receive(sent)
        self.came += came
        heard = [each for each in came if self.faults.get((each.metadata.src_node_id, self._exchange)) != "silent"]
        if (self._exchange == 5 and not self.always) or (self.once and len(heard) < len(came)):
            self.faults = {}
        return heard


def double_blind(inner: flower.Strategy | None = None, **more: Any) -> DoubleBlind:
    settings: dict[str, Any] = {
        "coverage": "all",
        "lanes": 1,
        "insecure_seed": 0,
        "secagg": CONFIG,
        "round_timeout": 60.0,
    }
    return DoubleBlind(inner or flower.FedAvg(fraction_evaluate=0.0), net(), **nested({**settings, **more}))


def flat(strategy: DoubleBlind) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in strategy.server.model.parameters()])


def numbers(strategy: DoubleBlind, names: Iterable[str]) -> list[int]:
    known = {strategy._names.of(node): node for node in range(FIRST_NODE, FIRST_NODE + 20)}
    return sorted(known[name] for name in names)


def name_of(strategy: DoubleBlind, node: int) -> str:
    name = strategy._names.of(node)
    assert name is not None
    return name


def play(strategy: DoubleBlind, grid: Nodes, rounds: int) -> list[list[int]]:
    """Play up to a round; the nodes in the sum of each."""
    seen = []
    while strategy.server.round < rounds:
        strategy.start(grid, num_rounds=strategy.server.round + 1)
        assert strategy._secure is not None
        seen.append(numbers(strategy, (name for _, total in strategy._secure.rounds.totals for name in total.members)))
        assert len(seen[-1]) == strategy.reports[-1].accepted
    return seen


def rounding(count: int, members: Iterable[int]) -> float:
    """Bound on the error of a mean: a step for every update, and the rounding of the weights."""
    weight = sum(len(examples(node)[0]) for node in members) / CONFIG.weight_cap
    return 1.01 * count * CONFIG.clip / LEVELS / weight + 1e-4


def clear_round(members: Iterable[int]) -> Tensor:
    """Return the weights after a round without secure aggregation, with some of the nodes."""
    strategy = double_blind(
        secagg=None, validator=dbcl.protocol.UpdateValidator(max_influence=None, outlier_factor=None)
    )
    grid = Nodes(None)
    grid.absent = set(grid.contexts) - set(members)
    strategy.start(grid, num_rounds=1)
    return flat(strategy)


# The sum


def test_a_round_gives_the_weights_of_one_in_clear() -> None:
    strategy, grid = double_blind(), Nodes()
    start = flat(strategy)
    strategy.start(grid, num_rounds=1)
    expected = clear_round(grid.contexts)
    assert float((expected - start).abs().max()) > 20 * rounding(NODES, grid.contexts)  # there is something to miss
    assert float((flat(strategy) - expected).abs().max()) < rounding(NODES, grid.contexts)
    assert [report.accepted for report in strategy.reports] == [NODES]


def test_two_lanes_give_what_the_server_in_process_gives() -> None:
    strategy, grid = double_blind(lanes=2), Nodes()
    sketch = dbcl.SketchConfig(coverage="all", lanes=2)
    server = SecureServer(net(), sketch, secagg=CONFIG, masked=False, insecure_seed=0)
    strategy.start(grid, num_rounds=1)
    updates = {}
    for message in sorted(grid.sent[:NODES], key=lambda message: message.metadata.dst_node_id):
        node = message.metadata.dst_node_id
        broadcast = server.open_round(name_of(strategy, node))
        assert dbcl.encode(broadcast) == message.content["dbcl"]["broadcast"]
        own = trained(message, node)
        updates[name_of(strategy, node)] = dbcl.make_update(own, broadcast, examples=len(examples(node)[0]))
    server.close_round(updates)
    ends = [torch.cat([p.detach().flatten() for p in each.model.parameters()]) for each in (server, strategy.server)]
    assert float((ends[0] - ends[1]).abs().max()) < 2 * rounding(NODES, grid.contexts)
    assert strategy.reports[0].lanes == (3, 3)


def test_many_rounds_learn() -> None:
    strategy, grid, losses = double_blind(lanes=2), Nodes(), []

    def loss(number: int, arrays: Any) -> None:
        model = net()
        model.load_state_dict(arrays.to_torch_state_dict())
        own = [nn.functional.cross_entropy(model(x), y) for x, y in map(examples, grid.contexts)]
        losses.append(torch.stack(own).mean().item())

    strategy.start(grid, num_rounds=8, evaluate_fn=loss)
    assert losses[-1] < 0.95 * losses[0]
    assert {report.accepted for report in strategy.reports} == {NODES}


# Who is lost


@pytest.mark.parametrize("how", ["raises", "silent"])
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("round", [0, 1])
def test_a_node_that_is_lost_once_costs_an_attempt(round: int, exchange: int, how: str) -> None:
    """Before its signature has come the round begins anew, with all of them; after that the others take masks off."""
    strategy, grid = double_blind(), Nodes()
    play(strategy, grid, round)
    before, lost = flat(strategy), FIRST_NODE + 2
    models: list[Tensor] = []

    def recover(number: int) -> None:
        if number == 1:
            models.append(flat(strategy))
            grid.faults = {} if len(models) > 1 else grid.faults

    grid.faults, grid.before = {(lost, exchange): how}, recover
    (members,) = play(strategy, grid, round + 1)
    assert members == list(grid.contexts)
    assert len(models) == (2 if exchange <= 3 else 1)
    assert all(torch.equal(model, before) for model in models)
    strategy.start(grid, num_rounds=3)
    assert [report.accepted for report in strategy.reports] == [NODES] * 3


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_node_that_is_lost_in_all_attempts_of_the_first_round_is_no_part_of_its_group(exchange: int) -> None:
    strategy, grid = double_blind(), Nodes()
    lost = FIRST_NODE + 2
    grid.faults, grid.always = {(lost, exchange): "raises"}, True
    members = [node for node in grid.contexts if node != lost or exchange > 3]
    assert play(strategy, grid, 1) == [members]
    assert float((flat(strategy) - clear_round(members)).abs().max()) < rounding(NODES, members)
    grid.faults = {}
    assert play(strategy, grid, 3) == [members] * 2  # it is back, and its group has added up without it


@pytest.mark.parametrize(("nodes", "exchanges"), [(10, EXCHANGES), (12, [1, 3])])
def test_a_node_that_stays_silent_once_does_not_stop_the_run(nodes: int, exchanges: Iterable[int]) -> None:
    """The wedge: 10 or 12 nodes, sums of 8 or more, one node silent in the first round."""
    config = SecAggConfig(clip=4.0, weight_cap=40, min_cohort=8)
    for exchange in exchanges:
        strategy, grid = double_blind(secagg=config), Nodes(SecureMod(config), nodes=nodes)
        grid.faults, grid.once = {(FIRST_NODE + 4, exchange): "silent"}, True
        assert play(strategy, grid, 3) == [list(grid.contexts)] * 3


TEN = SecAggConfig(clip=4.0, weight_cap=40, min_cohort=8)


def of_ten(checkpoint: Path, **more: Any) -> DoubleBlind:
    """A server that begins with ten nodes: the inner strategy waits for all of them."""
    inner = flower.FedAvg(fraction_evaluate=0.0, min_available_nodes=10, min_train_nodes=10)
    return double_blind(inner, **{"secagg": TEN, "checkpoint": checkpoint, "round_timeout": 5.0, **more})


@pytest.mark.parametrize("exchange", [1, 3])
def test_a_group_that_lost_a_node_goes_on_though_its_strategy_waits_for_ten(exchange: int, tmp_path: Path) -> None:
    """The node is silent in all of round 1, and back from round 2 on, also where the server starts anew."""
    strategy, grid = of_ten(tmp_path / "server"), Nodes(SecureMod(TEN, tmp_path / "nodes"), nodes=10)
    lost = FIRST_NODE + 4
    grid.faults, grid.always = {(lost, exchange): "silent"}, True
    members = [node for node in grid.contexts if node != lost]
    assert play(strategy, grid, 1) == [members]
    grid.faults = {}
    assert play(strategy, grid, 2) == [members]
    strategy = of_ten(tmp_path / "server")
    assert play(strategy, grid, 4) == [members] * 2
    assert (strategy.strategy.min_available_nodes, strategy.strategy.min_train_nodes) == (10, 10)  # type: ignore[attr-defined]


def test_a_group_that_has_not_added_up_waits_for_as_many_nodes_as_its_strategy(tmp_path: Path) -> None:
    """Of ten nodes one is away for a moment in round 1: without it, the group would be one of nine for ever."""
    strategy, grid = of_ten(tmp_path / "server"), Nodes(SecureMod(TEN), nodes=10)
    grid.faults, grid.once = {(FIRST_NODE + 4, 1): "silent"}, True
    looks = iter(range(100))

    def there() -> list[int]:
        away = FIRST_NODE + 4 if not grid.faults and next(looks) < 3 else None
        return [node for node in grid.contexts if node != away]

    grid.get_node_ids = there  # type: ignore[method-assign]
    assert play(strategy, grid, 2) == [list(grid.contexts)] * 2


def test_three_attempts_and_the_remedy_where_a_node_is_lost_later(tmp_path: Path) -> None:
    strategy, grid = of_ten(tmp_path / "server"), Nodes(SecureMod(TEN, tmp_path / "nodes"), nodes=10)
    assert play(strategy, grid, 1) == [list(grid.contexts)]
    grid.faults, grid.always = {(FIRST_NODE + 4, 2): "silent"}, True
    attempts: list[int] = []
    grid.before = lambda exchange: attempts.append(exchange)
    name = name_of(strategy, FIRST_NODE + 4)
    with pytest.raises(ProtocolError, match=rf"(?s){name} did not answer.*attempt 3 of 3.*remedy: start the nodes"):
        strategy.start(grid, num_rounds=4)
    assert attempts.count(1) == 3
    grid.faults = {}
    strategy = of_ten(tmp_path / "server")
    assert play(strategy, grid, 4) == [list(grid.contexts)] * 3


def test_where_too_many_are_lost_nothing_changes_and_the_run_can_go_on() -> None:
    strategy, grid = double_blind(), Nodes()
    grid.faults = {(FIRST_NODE + number, 3): "raises" for number in range(4)}
    grid.always = True
    before = flat(strategy)
    with pytest.raises(ProtocolError, match="no sum could be made, and nothing has changed"):
        strategy.start(grid, num_rounds=1)
    assert torch.equal(flat(strategy), before)
    assert strategy.server.round == 0
    grid.faults = {}
    strategy.start(grid, num_rounds=1)
    assert strategy.reports[0].accepted == NODES


def test_a_group_waits_for_a_node_that_is_away_and_names_it() -> None:
    strategy, grid = double_blind(), Nodes()
    strategy.start(grid, num_rounds=2)
    grid.absent = {FIRST_NODE + 5}
    name = name_of(strategy, FIRST_NODE + 5)
    with pytest.raises(ProtocolError, match=f"adds up with all its nodes or not at all: {name} is away, and must"):
        strategy.start(grid, num_rounds=5, timeout=0.5)
    grid.absent = set()
    strategy.start(grid, num_rounds=5, timeout=60.0)
    assert [report.accepted for report in strategy.reports] == [6] * 5


def test_of_two_batches_the_one_that_is_whole_goes_on() -> None:
    strategy, grid = double_blind(batches=2), Nodes(nodes=8)
    play(strategy, grid, 2)
    grid.absent = {FIRST_NODE + 2}
    assert play(strategy, grid, 5) == 3 * [list(grid.contexts)[1::2]]


def test_of_two_lanes_the_one_that_is_whole_counts() -> None:
    strategy, grid = double_blind(lanes=2), Nodes(nodes=8)
    strategy.start(grid, num_rounds=1)
    grid.faults = {(FIRST_NODE + 2, 2): "raises"}
    strategy.start(grid, num_rounds=2)
    assert sorted(strategy.reports[1].lanes) == [0, 4]
    lost = name_of(strategy, FIRST_NODE + 2)
    assert any("not at all" in reason and lost in reason for reason in strategy.reports[1].refused)


def test_lanes_stay_as_they_are_where_a_node_is_away() -> None:
    strategy, grid = double_blind(lanes=2), Nodes(nodes=8)
    strategy.start(grid, num_rounds=1)
    grid.absent = {FIRST_NODE + 3}  # its lane is not whole then
    assert play(strategy, grid, 3) == 2 * [list(grid.contexts)[::2]]


# Batches


def test_batches_stay_together_and_take_turns() -> None:
    strategy, grid = double_blind(batches=2), Nodes(nodes=8)
    assert play(strategy, grid, 4) == 2 * [list(grid.contexts)[::2], list(grid.contexts)[1::2]]


def test_newcomers_form_a_batch_of_their_own() -> None:
    strategy, grid = double_blind(), Nodes(nodes=9)
    late = list(grid.contexts)[5:]
    grid.absent = set(late)
    strategy.start(grid, num_rounds=1)
    grid.absent = set(late[2:])  # two are too few
    strategy.start(grid, num_rounds=2)
    grid.absent = set()
    assert play(strategy, grid, 4)[-1] == late
    assert [report.accepted for report in strategy.reports] == [5, 5, 5, 4]


def test_too_few_nodes_are_waited_for_and_named() -> None:
    strategy = double_blind(lanes=2)
    with pytest.raises(
        ProtocolError, match=r"5 are there, 0 of them may .* needed: 6 \(3 or more in each of 2 lanes"
    ) as error:
        strategy.start(Nodes(nodes=5), num_rounds=1, timeout=0.5)
    assert "min_cohort" in str(error.value)
    assert "min_train_nodes" not in str(error.value)


# With a guarantee, whose noise the server adds

PLAN = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.5, rounds=4, clients=8, cohort=4)
CLIPPED = SecAggConfig(clip=0.499, min_cohort=4, colluding=0.0)


def guaranteed(folder: Path, **more: Any) -> tuple[DoubleBlind, Nodes]:
    grid = Nodes(SecureMod(CLIPPED, folder, privacy=PLAN), nodes=8)
    return double_blind(privacy=PLAN, secagg=CLIPPED, insecure_seed=None, **more), grid


def test_with_a_guarantee_nodes_take_turns_in_the_batches_that_it_plans(tmp_path: Path) -> None:
    strategy, grid = guaranteed(tmp_path)
    assert play(strategy, grid, 4) == 2 * [list(grid.contexts)[::2], list(grid.contexts)[1::2]]
    assert strategy.server.keeper.tracker is not None
    assert {strategy.server.keeper.tracker.uses(name_of(strategy, node)) for node in grid.contexts} == {2}


def test_the_nodes_count_whatever_the_server_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not count asks the nodes of round 0 again in round 1."""
    strategy, grid = guaranteed(tmp_path)
    ((*first,),) = play(strategy, grid, 1)
    ledgers = {path: path.read_bytes() for path in tmp_path.glob("*/participation.dbcl")}
    assert len(ledgers) == 4
    assert strategy._secure is not None
    strategy._secure._batches = [[name_of(strategy, node) for node in first]]
    grid.absent = set(grid.contexts) - set(first)
    monkeypatch.setattr(strategy.server.keeper.tracker, "refusal", lambda *_: None)
    grid.came.clear()
    with pytest.raises(ProtocolError, match="no sum could be made"):
        strategy.start(grid, num_rounds=2)
    assert len(grid.came) == 4 * 3  # three attempts, of which no key and no update came
    assert all("took part in round 0, and may again from round 2 on" in each.error.reason for each in grid.came)
    assert {path: path.read_bytes() for path in ledgers} == ledgers


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (None, "it does not count its own participations"),
        (replace(PLAN, rounds=8, participations=4), "by another plan than the server's"),
    ],
)
def test_a_node_without_a_ledger_of_the_plan_takes_no_part(
    plan: PrivacyPlan | None, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy, grid = guaranteed(tmp_path)
    grid.mod = SecureMod(CLIPPED, tmp_path, privacy=plan)
    with pytest.raises(ProtocolError, match="none of 8 nodes shows a key"):
        strategy.start(grid, num_rounds=1)
    assert reason in caplog.text
    with pytest.raises(ConfigError, match="a guarantee needs a folder"):
        SecureMod(CLIPPED, privacy=PLAN)


def test_a_node_that_is_lost_for_a_moment_does_not_leave_a_round_without_a_batch(tmp_path: Path) -> None:
    """The others of its batch have counted the round: if the second batch took its place, round 1 had nobody left."""
    strategy, grid = guaranteed(tmp_path, round_timeout=5.0)
    lost = FIRST_NODE + 4
    grid.faults, grid.once = {(lost, 2): "silent"}, True
    looks = iter(range(100))

    def there() -> list[int]:
        away = lost if not grid.faults and next(looks) < 2 else None
        return [node for node in grid.contexts if node != away]

    grid.get_node_ids = there  # type: ignore[method-assign]
    assert play(strategy, grid, 4) == 2 * [list(grid.contexts)[::2], list(grid.contexts)[1::2]]


# Once, and by nobody else


def again(grid: Nodes, message: Message) -> Message:
    """The same message to the same node once more."""
    copy = Message(RecordDict({"dbcl": message.content["dbcl"]}), message.metadata.dst_node_id, "train")
    (answer,) = LocalGrid.send_and_receive(grid, [copy])
    return answer


@pytest.mark.parametrize("kept", ["context", "folder"])
def test_no_message_is_answered_twice(kept: str, tmp_path: Path) -> None:
    second: list[Message] = []

    class Twice(Nodes):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
            sent = list(messages)
            came = super().send_and_receive(sent)
            if "step" in sent[0].content["dbcl"]:
                second.extend(again(self, message) for message in sent)
            return came

    grid = Twice(SecureMod(CONFIG, folder=tmp_path if kept == "folder" else None))
    double_blind().start(grid, num_rounds=1)
    assert len(second) == 4 * NODES
    assert all(answer.has_error() for answer in second)
    assert all(again(grid, message).has_error() for message in grid.sent if "step" in message.content["dbcl"])


def test_with_a_folder_an_older_context_gives_no_second_answer(tmp_path: Path) -> None:
    """As where a server sends two messages at once, and Flower starts two processes with the same context."""
    grid = Nodes(SecureMod(CONFIG, folder=tmp_path))
    double_blind().start(grid, num_rounds=1)
    for context in grid.contexts.values():
        context.state = RecordDict()
    steps = [message for message in grid.sent if "step" in message.content["dbcl"]]
    assert len(steps) == 4 * NODES
    assert all(again(grid, message).has_error() for message in steps)
    with locked(tmp_path / "partition-0"):
        answer = again(grid, next(each for each in grid.sent if each.metadata.dst_node_id == FIRST_NODE))
    assert "is in use by process" in answer.error.reason
    assert oct((tmp_path / "partition-0" / "secure.dbcl").stat().st_mode & 0o777) == "0o600"


def restarted(grid: Nodes, nodes: Iterable[int]) -> None:
    """Let nodes start again without authentication keys: they have other ids then, and an empty context."""
    for node in list(nodes):
        old = grid.contexts.pop(node)
        grid.contexts[node + 10] = Context(0, node + 10, old.node_config, RecordDict(), old.run_config)


def test_with_a_folder_a_node_that_starts_anew_is_still_itself(tmp_path: Path) -> None:
    grid, strategy = Nodes(SecureMod(CONFIG, folder=tmp_path)), double_blind()
    strategy.start(grid, num_rounds=1)
    restarted(grid, [FIRST_NODE + 2, FIRST_NODE + 3])
    strategy.start(grid, num_rounds=2)
    assert [report.accepted for report in strategy.reports] == [NODES, NODES]
    keys = tmp_path / "keys.txt"
    keys.write_text("\n".join(path.read_text() for path in tmp_path.glob("*/public-key")))
    strategy.start(again := Nodes(SecureMod(CONFIG, tmp_path, KeyRegistry.read(keys))), num_rounds=3)
    assert len(keys.read_text().split()) == strategy.reports[2].accepted == len(again.contexts)


def test_without_a_folder_a_node_that_starts_anew_is_another_one() -> None:
    grid, strategy = Nodes(), double_blind()
    strategy.start(grid, num_rounds=1)
    restarted(grid, [FIRST_NODE + 2])
    with pytest.raises(ProtocolError, match="is away, and must start again, each with its own folder"):
        strategy.start(grid, num_rounds=2, timeout=0.5)


def test_the_state_of_another_node_is_refused() -> None:
    ann, bob = (SecureClient(name, SigningKey(), CONFIG) for name in ("ann", "bob"))
    with pytest.raises(ProtocolError, match="the state is of ann, and this is bob"):
        bob.load_state(ann.state())
    with pytest.raises(ProtocolError, match=r"the state of bob cannot be read \(KeyError\)"):
        bob.load_state(dbcl.state.State({}, {}))


def test_a_registry_says_who_may_take_part() -> None:
    grid = Nodes(SecureMod(CONFIG, registry=KeyRegistry(keys=frozenset([SigningKey().public]))))
    with pytest.raises(ProtocolError, match="no sum could be made"):
        double_blind().start(grid, num_rounds=1)
    reasons = [each.error.reason for each in grid.came if each.has_error()]
    assert any("its key is not registered" in reason for reason in reasons)


# What leaves the nodes


def words(values: np.ndarray[Any, Any]) -> list[bytes]:
    return [values[:2].astype(kind).tobytes() for kind in (np.float16, np.float32, np.float64)]


def left_in_clear(grid: Nodes, strategy: DoubleBlind) -> list[str]:
    """What of the nodes' updates, metrics and examples is in the bytes that left them."""
    carried = b"".join(message_to_proto(each).SerializeToString() for each in grid.came)
    found = []
    for message in grid.sent[:NODES]:
        node = message.metadata.dst_node_id
        broadcast = decode_broadcast(message.content["dbcl"]["broadcast"])
        update = dbcl.make_update(trained(message, node), broadcast, examples=1)
        for name, tensor in update.tensors.items():
            values = tensor.double().numpy().ravel()
            if any(each in carried for each in words(values)):
                found.append(f"{node}: {name}")
    secrets = {"metrics": b"loss", "a metric": np.float64(0.123456789).tobytes(), "examples": b"examples"}
    return found + [what for what, secret in secrets.items() if secret in carried]


def test_no_update_leaves_a_node() -> None:
    strategy, grid = double_blind(), Nodes()
    strategy.start(grid, num_rounds=1)
    assert len(grid.came) == 5 * NODES
    assert left_in_clear(grid, strategy) == []
    clear, grid = double_blind(secagg=None), Nodes(None)
    clear.start(grid, num_rounds=1)
    assert len(left_in_clear(grid, clear)) >= 4 * NODES  # the search finds them where they are


def test_nothing_but_the_rounds_counts_is_reported() -> None:
    strategy = double_blind()
    result = strategy.start(Nodes(), num_rounds=1)
    assert dict(result.train_metrics_clientapp[1]) == {"dbcl-accepted": NODES, "dbcl-refused": 0}


def test_a_node_keeps_its_update_no_longer_than_it_must() -> None:
    grid, kept = Nodes(), {}

    def note(exchange: int) -> None:
        if exchange > 1:
            kept[exchange] = grid.contexts[FIRST_NODE].state["dbcl-secure"]["state"]

    grid.before = note
    double_blind().start(grid, num_rounds=1)
    message = next(each for each in grid.sent if each.metadata.dst_node_id == FIRST_NODE)
    broadcast = decode_broadcast(message.content["dbcl"]["broadcast"])
    update = dbcl.make_update(trained(message, FIRST_NODE), broadcast, examples=1)
    secret = next(iter(update.tensors.values())).double().numpy().ravel()[:2].tobytes()
    assert {exchange: secret in data for exchange, data in kept.items()} == {2: True, 3: True, 4: False, 5: False}


# A server that dies


class Killed(BaseException):
    pass


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_server_that_dies_begins_the_round_anew_with_new_keys(exchange: int, tmp_path: Path) -> None:
    grid, settings = Nodes(), {"checkpoint": tmp_path, "insecure_seed": None}
    double_blind(**settings).start(grid, num_rounds=1)

    def die(number: int) -> None:
        if number == exchange:
            raise Killed

    grid.before = die
    strategy = double_blind(**settings)
    with pytest.raises(Killed):
        strategy.start(grid, num_rounds=2)
    before = flat(strategy)
    first = len(grid.sent)
    grid.before = lambda number: None
    strategy = double_blind(**settings)
    assert torch.equal(flat(strategy), before)
    strategy.start(grid, num_rounds=2)
    assert [report.accepted for report in strategy.reports] == [NODES]
    rounds = [message.content["dbcl"]["broadcast"] for message in grid.sent if "broadcast" in message.content["dbcl"]]
    if exchange > 1:
        assert rounds[NODES : 2 * NODES] == rounds[2 * NODES :]  # the same broadcasts
    adverts = [each.content["dbcl"]["step"] for each in grid.came if not each.has_error()]
    keys = []
    for data in adverts:
        with contextlib.suppress(ProtocolError):
            advert = decode_message(Advert, data)
            keys += [advert.share_key, advert.mask_key]
    assert len(keys) == len(set(keys)) == 2 * NODES * (3 if exchange > 1 else 2)
    assert first < len(grid.sent)


def test_a_server_that_dies_in_its_first_round_remembers_whom_it_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They have signed who is in the sum: with one more, the difference would be that one."""
    grid = Nodes()
    grid.absent = {FIRST_NODE}

    def die(number: int) -> None:
        if number == 5:
            raise Killed

    grid.before = die
    with pytest.raises(Killed):
        double_blind(checkpoint=tmp_path).start(grid, num_rounds=1)
    grid.absent, grid.before = set(), lambda number: None
    assert play(double_blind(checkpoint=tmp_path), grid, 1) == [list(grid.contexts)[1:]]
    assert "begins anew" not in caplog.text


def test_a_run_that_goes_on_remembers_sums_and_batches(tmp_path: Path) -> None:
    grid, settings = Nodes(nodes=8), {"checkpoint": tmp_path, "batches": 2}
    strategy = double_blind(**settings)
    strategy.start(grid, num_rounds=3)
    resumed = double_blind(**settings)
    assert strategy._secure is not None
    assert resumed._secure is not None
    assert resumed._secure.state() == strategy._secure.state()
    assert play(resumed, grid, 4) == [list(grid.contexts)[1::2]]
    with pytest.raises(ProtocolError, match="is one with secure aggregation; go on as it began"):
        double_blind(checkpoint=tmp_path, secagg=None)


# What is refused


@pytest.mark.parametrize(
    ("inner", "more", "complaint"),
    [
        (flower.Krum(fraction_evaluate=0.0), {}, "no single one is seen; take FedAvg or FedProx"),
        (flower.FedMedian(fraction_evaluate=0.0), {}, "FedMedian makes more of the updates than their mean"),
        (flower.FedTrimmedAvg(fraction_evaluate=0.0), {}, "FedTrimmedAvg makes more"),
        (flower.FedAdam(fraction_evaluate=0.0), {}, "FedAdam makes more"),
        (
            flower.DifferentialPrivacyServerSideFixedClipping(flower.FedAvg(fraction_evaluate=0.0), 1.0, 1.0, 4),
            {},
            "DifferentialPrivacyServerSideFixedClipping makes more",
        ),
        (flower.FedAvg(fraction_evaluate=0.0, weighted_by_key="loss"), {}, r"counts by its examples"),
        (flower.FedAvg(), {}, r"take FedAvg\(fraction_evaluate=0.0\)"),
        (flower.FedAvg(fraction_evaluate=0.0, fraction_train=0.5), {}, r"take DoubleBlind\(batches=...\)"),
        (flower.FedAvg(fraction_evaluate=0.0), {"observer": lambda *_: None}, "there are none to show"),
        (
            flower.FedAvg(fraction_evaluate=0.0),
            {"validator": dbcl.protocol.UpdateValidator()},
            "nodes clip to SecAggConfig",
        ),
        (flower.FedAvg(fraction_evaluate=0.0), {"batches": 0}, "batches are 1 or more"),
        (flower.FedAvg(fraction_evaluate=0.0), {"batches": 2, "secagg": None}, "and go with `secagg`"),
    ],
)
def test_what_does_not_go_with_sums(inner: flower.Strategy, more: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        double_blind(inner, **more)


def test_a_strategy_that_takes_some_of_a_batch_is_refused() -> None:
    class Some(flower.FedAvg):
        def configure_train(self, *arguments: Any) -> list[Message]:
            return list(super().configure_train(*arguments))[1:]

    with pytest.raises(ConfigError, match="Some takes 5 of the 6 nodes of this round"):
        double_blind(Some(fraction_evaluate=0.0)).start(Nodes(), num_rounds=1)


def test_statistics_that_clients_measure_are_refused() -> None:
    model = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(ConfigError, match="use a normalisation without running statistics"):
        DoubleBlind(flower.FedAvg(fraction_evaluate=0.0), model, secagg=CONFIG)


def test_an_app_without_the_mod_sends_nothing() -> None:
    grid = Nodes(None)
    with pytest.raises(ProtocolError, match=r"none of 6 nodes shows a key.*the app needs a mod"):
        double_blind().start(grid, num_rounds=1)
    assert grid.came == []


def test_an_app_with_the_mod_gives_no_update_to_a_server_that_wants_one_in_clear() -> None:
    grid = Nodes()
    with pytest.raises(ProtocolError):
        double_blind(secagg=None).start(grid, num_rounds=1)
    assert len(grid.came) == NODES
    assert all("it was asked for an unprotected update" in answer.error.reason for answer in grid.came)


def test_an_app_with_the_mod_does_not_evaluate() -> None:
    grid = Nodes()
    broadcast = dbcl.encode(dbcl.Server(net()).open_round())
    message = Message(RecordDict({"dbcl": ConfigRecord({"broadcast": broadcast})}), FIRST_NODE, "evaluate")
    (answer,) = LocalGrid.send_and_receive(grid, [message])
    assert "what a node measures would leave it unprotected" in answer.error.reason


def test_another_config_on_the_nodes_is_refused() -> None:
    grid = Nodes(SecureMod(SecAggConfig(clip=2.0, weight_cap=40, min_cohort=3, colluding=0.0)))
    with pytest.raises(ProtocolError, match="no sum could be made"):
        double_blind().start(grid, num_rounds=1)
    reasons = [each.error.reason for each in grid.came if each.has_error()]
    assert any("its bound is 4.0 and must be 2.0" in reason for reason in reasons)
