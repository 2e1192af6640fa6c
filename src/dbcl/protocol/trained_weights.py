"""The weights that a server trains, their optimiser, and the atomic step of a round."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dbcl._torch import inner_tensors, version
from dbcl.data.trees import Tree
from dbcl.errors import DivergedError, PlanError, ProtocolError, listed, plain, shown
from dbcl.model.norm_stats import calibrate
from dbcl.model.tensors import named_tensors, recompute
from dbcl.optim import ServerOptimizer
from dbcl.plan import SketchPlan
from dbcl.protocol.master_weights import MasterWeights
from dbcl.protocol.validation import not_finite
from dbcl.round_plan import BATCHNORM_STATS, mismatches
from dbcl.state import State, join


class TrainedWeights:
    """The trained weights W of a model, and their optimiser.

    Args:
        model: The network; its tensors are changed in place.
        plan: Names the tensors that leave the server.
        make_optimizer: Creates the optimiser of the trained parameters.
        exact: Keep W in float64, regardless of the model's dtype. A guarantee requires sums without
            rounding.
        calibration: Inputs for measuring normalisation statistics after every step; None uses the
            clients' statistics.

    >>> import dbcl
    >>> model = nn.Linear(2, 1, bias=False)
    >>> _ = nn.init.zeros_(model.weight)
    >>> weights = TrainedWeights(model, SketchPlan.from_model(model, dbcl.config.UNSKETCHED), dbcl.optim.fedavg())
    >>> weights.step({"weight": torch.ones(1, 2)})
    >>> weights.read()["weight"].tolist()
    [[1.0, 1.0]]
    """

    def __init__(
        self,
        model: nn.Module,
        plan: SketchPlan,
        make_optimizer: ServerOptimizer,
        *,
        exact: bool = False,
        calibration: Tree | None = None,
    ) -> None:
        own = {name: tensor for name, tensor in named_tensors(model).items() if name in plan.veils}
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        problems = mismatches({tensor.name: tensor.shape for tensor in plan.tensors}, own)
        problems += [f"{name} is trained and not in it" for name in trained if name not in plan.veils]
        if problems:
            raise PlanError("\n  - ".join(["this plan was made for another model:", *problems]))
        self.model, self.plan, self.calibration = model, plan, calibration
        self.statistics = {tensor.name for tensor in plan.tensors if tensor.scheme == BATCHNORM_STATS}
        exposed = not any(tensor.veil or tensor.sketched for tensor in plan.tensors)
        if self.statistics and calibration is None and not exact and not exposed:
            raise PlanError(
                f"{min(self.statistics)} is a running statistic, which clients would measure on veiled or sketched "
                "weights: the model would end far below its accuracy. The remedy: calibration=inputs, some inputs of "
                "the server's own, without labels; or a normalisation without running statistics, such as GroupNorm; "
                'or nothing hidden: SketchConfig(veil=0, sketch="identity-v1")'
            )
        self._masters = MasterWeights(own, exact=exact)
        self.optimizer: Optimizer = make_optimizer([self._masters.get(name, each) for name, each in trained.items()])

    def read(self) -> dict[str, Tensor]:
        """Return the tensors that leave the server, by name, without copying.

        A half-precision tensor is returned as its float32 master copy; with `exact`, every tensor
        is in float64.
        """
        own = named_tensors(self.model)
        masters = self._masters.read(own)
        return {tensor.name: masters.get(tensor.name, own[tensor.name]) for tensor in self.plan.tensors}

    def model_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that leave the server in the model's dtype."""
        own = named_tensors(self.model)
        return {tensor.name: own[tensor.name] for tensor in self.plan.tensors}

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype for summing updates and storing noisy values: float32 or wider."""
        return {name: torch.promote_types(own.dtype, torch.float32) for name, own in self.model_tensors().items()}

    def versions(self) -> list[object]:
        """Return a value that changes with every write to the weights."""
        return [version(tensor) for tensor in named_tensors(self.model).values()]

    def calibrate(self, model: nn.Module) -> None:
        """Measure a model's normalisation statistics on the calibration inputs, if available."""
        if self.calibration is not None and self.statistics:
            calibrate(model, self.calibration)

    def step(self, changes: Mapping[str, Tensor]) -> None:
        """Take an optimiser step with an average update.

        For normalisation statistics, the update holds the change of their values.

        Args:
            changes: The average update by tensor name.

        Raises:
            DivergedError: The step leads to non-finite values. The caller restores the weights.
        """
        self._step(changes)
        self.calibrate(self.model)
        wrong = not_finite(self.model_tensors())  # only what is sent: a mask may hold minus infinity
        if wrong:
            raise DivergedError(
                listed("the step is undone:", [f"{name} leaves the range of the weights' dtype" for name in wrong])
            )

    @torch.no_grad()
    def _step(self, changes: Mapping[str, Tensor]) -> None:
        for name, tensor in self.read().items():
            if name not in changes:
                continue
            if isinstance(tensor, nn.Parameter):
                tensor.grad = -changes[name].to(tensor) if tensor.requires_grad else None
            else:
                tensor.add_(changes[name])
                if name.endswith("running_var"):
                    tensor.clamp_(min=0)  # a variance must not turn negative; a running mean may
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._masters.write(named_tensors(self.model))
        recompute(self.model)

    def state(self) -> State:
        """Return the weights, the master weights and the optimiser's state, for a checkpoint."""
        parts = {"model": model_state(self.model), "optimizer": optimizer_state(self.optimizer)}
        if self._masters.tensors:
            masters = self._masters.read(named_tensors(self.model))
            parts["masters"] = State({}, {name: master.detach().clone() for name, master in masters.items()})
        return join(**parts)

    def check_state(self, state: State) -> None:
        """Raise `ProtocolError` for a state of another model, precision or type of optimiser."""
        differences = _differences(state.part("model").tensors, _all_tensors(self.model))
        if differences:
            raise ProtocolError(listed("the checkpoint belongs to another model:", differences, most=5))
        masters = state.part("masters").tensors if "masters" in state.values else {}
        if _shapes(masters) != _shapes(self._masters.tensors):
            raise ProtocolError("the checkpoint belongs to a model of another precision")
        kind, ours = state.values["optimizer"]["kind"], type(self.optimizer).__name__
        if kind != ours:
            raise ProtocolError(
                f"the checkpoint is of a server with the optimiser {plain(str(kind))} and this one has {ours}"
            )

    def load_state(self, state: State) -> None:
        """Restore the state returned by `state`."""
        load_optimizer(self.optimizer, state.part("optimizer"))
        load_model(self.model, state.part("model"))
        if self._masters.tensors:
            self._masters.load(state.part("masters").tensors)


