"""Secure aggregation in a real deployment: TLS, a process for every message, and a node that dies within a round."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dbcl.protocol import checkpoint
from deploy.federation import APP, MINUTE, Federation

pytestmark = [pytest.mark.slow, pytest.mark.deploy]

NODES, ROUNDS = 5, 2
TERMS = "Terms(bound=4.0, most=2000, min_cohort=3, colluding=0.0)"


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """The example app, with what a user adds to it."""
    folder = tmp_path / "app"
    shutil.copytree(APP, folder, ignore=shutil.ignore_patterns("__pycache__"))
    mod = f"dbcl.flower.SecureMod({TERMS}, folder={str(tmp_path / 'secrets')!r})"
    needed = "import dbcl.flower\nfrom dbcl.protocol.secagg import Terms\n"
    changes = {
        "client_app.py": {"import dbcl.flower\n": needed, "app = ClientApp()": f"app = ClientApp(mods=[{mod}])"},
        "server_app.py": {
            "import dbcl.flower\n": needed,
            "        net(),\n": f"        net(), lanes=1, secure={TERMS},\n",
        },
    }
    for file, pairs in changes.items():
        text = (folder / "dbcl_app" / file).read_text()
        for old, new in pairs.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (folder / "dbcl_app" / file).write_text(text)
    return folder


# Of five messages in a round it dies at one. Before its masked update has come, the sum without it would show it by
# difference, so another one is left out as well; after that its update is in the sum, and others take the masks off.
@pytest.mark.parametrize(
    ("message", "accepted"), [(1, NODES - 2), (2, NODES - 2), (3, NODES - 2), (4, NODES), (5, NODES)]
)
def test_a_node_dies_within_a_round_and_the_others_add_up(
    tmp_path: Path, app: Path, message: int, accepted: int
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

        federation.wait(lambda: messages(2) == 5 + message, f"message {message} of the second round", 8 * MINUTE)
        federation.kill(federation.nodes[2])
        federation.wait(lambda: federation.status(run).startswith("finished"), "the end", 10 * MINUTE)
        assert federation.status(run) == "finished:completed", federation.logs()

    history = dict(checkpoint.load(folder).values["flower"]["history"][0])
    assert [history[number]["dbcl-accepted"] for number in (1, 2)] == [NODES, accepted]
    known = checkpoint.load(folder).part("secure").values["known"]["known"]
    assert len(known) == NODES
    for own in (tmp_path / "secrets").iterdir():  # each kept its key from process to process
        assert known.pop(own.name.replace("-", " ")) == (own / "public-key").read_text()
    assert known == {}
