"""The reference engine: one client after another, in one process, over real bytes."""

import copy

import torch

from dbcl.engines.engine import Engine
from dbcl.protocol import Broadcast, blinded, decode_broadcast, encode, update


class LocalEngine(Engine):
    """Trains one client after another; every message is encoded and decoded on its way.

    >>> import dbcl, numpy as np
    >>> from dbcl.engines import LocalTraining
    >>> x, y = torch.randn(40, 8), torch.arange(40) % 2
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> shards = np.array_split(np.arange(40), 4)
    >>> engine = LocalEngine(dbcl.Server(net), copy.deepcopy(net), x, y, shards, LocalTraining(), seed=bytes(32))
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
            index = torch.from_numpy(self.shards[client]).to(self.x.device)
            metrics = self.training.train(
                local, self.x[index], self.y[index], seed=self.seed, round=broadcast.round, client=client
            )
            counted = self.training.counted(len(index))
            noise = self.noise_of(client)
            updates.append(encode(update(local, broadcast, examples=counted, metrics=metrics, noise=noise)))
        return updates
