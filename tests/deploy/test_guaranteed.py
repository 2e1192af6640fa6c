"""The preset `guaranteed` in a real deployment: ten nodes over TLS, two of which are killed within a round.

The server's side keeps all messages that it sends and receives. Nothing in them reveals anything twice, and with the
nodes' own keys, which only the test knows, every sum turns out to be that of their gradients and of one noise stream
each, which went on after the node was killed.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flower import recording
from flower.revealed import ServerView
from torch import Tensor

import dbcl
from dbcl.engines import LocalTraining
from dbcl.flower import make_key
from dbcl.flower.identity import key_name
from dbcl.objective import cross_entropy
from dbcl.privacy import PrivacyPlan
from dbcl.protocol import checkpoint
from dbcl.protocol.codec import CHECKPOINT, unpack
from dbcl.protocol.secagg import NoisySum
from dbcl.protocol.secagg.vectors import flat
from dbcl.state import State
from deploy.federation import APP, MINUTE, Federation

pytestmark = [pytest.mark.slow, pytest.mark.deploy]

NODES, ROUNDS = 10, 3
HELLO, MESSAGES = 1, 5
"""Messages to a node before its first round, and in a round without a fault."""
MASK, REVEAL = 3, 5
"""Number of a message in its round: to send the masked vector, and to take the masks off the sum."""
MASKING, REVEALING = 2, 5
"""Nodes that are killed in the second round, with these messages in hand."""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """The example app, whose server keeps its messages."""
    folder = tmp_path / "app"
    shutil.copytree(APP, folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(recording.__file__, folder / "dbcl_app" / "recording.py")
    server = folder / "dbcl_app" / "server_app.py"
    text, start = server.read_text(), "strategy.start(grid=grid"
    assert text.count(start) == 1
    text = text.replace(start, f"strategy.start(grid=recorded(grid, {str(tmp_path / 'messages')!r})")
    server.write_text(text.replace("import dbcl.flower\n", "import dbcl.flower\nfrom .recording import recorded\n"))
    return folder


def test_a_guarantee_outlives_nodes_that_are_killed(tmp_path: Path, app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(APP))
    from dbcl_app.guarantee import plan_of

    keys, folder, secrets, began = tmp_path / "keys", tmp_path / "run", tmp_path / "secrets", time.monotonic()
    subprocess.run([sys.executable, APP / "make_keys.py", keys, "--nodes", str(NODES)], check=True)
    own = [make_key(secrets / f"partition-{number}") for number in range(NODES)]
    (tmp_path / "keys.txt").write_text("\n".join(own))
    config = f'preset="guaranteed" rounds={ROUNDS} secrets="{secrets}" keys="{tmp_path / "keys.txt"}"'
    with Federation(tmp_path / "federation", keys, app) as federation:

        def told(what: str) -> None:
            print(f"{time.monotonic() - began:6.1f} s  {what}", flush=True)

        def await_message(node: int, number: int) -> None:
            def received() -> bool:
                return federation.log_of(node).count("Receiving: train message") >= number

            federation.wait(received, f"message {number} to node {node}", 15 * MINUTE)

        def die_and_come_back(node: int) -> None:
            federation.kill(federation.nodes[node])
            told(f"node {node} is killed")
            # Flower lets nobody come back under a key that it believes to be online.
            federation.wait(lambda: federation.online() == NODES - 1, "the SuperLink to notice", 3 * MINUTE)
            federation.start_node(node, NODES, config)
            federation.wait(lambda: federation.online() == NODES, "the node to be back", 2 * MINUTE)
            told(f"node {node} is back")

        federation.start_superlink()
        for number in range(NODES):
            federation.flwr("supernode", "register", str(keys / f"node{number}.pub"), "trial")
            federation.start_node(number, NODES, config)
        federation.wait(lambda: federation.online() == NODES, "the nodes", 3 * MINUTE)
        told("all nodes are there")
        settings: dict[str, Any] = {"preset": "guaranteed", "min_nodes": NODES, "round_timeout": 180.0}
        run = federation.run(rounds=ROUNDS, checkpoint=str(folder), **settings)
        await_message(MASKING, HELLO + MESSAGES + MASK)
        die_and_come_back(MASKING)  # the others have masked: the round begins anew
        await_message(REVEALING, HELLO + MESSAGES + MASK + REVEAL)
        # All have signed, and the others take the masks off. The server waits for this node, at most `round_timeout`:
        # Flower reports a message as lost only as long as its node is away.
        die_and_come_back(REVEALING)
        federation.wait(lambda: federation.status(run).startswith("finished"), "the end", 15 * MINUTE)
        told("the run has ended")
        assert federation.status(run) == "finished:completed", federation.logs()

    names = [key_name(bytes.fromhex(key)) for key in own]
    seen = ServerView.of(recording.read(tmp_path / "messages"))
    seen.assert_nothing_is_revealed_twice(names, ROUNDS)
    # The faults happened: a roster whose sum nobody signed, and a sum that one node did not help to reveal.
    assert [len(seen.rosters[round]) for round in range(ROUNDS)] == [1, 2, 1]
    assert [len(seen.masked[round]) for round in range(ROUNDS)] == [NODES, 2 * NODES - 1, NODES]
    assert [len(seen.reveals[round]) for round in range(ROUNDS)] == [NODES, NODES - 1, NODES]
    plan = plan_of("digits", NODES, ROUNDS)
    server = checkpoint.load(folder).part("server")
    assert_budget_is_counted_once(plan, server, secrets, names)
    assert_sums_are_of_one_stream_of_noise_each(plan, seen, server.part("weights").part("model").tensors, secrets)


# The budget, on both sides


def assert_budget_is_counted_once(plan: PrivacyPlan, server: State, secrets: Path, names: list[str]) -> None:
    assert server.values["round"]["number"] == ROUNDS
    uses = server.part("guarantee").part("participation").values["uses"]
    assert uses == {name: [ROUNDS, ROUNDS - 1] for name in names}
    for number in range(NODES):
        noise = kept_by(secrets, number).part("noise")
        assert noise.part("turns").values["uses"] == {"itself": [ROUNDS, ROUNDS - 1]}
        assert noise.part("noise").values["round"] == ROUNDS
    spent = plan.spent(rounds=ROUNDS, participations=ROUNDS)
    assert spent.epsilon == pytest.approx(plan.epsilon, rel=2e-3)  # a hundredth of delta is kept for the rounding
    assert spent.epsilon <= plan.epsilon


def kept_by(secrets: Path, number: int) -> State:
    data = (secrets / f"partition-{number}" / "secure.dbcl").read_bytes()
    return State(*unpack(CHECKPOINT, data))


# The sums, with the nodes' keys


def assert_sums_are_of_one_stream_of_noise_each(
    plan: PrivacyPlan, seen: ServerView, end: dict[str, Tensor], secrets: Path
) -> None:
    """Weights of the next broadcast are those of this one, plus all gradients and each node's noise of the round."""
    from dbcl_app.guarantee import CLIP, features, head
    from dbcl_app.task import load_part

    sent = [next(iter(seen.broadcasts[round].values())) for round in range(ROUNDS)]
    keys = [kept_by(secrets, number).part("noise").part("noise").values["key"] for number in range(NODES)]
    assert len(set(keys)) == NODES
    silos = [NoisySum.of_client(plan, bytes.fromhex(key)) for key in keys]
    parts = [load_part("digits", number, NODES) for number in range(NODES)]
    data = [features("digits", x, y) for x, y in parts]
    training = LocalTraining(lr=plan.clip / CLIP, steps=1, example_clip=CLIP, separation=plan.separation)
    held = [*(broadcast.tensors for broadcast in sent), end]
    weights = [flat({part.name: own[part.name] for part in sent[0].plan.tensors}) for own in held]
    for broadcast, moved in zip(sent, np.diff(weights, axis=0), strict=True):
        expected = np.zeros(plan.values)
        for silo, examples in zip(silos, data, strict=True):
            model = dbcl.blinded(head(), broadcast)
            made = training.clipped_update(model, broadcast, examples, seed=bytes(32), client=0, loss=cross_entropy)
            expected += silo.vector(made, broadcast)[0] * silo.grid
        noise = plan.shares.noise(NODES) * silos[0].grid
        # The weights are in float32; another stream of one node would move each value by a third of the noise.
        assert np.abs(moved * plan.per_round - expected).max() < 0.01 * noise
        assert np.abs(expected).max() > 3 * noise
