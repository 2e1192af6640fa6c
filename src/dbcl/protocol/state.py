"""A server's state for a checkpoint: W, the open round's secrets, the veil's and the optimiser's memory."""

from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dbcl._torch import inner_tensors
from dbcl.cover import named_tensors
from dbcl.errors import ProtocolError, plain
from dbcl.protocol.inspection import is_count
from dbcl.seeds import SEED_BYTES
from dbcl.state import State, join

if TYPE_CHECKING:
    from dbcl.protocol.server import Server


def server_state(server: "Server") -> State:
    """All that `restore_server` needs so that a server of the same model and plan goes on as this one would.

    >>> import dbcl
    >>> state = server_state(dbcl.Server(nn.Linear(6, 2), cover="all"))
    >>> sorted(state.values), sorted(state.tensors)
    (['model', 'optimizer', 'round', 'veil'], ['model.bias', 'model.weight'])
    """
    server.settle_key()
    own: dict[str, Any] = {"number": server.round, "key": server._key.hex(), "plan": server.plan.digest}
    own["pulls"] = server._pulls
    asked = server._asked if server._open is None else server._open.asked
    if asked:
        own["asked"] = asked
    if server.plan.base:
        own["base_key"] = server._base_key.hex()
    parts = {
        "round": State(own, {}),
        "model": model_state(server.model),
        "veil": server.veil.state(),
        "optimizer": optimizer_state(server._optimizer),
    }
    if server.privacy is not None:
        own["guarantee"] = _guarantee(server)
    if server.ledger is not None:
        parts["ledger"] = server.ledger.state()
    if server.update_noise is not None:
        parts["update_noise"] = server.update_noise.state()
    if server._masters.tensors:
        parts["masters"] = State(
            {},
            {
                name: master.detach().clone()
                for name, master in server._masters.read(named_tensors(server.model)).items()
            },
        )
    return join(**parts)


def restore_server(server: "Server", state: State, *, keep_open: bool = False) -> None:
    """Put a server back to a state; one of another model or plan, or that is none at all, is refused: nothing changes.

    With `keep_open` the broadcast of its open round stays what it is: the state is of that very round.
    """
    before = server_state(server)
    try:
        _restore(server, state, keep_open)
    except ProtocolError:
        _restore(server, before, keep_open=True)
        raise
    except Exception as error:  # whatever is in a file, it is no state of a server
        _restore(server, before, keep_open=True)
        raise ProtocolError(f"the checkpoint is damaged ({type(error).__name__}: {plain(str(error), 100)})") from error


def _restore(server: "Server", state: State, keep_open: bool) -> None:
    missing = {"round", "model", "veil", "optimizer"} - state.values.keys()
    if missing:
        raise ProtocolError(f"the checkpoint is of an older dbcl or of something else: it has no {min(missing)!r}")
    own = state.values["round"]
    if own["plan"] != server.plan.digest or not _alike(state.part("model").tensors, _all_tensors(server.model)):
        raise ProtocolError("the checkpoint belongs to another model or another plan")
    if server._masters.tensors and not _alike(state.part("masters").tensors, server._masters.tensors):
        raise ProtocolError("the checkpoint belongs to a model of another precision")
    kind, ours = state.values["optimizer"]["kind"], type(server._optimizer).__name__
    if kind != ours:
        raise ProtocolError(
            f"the checkpoint is of a server with the optimiser {plain(str(kind))} and this one has {ours}"
        )
    number, key, pulls = own["number"], bytes.fromhex(own["key"]), [float(pull) for pull in own.get("pulls", [])]
    asked = [str(client) for client in own.get("asked", [])]
    base_key = bytes.fromhex(own["base_key"]) if server.plan.base else server._base_key
    if not is_count(number) or len(key) != SEED_BYTES or len(base_key) != SEED_BYTES or not all(map(isfinite, pulls)):
        raise ProtocolError("the checkpoint is damaged: its round, a key or a length cannot be what it says")
    if own.get("guarantee") != _guarantee(server):
        raise ProtocolError("the checkpoint belongs to a run with another guarantee, which cannot be changed in a run")
    begun = server.privacy is not None and (server.round > 0 or server._open is not None)
    if begun and (number < server.round or (number == server.round and key != server._key)):
        raise ProtocolError(
            f"with a guarantee nothing goes back: this server is at round {server.round}, and playing round {number} "
            "again would use its updates twice"
        )
    if server.ledger is not None:
        server.ledger.load_state(state.part("ledger"))
    load_optimizer(server._optimizer, state.part("optimizer"))
    server.veil.load_state(state.part("veil"))
    if server.update_noise is not None:
        server.update_noise.load_state(state.part("update_noise"))
    load_model(server.model, state.part("model"))
    if server._masters.tensors:
        server._masters.load(state.part("masters").tensors)
    server.round, server._key, server._base_key, server._pulls = number, key, base_key, pulls
    server._asked, server._next_key = asked, None
    server._key_of = server._versions()
    if not keep_open:
        server._open = None
    if server.plan.base:
        server._frozen = None


def _guarantee(server: "Server") -> dict[str, Any] | None:
    """The plan of a server's guarantee as a checkpoint gives it back, whose lists are no tuples."""
    if server.privacy is None:
        return None
    return {name: list(own) if isinstance(own, tuple) else own for name, own in asdict(server.privacy).items()}


def _alike(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """Whether tensors have the same names and shapes."""
    return {name: each.shape for name, each in some.items()} == {name: each.shape for name, each in others.items()}


def model_state(model: nn.Module) -> State:
    """A copy of a model's tensors.

    >>> list(model_state(nn.Linear(2, 1)).tensors)
    ['weight', 'bias']
    """
    return State({}, {name: tensor.clone() for name, tensor in _all_tensors(model).items()})


@torch.no_grad()
def load_model(model: nn.Module, state: State) -> None:
    """Copy tensors into the model that `model_state` read them from, or one like it."""
    for name, tensor in _all_tensors(model).items():
        tensor.copy_(state.tensors[name])


def _all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A model's tensors by name; of one that wraps others (quantised weights) those inside."""
    own = named_tensors(model).items()
    return {name + inner: part for name, tensor in own for inner, part in inner_tensors(tensor).items()}


def optimizer_state(optimizer: Optimizer) -> State:
    """The state of any optimiser of PyTorch, its tensors apart from its plain values: nothing is pickled.

    >>> optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    >>> optimizer_state(optimizer).values["kind"]
    'SGD'
    """
    held = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for index, entries in held["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{name}"] = value.detach().clone()
            else:
                scalars.setdefault(str(index), {})[name] = value
    return State({"kind": type(optimizer).__name__, "groups": held["param_groups"], "scalars": scalars}, tensors)


def load_optimizer(optimizer: Optimizer, state: State) -> None:
    """Put an optimiser back to what `optimizer_state` read."""
    entries: dict[int, dict[str, Any]] = {int(index): dict(own) for index, own in state.values["scalars"].items()}
    for name, tensor in state.tensors.items():
        index, _, key = name.partition(".")
        entries.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": entries, "param_groups": state.values["groups"]})
