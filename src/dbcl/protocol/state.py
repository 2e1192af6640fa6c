"""A server's state for a checkpoint: W, the open round's secrets, the veil's and the optimiser's memory."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dbcl._torch import inner_tensors
from dbcl.cover import named_tensors
from dbcl.errors import ProtocolError
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
    if server.plan.base:
        own["base_key"] = server._base_key.hex()
    parts = {
        "round": State(own, {}),
        "model": model_state(server.model),
        "veil": server.veil.state(),
        "optimizer": optimizer_state(server._optimizer),
    }
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
    """Put a server back to a state; one of another model or plan is refused before anything changes.

    With `keep_open` the broadcast of its open round stays what it is: the state is of that very round.
    """
    missing = {"round", "model", "veil", "optimizer"} - state.values.keys()
    if missing:
        raise ProtocolError(f"the checkpoint is of an older dbcl or of something else: it has no {min(missing)!r}")
    own = state.values["round"]
    same_model = state.part("model").tensors.keys() == _all_tensors(server.model).keys()
    if own["plan"] != server.plan.digest or not same_model:
        raise ProtocolError("the checkpoint belongs to another model or another plan")
    if state.values["optimizer"]["kind"] != type(server._optimizer).__name__:
        kinds = state.values["optimizer"]["kind"], type(server._optimizer).__name__
        raise ProtocolError("the checkpoint is of a server with the optimiser {} and this one has {}".format(*kinds))
    load_model(server.model, state.part("model"))
    if "masters" in state.values:
        server._masters.load(state.part("masters").tensors)
    load_optimizer(server._optimizer, state.part("optimizer"))
    server.veil.load_state(state.part("veil"))
    server.round, server._key = own["number"], bytes.fromhex(own["key"])
    server._pulls, server._key_of = list(own.get("pulls", [])), server._versions()
    if not keep_open:
        server._open = None
    if server.plan.base:
        server._base_key, server._frozen = bytes.fromhex(own["base_key"]), None


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
