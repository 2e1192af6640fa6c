"""Engines whose messages are carried by Flower: on a grid in this process, or through its Ray simulation."""

import logging
import os
import queue
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

from dbcl import models
from dbcl.data.examples import Examples, Rows, TensorExamples
from dbcl.data.trees import Tree, map_tensors
from dbcl.engines.engine import Engine, client_name, reported
from dbcl.engines.training import LocalTraining
from dbcl.errors import ConfigError, ProtocolError
from dbcl.flower.client import blinded, reply
from dbcl.flower.grid import LocalGrid
from dbcl.flower.records import RECORD, update_of
from dbcl.objective import Loss
from dbcl.privacy import PrivacyPlan, UpdateNoise
from dbcl.protocol import Broadcast, encode

BACKEND: Any = {
    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    "init_args": {"logging_level": "ERROR", "log_to_driver": False},
}


@dataclass(frozen=True)
class StoredExamples:
    """Tensors of examples in a file, so that only its name is sent to another process.

    `layout` is the tree of inputs and targets with the numbers of the file's tensors in their places.
    """

    path: str
    layout: Tree
    rows: Rows

    @classmethod
    def write(cls, path: Path, clients: Sequence[TensorExamples]) -> "list[StoredExamples]":
        """Write the tensors of all clients, each once however many clients share it."""
        held: dict[int, Tensor] = {}
        stored = []
        for client in clients:
            layout = map_tensors(partial(_number, held), (client.inputs, client.targets))
            stored.append(cls(str(path), layout, client.rows))
        safetensors.torch.save_file({str(number): t.contiguous() for number, t in enumerate(held.values())}, path)
        return stored

    def read(self) -> TensorExamples:
        file = _read_tensors(self.path)
        inputs, targets = map_tensors(lambda number: file[str(int(number))], self.layout)
        return TensorExamples(inputs, targets, self.rows)


def _number(held: dict[int, Tensor], tensor: Tensor) -> Tensor:
    held.setdefault(id(tensor), tensor)
    return torch.tensor(list(held).index(id(tensor)))


@lru_cache(maxsize=1)
def _read_tensors(path: str) -> dict[str, Tensor]:
    return safetensors.torch.load_file(path)


@dataclass(frozen=True)
class Clients:
    """What the nodes run. It is sent to the nodes' processes, so it holds nothing of the server's."""

    template: nn.Module
    examples: Sequence[Examples | StoredExamples]
    training: LocalTraining
    seed: bytes
    noise: UpdateNoise | None = None
    loss: Loss = models.loss
    privacy: PrivacyPlan | None = None

    def train(self, message: Message, context: Context) -> Message:
        record: Any = message.content[RECORD]
        client, round = int(record["client"]), int(record["round"])
        own = self.examples[client]
        examples = own.read() if isinstance(own, StoredExamples) else own
        local = blinded(self.template, message)
        metrics = self.training.train(local, examples, seed=self.seed, round=round, client=client, loss=self.loss)
        noise = None if self.noise is None else replace(self.noise, client=client)
        counted, told = reported(self.training.counted(len(examples)), metrics, self.privacy)
        return reply(local, message, examples=counted, metrics=told, noise=noise)

    def app(self) -> ClientApp:
        app = ClientApp()
        app.train()(self.train)
        return app


