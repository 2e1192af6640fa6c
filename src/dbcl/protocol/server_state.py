"""A server's state for a checkpoint. Each part saves its own state, and restoring is atomic."""

from typing import TYPE_CHECKING

from dbcl.errors import ProtocolError, plain, shown
from dbcl.protocol.guarantee import check_values
from dbcl.protocol.plan_state import check_plan, plan_values
from dbcl.state import State, Stateful, join

if TYPE_CHECKING:
    from dbcl.protocol.server import Server


def parts_of(server: "Server") -> dict[str, Stateful]:
    """Return the stateful parts of a server, in restoring order.

    The number and the keys of the round are not included.
    """
    parts: dict[str, Stateful] = {
        "weights": server.trained,
        "noise": server.sequence.noise,
        "clients": server.contributions,
        "influence": server.validation.influence,
        "guarantee": server.keeper,
    }
    return parts if server.release.mean is None else {**parts, "mean": server.release.mean}


def server_state(server: "Server") -> State:
    """Return the complete state for `load_server`.

    >>> import dbcl, torch
    >>> sorted(server_state(dbcl.Server(torch.nn.Linear(6, 2))).values)
    ['clients', 'guarantee', 'influence', 'mean', 'noise', 'round', 'weights']
    """
    server.sequence.rotate_key_if_weights_changed()
    own = {**server.sequence.values(), **plan_values(server.plan)}
    if (guarantee := server.keeper.values()) is not None:
        own["guarantee"] = guarantee
    return join(round=State(own, {}), **{name: part.state() for name, part in parts_of(server).items()})


def load_server(server: "Server", state: State) -> None:
    """Restore a server from `server_state`.

    Raises:
        ProtocolError: The state is damaged, or belongs to another model, plan, optimiser or
            guarantee. Nothing has changed.
    """
    before, opened = server_state(server), server.sequence.current
    try:
        _check(server, state)
        _load(server, state)
    except Exception as error:
        _load(server, before)
        server.sequence.current = opened
        if isinstance(error, ProtocolError):
            raise
        raise ProtocolError(f"the checkpoint is damaged ({type(error).__name__}: {plain(str(error), 100)})") from error


def _check(server: "Server", state: State) -> None:
    parts = parts_of(server)
    missing = [part for part in ("round", *parts) if part not in state.values and part != "mean"]
    if missing:
        raise ProtocolError(f"the checkpoint is of an older dbcl or of something else: it has no {missing[0]!r}")
    unknown = sorted(state.values.keys() - {"round", "mean", *parts})
    if unknown:
        raise ProtocolError(f"the checkpoint is of another kind of server: it has {shown(unknown[0])}")
    own = state.values["round"]
    server.trained.check_state(state.part("weights"))
    check_plan(own, server.plan)
    check_values(own.get("guarantee"), server.keeper)
    server.sequence.check_values(own)
    if ("mean" in state.values) != ("mean" in parts):
        raise ProtocolError(
            "the checkpoint belongs to a run with another ema_decay: only one of the two has an average"
        )


def _load(server: "Server", state: State) -> None:
    for name, part in parts_of(server).items():
        part.load_state(state.part(name))
    server.sequence.load_values(state.values["round"])
