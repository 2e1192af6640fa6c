"""Secure aggregation in a real deployment: TLS, a process for every message, and a node that dies within a round."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dbcl.flower.identity import key_name
from dbcl.protocol import checkpoint
from deploy.federation import APP, MINUTE, Federation

pytestmark = [pytest.mark.slow, pytest.mark.deploy]

NODES, ROUNDS = 5, 2
SECAGG = "SecAggConfig(clip=4.0, weight_cap=2000, min_cohort=3, colluding=0.0)"


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """The example app, with what a user adds to it."""
    folder = tmp_path / "app"
    shutil.copytree(APP, folder, ignore=shutil.ignore_patterns("__pycache__"))
    mod = f"dbcl.flower.SecureMod({SECAGG}, folder={str(tmp_path / 'secrets')!r})"
    needed = "import dbcl.flower\nfrom dbcl.protocol.secagg import SecAggConfig\n"
    changes = {
        "client_app.py": {"import dbcl.flower\n": needed, "mods=[guarantee]": f"mods=[{mod}]"},
        "server_app.py": {
            "import dbcl.flower\n": needed,
            "dbcl.SketchConfig(": "dbcl.SketchConfig(lanes=1, ",
            "        insecure_seed=seed,\n": f"        insecure_seed=seed,\n        secagg={SECAGG},\n",
        },
    }
    for file, pairs in changes.items():
        text = (folder / "dbcl_app" / file).read_text()
        for old, new in pairs.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (folder / "dbcl_app" / file).write_text(text)
    return folder


# Of five messages in a round it dies at one. Before its signature has come the round begins anew once it is back; after
# that the others take the masks off.
@pytest.mark.parametrize("message", [1, 2, 3, 4, 5])
def test_a_node_that_dies_within_a_round_and_starts_again_costs_no_round(
    tmp_path: Path, app: Path, message: int
) -> None:
    keys, folder = tmp_path / "keys", tmp_path / "run"
    subprocess.run([sys.executable, APP / "make_keys.py", keys, "--nodes", str(NODES)], check=True)
    with Federation(tmp_path / "federation", keys, app) as federation:
        federation.start_superlink()
        for number in range(NODES):
            federation.flwr("supernode", "register", str(keys / f"node{number}.pub"), "trial")
            federation.start_node(number, of=NODES)
        federation.wait(lambda: federation.online() == NODES, "the nodes", MINUTE)
        run = federation.run(rounds=ROUNDS, epochs=1, min_nodes=3, round_timeout=150.0, checkpoint=str(folder), lr=0.1)

        def messages(number: int) -> int:
            return federation.log_of(number).count("Receiving: train message")

        asked_for_its_key = 1
        until = asked_for_its_key + 5 + message
        federation.wait(lambda: messages(2) == until, f"message {message} of the second round", 8 * MINUTE)
        federation.kill(federation.nodes[2])
        # Flower lets nobody come back under a key that it believes to be online.
        federation.wait(lambda: federation.online() == NODES - 1, "the SuperLink to notice", 2 * MINUTE)
        federation.start_node(2, of=NODES)
        federation.wait(lambda: federation.online() == NODES, "the node to be back", MINUTE)
        federation.wait(lambda: federation.status(run).startswith("finished"), "the end", 10 * MINUTE)
        assert federation.status(run) == "finished:completed", federation.logs()

    state = checkpoint.load(folder)
    history = dict(state.values["flower"]["history"][0])
    assert [history[number]["dbcl-accepted"] for number in range(1, ROUNDS + 1)] == [NODES] * ROUNDS
    known = set(state.part("names").values["nodes"].values())
    own = {key_name(bytes.fromhex((place / "public-key").read_text())) for place in (tmp_path / "secrets").iterdir()}
    assert known == own  # each kept its key from process to process
    assert len(own) == NODES
