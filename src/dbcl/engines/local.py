"""Reference engine: trains clients sequentially in one process, with encoded messages."""

import copy
from collections.abc import Mapping

from dbcl.engines.engine import Engine, by_broadcast, client_name, reported
from dbcl.protocol import Broadcast, blinded, decode_broadcast, encode, make_update


class LocalEngine(Engine):
    """Engine that trains clients sequentially. Every message is encoded and decoded.

    >>> import dbcl, torch
    >>> from dbcl.engines import LocalTraining
    >>> clients = [(torch.randn(10, 8), torch.arange(10) % 2) for _ in range(4)]
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> engine = LocalEngine(dbcl.Server(net), copy.deepcopy(net), clients, LocalTraining(), seed=bytes(32))
    >>> engine.play_round().report.accepted
    4
    """

    def train_cohort(self, sent: Mapping[int, Broadcast]) -> dict[str, bytes]:
        return train_in_turn(self, sent)


def train_in_turn(engine: Engine, sent: Mapping[int, Broadcast]) -> dict[str, bytes]:
    """Train clients sequentially; return their encoded updates by `client_name`."""
    updates: dict[int, bytes] = {}
    privacy = engine.server.privacy
    sums_alone = privacy is not None and privacy.shared and privacy.unit == "example"
    for broadcast, clients in by_broadcast(sent):
        # All clients of a lane receive the same bytes, which are decoded once; each trains a copy of the model.
        broadcast = decode_broadcast(encode(broadcast))
        received = blinded(engine.template, broadcast)
        for client in clients:
            local = copy.deepcopy(received)
            examples, noise = engine.clients[client], engine.noise_of(client)
            if sums_alone:
                updates[client] = encode(
                    engine.training.clipped_update(
                        local, broadcast, examples, seed=engine.seed, client=client, loss=engine.objective.loss
                    )
                )
                continue
            metrics = engine.training.train(
                local, examples, seed=engine.seed, round=broadcast.round, client=client, loss=engine.objective.loss
            )
            counted, told = reported(engine.training.counted(len(examples)), metrics, engine.server.privacy)
            updates[client] = encode(make_update(local, broadcast, examples=counted, metrics=told, noise=noise))
    return {client_name(client): updates[client] for client in sent}
