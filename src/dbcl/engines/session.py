"""What an engine and a run need of whoever holds the model; `ServerSession` is a server behind that contract."""

import copy
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from dbcl.cover import named_tensors
from dbcl.errors import ConfigError, ProtocolError
from dbcl.plan import SketchPlan
from dbcl.privacy import PrivacyPlan
from dbcl.protocol import Broadcast, RoundReport, Server, Update
from dbcl.protocol.state import load_model, model_state, restore_server, server_state
from dbcl.state import State, join
from dbcl.statistics import calibrate

Updates = Sequence[Update | bytes] | Mapping[str, Update | bytes]
"""The answers of a round: by who sent them, where that is known."""


class Session(Protocol):
    """Whoever holds a model and plays rounds with others: a server, or a peer.

    `model` holds the true weights and `released` what is evaluated and kept as the result, which may be another.
    `open` gives what a client of the round receives, the same until `close` takes the updates and steps. `prepare` may
    be called between the two, by an engine that has time to spare. `traffic` is what the last round took, in bytes down
    beside the broadcasts and up, where that is not simply the updates; else None. `sums` is what a server that sees no
    single update has seen of the last round; empty where it sees them all. `privacy` is the guarantee that is kept.

    >>> import dbcl
    >>> session: Session = ServerSession(dbcl.Server(nn.Linear(6, 2), cover="all"))
    >>> session.round, session.open("client 0").round
    (0, 0)
    """

    @property
    def round(self) -> int: ...

    @property
    def plan(self) -> SketchPlan: ...

    @property
    def model(self) -> nn.Module: ...

    @property
    def released(self) -> nn.Module: ...

    @property
    def privacy(self) -> PrivacyPlan | None: ...

    @property
    def traffic(self) -> tuple[int, int] | None: ...

    def open(self, client: str) -> Broadcast: ...

    def prepare(self) -> None: ...

    def close(self, updates: Updates) -> RoundReport: ...

    def sums(self) -> Mapping[str, Update]: ...

    def state(self) -> State: ...

    def load_state(self, state: State) -> None: ...


class ServerSession:
    """A server, and with `ema_decay` above 0 an exponential moving average of its weights.

    The average is taken over about 1 / (1 - ema_decay) rounds. The noise of single rounds is gone from it, so it is
    what is evaluated and released. Clients never receive it; they go on from W.

    Of a server with a guarantee the average is over W + N, what every round shows: W itself is never released.

    >>> import dbcl
    >>> session = ServerSession(dbcl.Server(nn.Linear(6, 2), cover="all"), ema_decay=0.9)
    >>> session.released is session.model
    False
    """

    def __init__(self, server: Server, ema_decay: float = 0.0) -> None:
        if not 0 <= ema_decay < 1:
            raise ConfigError(f"ema_decay must be at least 0 and below 1, got {ema_decay}")
        self.server = server
        self.ema_decay = ema_decay
        self.ema_model = copy.deepcopy(server.model) if ema_decay or server.privacy else None
        self._means = {name: mean.detach().clone() for name, mean in self._float32().items()} if ema_decay else {}

    @property
    def round(self) -> int:
        return self.server.round

    @property
    def plan(self) -> SketchPlan:
        return self.server.plan

    @property
    def model(self) -> nn.Module:
        return self.server.model

    @property
    def released(self) -> nn.Module:
        return self.server.model if self.ema_model is None else self.ema_model

    @property
    def privacy(self) -> PrivacyPlan | None:
        """The server's guarantee."""
        return self.server.privacy

    @property
    def traffic(self) -> tuple[int, int] | None:
        """Nothing but the broadcasts and the updates."""
        return None

    def open(self, client: str) -> Broadcast:
        """A client's broadcast of the round."""
        return self.server.open_round(client)

    def prepare(self) -> None:
        """Draw what the next round needs beside the weights."""
        self.server.prepare()

    def sums(self) -> Mapping[str, Update]:
        """Nothing: the server sees each update by itself."""
        return {}

    def close(self, updates: Updates) -> RoundReport:
        """Step on the updates, and take the new weights into the average."""
        report = self.server.close_round(updates)
        self._average()
        return report

    def state(self) -> State:
        """The server's state, and the average where there is one."""
        parts = {"server": server_state(self.server)}
        if self.ema_model is not None:
            parts["ema"] = model_state(self.ema_model)
        if self._means:
            parts["means"] = State({}, {name: mean.clone() for name, mean in self._means.items()})
        return join(**parts)

    def load_state(self, state: State) -> None:
        """Go back to what `state` gave."""
        if "server" not in state.values:
            raise ProtocolError("the checkpoint is of an older dbcl or of something else: it has no 'server'")
        if ("ema" in state.values) != (self.ema_model is not None):
            raise ProtocolError(
                "the checkpoint belongs to a run with another ema_decay: only one of the two has an average"
            )
        restore_server(self.server, state.part("server"))
        if self.ema_model is not None:
            load_model(self.ema_model, state.part("ema"))
        if self._means and "means" in state.values:
            self._means = {name: mean.clone() for name, mean in state.part("means").tensors.items()}

    def _float32(self) -> dict[str, Tensor]:
        """The server's float32 weights of half-precision tensors, in which a slow average would not move."""
        own = named_tensors(self.server.model)
        return {name: W for name, W in self.server.weights().items() if W.dtype != own[name].dtype}

    @torch.no_grad()
    def _average(self) -> None:
        if self.ema_model is None:
            return
        decay = decay_after(self.ema_decay, self.round)
        shown = self.server.shown() if self.server.privacy else {}
        current = {**named_tensors(self.model), **shown}
        masters = {name: shown[name] for name in self._means} if shown else self._float32()
        for name, mean in named_tensors(self.ema_model).items():
            if name in masters:
                mean.copy_(self._means[name].lerp_(masters[name], 1 - decay))
            elif mean.is_floating_point():
                mean.lerp_(current[name].to(mean), 1 - decay)
            else:
                mean.copy_(current[name])
        if self.server.calibration is not None and self.server.statistics:
            calibrate(self.ema_model, self.server.calibration)


def decay_after(ema_decay: float, rounds: int) -> float:
    """The decay of a running mean after so many rounds: it rises from 0, so that few rounds forget the initial weights.

    >>> decay_after(0.8, 1), decay_after(0.8, 100)
    (0.09090909090909091, 0.8)
    """
    return min(ema_decay, rounds / (rounds + 10))


def session_of(holder: Server | Session) -> Session:
    """A bare server as a session; a session as it is."""
    return ServerSession(holder) if isinstance(holder, Server) else holder
