"""A server's state for a checkpoint: each part saves its own, and a state is restored whole or not at all."""

from typing import TYPE_CHECKING, Any

from dbcl.errors import ProtocolError, plain, shown
from dbcl.protocol.guarantee import check_values
from dbcl.protocol.inspection import is_count
from dbcl.protocol.trained_weights import check_plan, plan_values
from dbcl.state import State, join

if TYPE_CHECKING:
    from dbcl.protocol.server import Server

PARTS = ("round", "weights", "noise", "clients", "influence", "guarantee")


def server_state(server: "Server") -> State:
    """Return everything that `load_server` needs.

    >>> import dbcl, torch
    >>> sorted(server_state(dbcl.Server(torch.nn.Linear(6, 2))).values)
    ['clients', 'guarantee', 'influence', 'mean', 'noise', 'round', 'weights']
    """
    server.rotate_key_if_weights_changed()
    own: dict[str, Any] = {"number": server.round, **server.keys.values(), **plan_values(server.plan)}
    if server.asked:
        own["asked"] = server.asked
    if (guarantee := server.keeper.values()) is not None:
        own["guarantee"] = guarantee
    parts = {
        "round": State(own, {}),
        "weights": server.trained.state(),
        "noise": server.noise.state(),
        "clients": server.contributions.state(),
        "influence": server.validation.influence.state(),
        "guarantee": server.keeper.state(),
    }
    if server.mean is not None:
        parts["mean"] = server.mean.state()
    return join(**parts)


def load_server(server: "Server", state: State) -> None:
    """Restore a server from `server_state`.

    Raises:
        ProtocolError: The state is damaged, or of another model, plan, optimiser or guarantee. Nothing has changed.
    """
    before, opened = server_state(server), server.opened_round()
    try:
        _load(server, state)
    except Exception as error:
        _load(server, before)
        server.reopen(opened)
        if isinstance(error, ProtocolError):
            raise
        raise ProtocolError(f"the checkpoint is damaged ({type(error).__name__}: {plain(str(error), 100)})") from error


def _load(server: "Server", state: State) -> None:
    missing = [part for part in PARTS if part not in state.values]
    if missing:
        raise ProtocolError(f"the checkpoint is of an older dbcl or of something else: it has no {missing[0]!r}")
    unknown = sorted(state.values.keys() - {*PARTS, "mean"})
    if unknown:
        raise ProtocolError(f"the checkpoint is of another kind of server: it has {shown(unknown[0])}")
    own = state.values["round"]
    server.trained.check_state(state.part("weights"))
    check_plan(own, server.plan)
    check_values(own.get("guarantee"), server.keeper)
    number, key = own["number"], own["key"]
    if not is_count(number):
        raise ProtocolError("the checkpoint is damaged: its round cannot be what it says")
    begun = server.privacy is not None and (server.round > 0 or server.opened_round() is not None)
    if begun and (number < server.round or (number == server.round and key != server.keys.current.hex())):
        raise ProtocolError(
            f"with a guarantee nothing goes back: this server is at round {server.round}, and playing round {number} "
            "again would use its updates twice"
        )
    if ("mean" in state.values) != (server.mean is not None):
        raise ProtocolError(
            "the checkpoint belongs to a run with another ema_decay: only one of the two has an average"
        )
    server.keys.load_values(own)
    server.keeper.load_state(state.part("guarantee"))
    server.noise.load_state(state.part("noise"))
    server.trained.load_state(state.part("weights"))
    server.contributions.load_state(state.part("clients"))
    server.validation.influence.load_state(state.part("influence"))
    if server.mean is not None:
        server.mean.load_state(state.part("mean"))
    server.restart(number, [str(client) for client in own.get("asked", [])])