def _differences(kept: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    found = [f"{plain(name)} is in the checkpoint and not in this model" for name in kept if name not in own]
    for name, tensor in own.items():
        if name not in kept:
            found.append(f"{name} is in this model and not in the checkpoint")
        elif kept[name].shape != tensor.shape:
            found.append(f"{name} has shape {tuple(tensor.shape)} here and {tuple(kept[name].shape)} in the checkpoint")
    return found


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: each.shape for name, each in tensors.items()}


def model_state(model: nn.Module) -> State:
    """Copy a model's tensors.

    >>> list(model_state(nn.Linear(2, 1)).tensors)
    ['weight', 'bias']
    """
    return State({}, {name: tensor.clone() for name, tensor in _all_tensors(model).items()})


@torch.no_grad()
def load_model(model: nn.Module, state: State) -> None:
    """Copy the tensors of `model_state` into a model with the same architecture."""
    for name, tensor in _all_tensors(model).items():
        tensor.copy_(state.tensors[name])


def _all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's tensors by name.

    A tensor subclass, for example quantised weights, is replaced by its inner tensors.
    """
    own = named_tensors(model).items()
    return {name + inner: part for name, tensor in own for inner, part in inner_tensors(tensor).items()}


def optimizer_state(optimizer: Optimizer) -> State:
    """Return the state of a PyTorch optimiser, as plain values and separate tensors without pickle.

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
    """Restore an optimiser from `optimizer_state`.

    Raises:
        ProtocolError: The type of a setting differs from the optimiser's, so its next step would
            fail.
    """
    kept, own = state.values["groups"], optimizer.state_dict()["param_groups"]
    if not isinstance(kept, list) or len(kept) != len(own):
        raise ProtocolError("the checkpoint is of an optimiser with other groups of parameters")
    groups = [{**ours, **theirs} for ours, theirs in zip(own, kept, strict=True)]
    for ours, group in zip(own, groups, strict=True):
        for name, value in ours.items():
            if not _same_kind(group[name], value):
                raise ProtocolError(
                    f"the checkpoint is damaged, or of another optimiser: {name} is {shown(group[name])} there and "
                    f"{shown(value)} here"
                )
    entries: dict[int, dict[str, Any]] = {int(index): dict(own) for index, own in state.values["scalars"].items()}
    for name, tensor in state.tensors.items():
        index, _, key = name.partition(".")
        entries.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": entries, "param_groups": groups})


def _same_kind(kept: Any, own: Any) -> bool:
    """Return True if a JSON value has a suitable type to replace an optimiser's setting.

    Numbers replace numbers. A flag or None can replace either of them.

    >>> _same_kind([0.9, 0.999], (0.5, 0.99)), _same_kind("x", 0.5), _same_kind(None, 0.5), _same_kind(True, None)
    (True, False, False, True)
    """
    if isinstance(own, list | tuple):
        return isinstance(kept, list | tuple) and len(kept) == len(own) and all(map(_same_kind, kept, own))
    if own is None or isinstance(own, bool):
        return kept is None or isinstance(kept, bool)
    if isinstance(own, int | float):
        return isinstance(kept, int | float) and not isinstance(kept, bool)
    return isinstance(kept, type(own))
