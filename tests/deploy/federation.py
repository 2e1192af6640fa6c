"""A Flower federation as a deployment has it: SuperLink, SuperNodes and apps are processes, all of them on loopback."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

APP = Path(__file__).parents[2] / "examples" / "flower-app"
BIN = Path(sys.executable).parent
MINUTE = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


class Federation:
    """One SuperLink and its nodes, with everything they write in one folder; leaving the context ends all of them.

    With `keys`, a folder made by the example's make_keys.py, connections are encrypted and nodes must be registered.
    `app` is what it runs.
    """

    def __init__(self, folder: Path, keys: Path | None = None, app: Path = APP) -> None:
        self.folder, self.keys, self.app = folder, keys, app
        self.port = free_port()
        self.superlink: subprocess.Popen[bytes]
        self.reached_at = self.port  # where nodes connect to; a relay sets its own port here
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        home = folder / "flwr"
        home.mkdir(parents=True)
        self._safety = "insecure = true" if keys is None else f'root-certificates = "{keys / "ca.crt"}"'
        connection = f'[superlink.trial]\naddress = "127.0.0.1:{self.port}"\n{self._safety}\n'
        (home / "config.toml").write_text(connection)
        kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        self.environment = kept | {
            "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "OMP_NUM_THREADS": "1",
        }

    def __enter__(self) -> "Federation":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            self.kill(process)

    # Processes

    def start_superlink(self, *options: str) -> None:
        safety = ["--insecure"]
        if self.keys is not None:
            files = {"ca-certfile": "ca.crt", "certfile": "server.crt", "keyfile": "server.key"}
            safety = [part for name, file in files.items() for part in (f"--ssl-{name}", str(self.keys / file))]
            safety += ["--enable-supernode-auth", "--database", str(self.folder / "state.db")]
        self.superlink = self._start("superlink", "flower-superlink", "--port", str(self.port), *safety, *options)
        self.wait(lambda: listens(self.port) or self.superlink.poll(), "the SuperLink to listen", MINUTE)
        assert self.superlink.poll() is None, f"the SuperLink ended{self.logs()}"

    def start_proxy(self) -> None:
        """Let nodes come through the example's proxy, which `flwr` can try, too, under the name `outside`."""
        self.reached_at = free_port()
        proxy = [sys.executable, str(APP / "fleet_proxy.py"), str(self.keys), "--superlink", f"127.0.0.1:{self.port}"]
        self._start("proxy", *proxy, "--host", "127.0.0.1", "--port", str(self.reached_at))
        with open(self.folder / "flwr" / "config.toml", "a") as file:
            file.write(f'[superlink.outside]\naddress = "127.0.0.1:{self.reached_at}"\n{self._safety}\n')
        self.wait(lambda: listens(self.reached_at), "the proxy to listen", MINUTE)

    def start_node(self, number: int, of: int, config: str = "") -> subprocess.Popen[bytes]:
        """Start a node with its partition and further entries of its own configuration."""
        safety = ["--insecure"]
        if self.keys is not None:
            safety = ["--root-certificates", str(self.keys / "ca.crt")]
            safety += ["--auth-supernode-private-key", str(self.keys / f"node{number}")]
        node = self._start(
            f"node{number}",
            "flower-supernode",
            *safety,
            *("--superlink", f"127.0.0.1:{self.reached_at}", "--port", str(free_port())),
            *("--node-config", f"partition-id={number} num-partitions={of} {config}".rstrip()),
        )
        self.nodes[number] = node
        return node

    def serverapps(self) -> list[int]:
        """The processes that run a ServerApp now."""
        return [pid for pid, _, args in descendants(self.superlink.pid) if "bin/flwr-serverapp" in args]

    def clientapps(self, number: int) -> list[int]:
        """The processes that run a ClientApp on a node now."""
        return [pid for pid, _, args in descendants(self.nodes[number].pid) if "bin/flwr-clientapp" in args]

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """End a process and all that it has started, at once and without a word, as a power cut would."""
        if process.poll() is not None:  # its number may be somebody else's by now
            return
        # Flower starts some of its processes in sessions of their own, so one process group is not all.
        groups = {process.pid} | {group for _, group, _ in descendants(process.pid)}
        for group in groups - {os.getpgid(0)}:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        process.wait(timeout=MINUTE)

    def _start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    # What a person types

    def flwr(self, *arguments: str) -> dict[str, Any]:
        """Run a `flwr` command and give its answer."""
        command = ["flwr", *arguments, "--format", "json"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=MINUTE)
        assert done.returncode == 0, f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}"
        answer: dict[str, Any] = json.loads(done.stdout)
        assert answer["success"], answer
        return answer

    def run(self, *options: str, **config: str | int | float) -> str:
        """Start the example app and give the run's number."""
        words = [f"{name.replace('_', '-')}={json.dumps(value)}" for name, value in config.items()]
        return str(self.flwr("run", str(self.app), "trial", "--run-config", " ".join(words), *options)["run-id"])

    def status(self, run: str) -> str:
        return str(self.flwr("list", "trial", "--run-id", run)["runs"][0]["status"])

    def online(self) -> int:
        return sum(node["status"] == "online" for node in self.flwr("supernode", "list", "trial")["nodes"])

    # Waiting

    def wait(self, condition: Callable[[], object], what: str, seconds: float) -> None:
        """Ask again and again until it is so; after the time given, fail with the ends of all logs."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {seconds:g} s for {what}{self.logs()}")
            time.sleep(0.1)

    def log_of(self, number: int) -> str:
        """What a node has written, in all its lives."""
        return (self.folder / f"node{number}.log").read_text()

    def logs(self) -> str:
        ends = [f"\n--- {path.name}\n{path.read_text()[-2500:]}" for path in sorted(self.folder.glob("*.log"))]
        return "".join(ends)


def descendants(root: int) -> list[tuple[int, int, str]]:
    """All processes below one, as (process, process group, command line)."""
    table = subprocess.run(
        ["ps", "-ww", "-eo", "pid=,ppid=,pgid=,args="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(None, 3) for line in table.splitlines()]
    found, parents = [], {root}
    while parents:
        below = [row for row in rows if int(row[1]) in parents]
        found += [(int(row[0]), int(row[2]), row[3] if len(row) > 3 else "") for row in below]
        parents = {int(row[0]) for row in below}
    return found


class Relay:
    """Passes bytes on between the nodes and the SuperLink, and keeps what went either way on each connection."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.down: list[bytearray] = []
        self.up: list[bytearray] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept)]
        self._closed = threading.Event()
        self.port = int(self._listener.getsockname()[1])

    def __enter__(self) -> "Relay":
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with self._listener:
            while not self._closed.is_set():
                if select.select([self._listener], [], [], 0.2)[0]:
                    node, _ = self._listener.accept()
                    self._threads.append(threading.Thread(target=self._carry, args=(node,)))
                    self._threads[-1].start()

    def _carry(self, node: socket.socket) -> None:
        down, up = bytearray(), bytearray()
        self.down.append(down)
        self.up.append(up)
        # Where one side ends or is killed, the other shall notice: both are closed.
        with contextlib.suppress(OSError), node, socket.create_connection(("127.0.0.1", self.target)) as superlink:
            ways = {node: (superlink, up), superlink: (node, down)}
            while not self._closed.is_set():
                for source in select.select(list(ways), [], [], 0.2)[0]:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    sink, kept = ways[source]
                    kept += data
                    sink.sendall(data)
