"""A real deployment of the example app on this machine: safe connections, faults, and what is on the wire."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import dbcl
from dbcl.model import networks
from dbcl.protocol import checkpoint
from dbcl.protocol.codec import BROADCAST, UPDATE
from dbcl.testing.secrecy import leaks
from deploy.federation import APP, MINUTE, Federation, Relay

pytestmark = [pytest.mark.slow, pytest.mark.deploy]

NODES, ROUNDS = 3, 8
MARGIN = 0.05
"""How far apart the accuracies of two runs may be; eight undisturbed ones ended between 0.92 and 0.95."""


def rounds(folder: Path) -> list[int]:
    """The rounds that the ServerApp has measured, in the order in which it did."""
    path = folder / "metrics.jsonl"
    return [json.loads(line)["round"] for line in path.read_text().splitlines()] if path.exists() else []


def accuracy(folder: Path) -> float:
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["round"] == ROUNDS
    return float(last["accuracy"])


@dataclass
class Trial:
    """An undisturbed run without encryption: its folder, what crossed the wire, and the state after each round."""

    folder: Path
    down: list[bytes]
    up: list[bytes]
    states: list[dbcl.state.State]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    place = tmp_path_factory.mktemp("undisturbed")
    folder = place / "run"
    states: dict[int, dbcl.state.State] = {}

    def finished() -> bool:
        if any(folder.glob("round-*.dbcl")):  # the run itself keeps the last two only
            state = checkpoint.load(folder).part("server")
            states[state.values["round"]["number"]] = state
        return (folder / "model.safetensors").exists()

    with Federation(place / "federation") as federation:
        federation.start_superlink()
        with Relay(federation.port) as relay:
            federation.reached_at = relay.port
            for number in range(NODES):
                federation.start_node(number, of=NODES)
            federation.wait(lambda: federation.online() == NODES, "three nodes", MINUTE)
            run = federation.run(rounds=ROUNDS, min_nodes=NODES, checkpoint=str(folder))
            federation.wait(finished, "the undisturbed run", 5 * MINUTE)
            federation.wait(lambda: federation.status(run) == "finished:completed", "the run to be closed", MINUTE)
            down, up = ([bytes(stream) for stream in streams] for streams in (relay.down, relay.up))
    assert list(states) == list(range(ROUNDS + 1))
    return Trial(folder, down, up, list(states.values()))


def test_no_covered_weight_crosses_the_wire(undisturbed: Trial) -> None:
    assert accuracy(undisturbed.folder) > 0.9
    broadcasts = [dbcl.protocol.decode_broadcast(data) for data in containers(undisturbed.down, BROADCAST)]
    updates = [dbcl.protocol.decode_update(data) for data in containers(undisturbed.up, UPDATE)]
    server = dbcl.Server(networks.build("mnist-mlp"), dbcl.SketchConfig(ratio=2, veil=0.2))
    covered = [planned.name for planned in server.plan.tensors if planned.sketched]
    secrets, sent = {}, {}
    for number, state in enumerate(undisturbed.states):
        if number:  # the answers on the wire make of one checkpoint the next, so the capture has missed nothing
            server.close_round([update for update in updates if update.round == number - 1])
            for name, parameter in server.model.named_parameters():
                torch.testing.assert_close(parameter.detach(), state.part("weights").part("model").tensors[name])
        server.load_state(state)
        weights = dict(server.model.named_parameters())
        secrets |= {f"{name} in round {number}": weights[name].detach().clone() for name in covered}
        if number < ROUNDS:  # a checkpoint has the secrets of the round to come, so it makes the same broadcast
            lanes = {each.plan.digest: each.tensors for each in (server.open_round(f"asks {n}") for n in range(4))}
            received = [broadcast for broadcast in broadcasts if broadcast.round == number]
            assert len(received) == NODES
            assert {broadcast.plan.digest for broadcast in received} == lanes.keys()
            for broadcast in received:
                compact = lanes[broadcast.plan.digest]
                assert all(torch.equal(tensor, compact[name]) for name, tensor in broadcast.tensors.items())
                lane = f"of lane {broadcast.plan.lane} in round {number}"
                sent |= {f"compact {name} {lane}": compact[name] for name in covered}
    assert len(secrets) == 2 * (ROUNDS + 1)
    assert leaks([undisturbed.down, undisturbed.up, broadcasts, updates], secrets) == []

    # The search can find: every compact weight is seen on the wire, and a true one would be.
    for name, tensor in sent.items():
        assert leaks(undisturbed.down, {name: tensor}) != []
    for name, weight in secrets.items():
        assert leaks([undisturbed.up[0] + weight.numpy().tobytes()], {name: weight}) != []


def containers(streams: list[bytes], kind: int) -> Iterator[bytes]:
    """Cut the encoded messages of a kind out of what crossed the wire; decoding checks that each is whole."""
    start = b"DBCL" + bytes([1, kind])
    for stream in streams:
        at = stream.find(start)
        while at >= 0:
            body = at + 10 + int.from_bytes(stream[at + 6 : at + 10], "little")
            tensors = body + 8 + int.from_bytes(stream[body : body + 8], "little")
            offsets = [entry["data_offsets"][1] for entry in json.loads(stream[body + 8 : tensors]).values()]
            end = tensors + max(offsets) + 32
            yield stream[at:end]
            at = stream.find(start, end)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    subprocess.run([sys.executable, APP / "make_keys.py", folder, "--nodes", str(NODES + 1)], check=True)
    return folder


def test_only_nodes_get_through_the_proxy(tmp_path: Path, keys: Path) -> None:
    with Federation(tmp_path / "federation", keys) as federation:
        federation.start_superlink()
        federation.start_proxy()
        federation.flwr("supernode", "register", str(keys / "node0.pub"), "trial")
        federation.start_node(0, of=1)
        federation.wait(lambda: federation.online() == 1, "a node to come in through the proxy", MINUTE)
        for command in (["list"], ["supernode", "list"], ["supernode", "register", str(keys / "node1.pub")]):
            with pytest.raises(AssertionError, match="403"):
                federation.flwr(*command, "outside")
            federation.flwr(*command, "trial")


def test_a_deployment_outlives_its_parts(undisturbed: Trial, tmp_path: Path, keys: Path) -> None:
    folder = tmp_path / "run"
    with Federation(tmp_path / "federation", keys) as federation:
        federation.start_superlink()
        federation.start_proxy()
        for number in range(NODES):
            federation.flwr("supernode", "register", str(keys / f"node{number}.pub"), "trial")
            federation.start_node(number, of=NODES)
        federation.wait(lambda: federation.online() == NODES, "three nodes", MINUTE)

        stranger = federation.start_node(NODES, of=NODES)
        federation.wait(lambda: stranger.poll() is not None, "the unregistered node to give up", MINUTE)
        assert stranger.returncode != 0
        assert "Failed to activate SuperNode" in federation.log_of(NODES)
        assert federation.online() == NODES

        def go() -> str:
            return federation.run(rounds=ROUNDS, min_nodes=2, round_timeout=90.0, checkpoint=str(folder))

        def begun(number: int) -> int:
            return federation.log_of(number).count("Start `flwr-clientapp` process")

        def works(number: int) -> bool:
            return begun(number) > federation.log_of(number).count("Sending: train message")

        def wait_for_round(number: int) -> None:
            federation.wait(lambda: number in rounds(folder), f"round {number}", 3 * MINUTE)

        # In the third round a ClientApp dies, and a whole node; the round ends with the third answer.
        go()
        wait_for_round(2)
        spared = [1, 2]

        def struck() -> bool:
            """Kill each as soon as it has begun: it must not have answered before the other begins."""
            if 2 in spared and begun(2) == 3:
                spared.remove(2)
                federation.kill(federation.nodes[2])
            if 1 in spared and begun(1) == 3:
                clientapps = federation.clientapps(1)  # none yet: the log is ahead of the process
                for clientapp in clientapps:
                    os.kill(clientapp, signal.SIGKILL)
                if clientapps:
                    spared.remove(1)
            return not spared

        federation.wait(struck, "two nodes to work on round 3", MINUTE)
        assert rounds(folder) == [0, 1, 2]
        wait_for_round(3)

        # The node comes back with the same key.
        answered = federation.log_of(2).count("Sent successfully")
        federation.start_node(2, of=NODES)
        federation.wait(lambda: federation.online() == NODES, "the node to be back", MINUTE)

        # The ServerApp dies within a round; the same command goes on after the last whole one.
        federation.wait(lambda: works(0), "a round to begin", MINUTE)
        federation.wait(lambda: len(federation.serverapps()) == 1, "its ServerApp", MINUTE)
        (serverapp,) = federation.serverapps()
        os.kill(serverapp, signal.SIGKILL)
        before = rounds(folder)
        go()
        wait_for_round(before[-1] + 1)
        assert rounds(folder)[: len(before) + 1] == list(range(len(before) + 1))

        # The whole machine of the SuperLink dies; its database still knows the nodes, and the same command goes on.
        federation.wait(lambda: works(0), "the next round to begin", MINUTE)
        federation.kill(federation.superlink)
        assert rounds(folder)[-1] < ROUNDS, "all rounds were over before the last fault"
        federation.start_superlink()
        federation.wait(lambda: federation.online() == NODES, "the nodes to come back by themselves", 2 * MINUTE)
        last = go()
        federation.wait(lambda: federation.status(last).startswith("finished"), "the end", 5 * MINUTE)
        assert federation.status(last) == "finished:completed", federation.logs()
        assert federation.log_of(2).count("Sent successfully") > answered

        # The stranger was refused for want of registration and nothing else.
        federation.flwr("supernode", "register", str(keys / f"node{NODES}.pub"), "trial")
        federation.start_node(NODES, of=NODES)
        federation.wait(lambda: federation.online() == NODES + 1, "the fourth node, registered now", MINUTE)

    # No finished round was lost and none was played twice.
    assert rounds(folder) == list(range(ROUNDS + 1))
    accepted = {
        number: told["dbcl-accepted"] for number, told in checkpoint.load(folder).values["flower"]["history"][0]
    }
    assert list(accepted) == list(range(1, ROUNDS + 1))
    assert accepted[2] == NODES
    assert accepted[3] in (1, 2)  # Flower starts a ClientApp anew that dies before it has taken its message
    assert accepted[ROUNDS] == NODES
    assert abs(accuracy(folder) - accuracy(undisturbed.folder)) < MARGIN
