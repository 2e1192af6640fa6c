"""The reference engine: one client after another, in one process, over real bytes."""

import copy

from dbcl.engines.engine import Engine
from dbcl.protocol import Broadcast, blinded, decode_broadcast, encode, update


class LocalEngine(Engine):
    """Trains one client after another; every message is encoded and decoded on its way.

    >>> import dbcl, torch
    >>> from dbcl.engines import LocalTraining
    >>> clients = [(torch.randn(10, 8), torch.arange(10) % 2) for _ in range(4)]
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> engine = LocalEngine(dbcl.Server(net), copy.deepcopy(net), clients, LocalTraining(), seed=bytes(32))
    >>> engine.play_round().report.accepted
    4
    """

    def train_cohort(self, broadcast: Broadcast, cohort: list[int]) -> list[bytes]:
        # Every client receives the same bytes, so they are decoded once and each client trains a copy of the model.
        broadcast = decode_broadcast(encode(broadcast))
        received = blinded(self.template, broadcast)
        updates = []
        for client in cohort:
            local = copy.deepcopy(received)
            examples = self.clients[client]
            metrics = self.training.train(
                local, examples, seed=self.seed, round=broadcast.round, client=client, loss=self.objective.loss
            )
            counted = self.training.counted(len(examples))
            noise = self.noise_of(client)
            updates.append(encode(update(local, broadcast, examples=counted, metrics=metrics, noise=noise)))
        return updates