class FlowerEngine(Engine):
    """Trains the cohort as nodes of a Flower grid in this process, over Flower's messages.

    >>> import copy, dbcl
    >>> clients = [(torch.randn(10, 8), torch.arange(10) % 2) for _ in range(4)]
    >>> net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> engine = FlowerEngine(dbcl.Server(net), copy.deepcopy(net), clients, LocalTraining(), seed=bytes(32))
    >>> engine.play_round().report.accepted
    4
    """

    round_timeout = 600.0
    _grid: Grid | None = None

    def train_cohort(self, sent: Mapping[int, Broadcast]) -> dict[str, bytes]:
        if self._grid is None:
            self._grid = self._connect()
        nodes = sorted(self._grid.get_node_ids())
        written = {id(broadcast): encode(broadcast) for broadcast in sent.values()}
        messages = []
        for client, broadcast in sent.items():
            # Every client's examples are here, so a message says which client its node is.
            data = written[id(broadcast)]
            record = ConfigRecord({"broadcast": data, "client": client, "round": broadcast.round})
            messages.append(Message(RecordDict({RECORD: record}), nodes[client], "train", ttl=self.round_timeout))
        replies = self._grid.send_and_receive(messages, timeout=self.round_timeout)
        came = {message.metadata.src_node_id: message for message in replies}
        for client, broadcast in sent.items():
            message = came.get(nodes[client])
            if message is None or message.has_error():
                reason = f"did not answer within {self.round_timeout:g} s" if message is None else message.error.reason
                raise ProtocolError(f"round {broadcast.round}: client {client} failed: {reason}")
        return {client_name(client): update_of(came[nodes[client]]) for client in sent}

    def _connect(self) -> Grid:
        return LocalGrid(self._nodes(self.clients).app(), len(self.clients))

    def _nodes(self, examples: Sequence[Examples | StoredExamples]) -> Clients:
        loss, privacy = self.objective.loss, self.session.privacy
        return Clients(self.template, examples, self.training, self.seed, self.noise, loss, privacy)


class SimulationEngine(FlowerEngine):
    """The same through Flower's simulation, whose nodes are Ray workers: a process for each core of the machine.

    Ray starts with the first round, which takes some ten seconds, and stops with `close`.

    >>> issubclass(SimulationEngine, Engine)
    True
    """

    def _connect(self) -> Grid:
        if find_spec("ray") is None:
            raise ConfigError("Flower's simulation needs Ray, which is not installed: pip install 'flwr[simulation]'")
        if any(parameter.is_cuda for parameter in self.template.parameters()):
            raise ConfigError("the engine flower trains on the CPU; on a GPU use --engine stacked")
        # The app is sent to a worker with every message, so tensors stay in a file; a dataset goes along as it is.
        self._folder = tempfile.TemporaryDirectory(prefix="dbcl-")
        stored: Sequence[Examples | StoredExamples] = self.clients
        in_memory = [client for client in self.clients if isinstance(client, TensorExamples)]
        if len(in_memory) == len(self.clients):
            stored = StoredExamples.write(Path(self._folder.name, "examples.safetensors"), in_memory)
        self._simulation = Simulation(self._nodes(stored).app(), len(self.clients))
        return self._simulation.grid()

    def close(self) -> None:
        if self._grid is not None:
            self._grid = None
            self._simulation.stop()
            self._folder.cleanup()


class Simulation:
    """Flower's Ray simulation in the background, as a grid to play rounds on."""

    def __init__(self, app: ClientApp, nodes: int) -> None:
        self.app, self.nodes = app, nodes
        self._handed: queue.Queue[Grid | BaseException] = queue.Queue()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flower simulation", daemon=True)
        self._thread.start()

    def grid(self, timeout: float = 120.0) -> Grid:
        """The grid, once all its nodes are there."""
        deadline = time.monotonic() + timeout
        try:
            grid = self._handed.get(timeout=timeout)
        except queue.Empty:
            raise ProtocolError(f"Flower's simulation did not start within {timeout:g} s") from None
        if isinstance(grid, BaseException):
            raise ProtocolError(f"Flower's simulation did not start: {grid}") from grid
        while len(list(grid.get_node_ids())) < self.nodes:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise ProtocolError(f"Flower's simulation did not bring up its {self.nodes} nodes")
            time.sleep(0.05)
        return grid

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        from flwr.simulation import run_simulation

        # Both log to the console; what matters is in the errors that we raise.
        for name in ("flwr", "ray"):
            logging.getLogger(name).setLevel(logging.ERROR)
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        server = ServerApp()

        @server.main()
        def main(grid: Grid, context: Context) -> None:
            self._handed.put(grid)
            self._over.wait()

        try:
            run_simulation(server, self.app, self.nodes, backend_config=BACKEND)
        except BaseException as error:
            self._handed.put(error)
