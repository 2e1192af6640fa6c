"""Conversion of a sequential network of supported layers into stages."""

from torch import nn

from dbcl._torch import has_global_hooks, has_hooks
from dbcl.engines.stacked.layers import (
    Apply,
    BatchNorm,
    Conv2d,
    Dropout,
    Flatten,
    GroupNorm,
    LayerNorm,
    NotStackable,
    Stage,
    ToImages,
    ToRows,
)
from dbcl.engines.stacked.linear import Linear
from dbcl.model.tensors import named_tensors
from dbcl.round_plan import RoundPlan
from dbcl.sketch.buckets import BucketSketch

ELEMENTWISE = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.GELU,
    nn.ELU,
    nn.SiLU,
    nn.Softplus,
    nn.Hardtanh,
    nn.ReLU6,
    nn.Identity,
)
POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
IMAGE_LAYERS = (nn.Conv2d, nn.GroupNorm, nn.BatchNorm2d, *POOLS)
ROW_LAYERS = (nn.Linear, nn.Flatten, nn.LayerNorm, nn.BatchNorm1d)


def build_stages(model: nn.Module, plan: RoundPlan, ndim: int) -> list[Stage]:
    """Convert a network into stages, or raise `NotStackable` with the reason.

    Args:
        model: The network.
        plan: Public plan of the round.
        ndim: Number of axes of one example.
    """
    hooked = where_hooked(model)
    if hooked is not None:
        raise NotStackable(f"{hooked}: has hooks")
    for part in plan.tensors:
        if part.sketched and not isinstance(plan.sketches[part.name], BucketSketch):
            raise NotStackable(f"{part.name}: sketch {part.scheme}")
        if part.inputs:
            raise NotStackable(f"{part.name}: its inputs are not all axes but the first")
    stages: list[Stage] = []
    images = False
    for name, layer in _leaves(model, ""):
        if isinstance(layer, IMAGE_LAYERS) and not images:
            if stages or ndim != 3:
                raise NotStackable(f"{name}: images after rows")
            stages.append(ToImages())
            images = True
        if isinstance(layer, ROW_LAYERS) and images:
            stages.append(ToRows())
            images = False
        if isinstance(layer, nn.BatchNorm1d) and ndim != 1:
            raise NotStackable(f"{name}: batch norm over {ndim}-dimensional examples")
        stages.append(_stage(layer, f"{name}.", images))
        ndim = 1 if isinstance(layer, nn.Flatten) else ndim
    known = {name for stage in stages for name in stage.names}
    shared = sorted(known - named_tensors(model).keys())
    if shared:
        raise NotStackable(f"{shared[0]}: a tensor that another layer uses, too")
    missing = [part.name for part in plan.tensors if part.name not in known]
    if missing:
        raise NotStackable(f"no stage holds {', '.join(missing)}")
    _reorder(stages, plan)
    return stages


def where_hooked(model: nn.Module) -> str | None:
    """Return the first module with a forward or backward hook, or None. Stages do not call hooks."""
    if has_global_hooks():
        return "every module"
    return next((path or "the model" for path, module in model.named_modules() if has_hooks(module)), None)


def _leaves(module: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    if "forward" in vars(module):  # set on this one module, so that its class does not tell what it computes
        raise NotStackable(f"{path or 'the model'}: has a forward of its own")
    if type(module) is nn.Sequential:
        prefix = f"{path}." if path else ""
        # With duplicates, which `named_children` leaves out: a module may be called more than once.
        every = module.named_modules(remove_duplicate=False)
        children = [(name, child) for name, child in every if name and "." not in name]
        return [leaf for name, child in children for leaf in _leaves(child, prefix + name)]
    return [(path, module)]


def _stage(layer: nn.Module, prefix: str, images: bool) -> Stage:
    kind = type(layer)  # not isinstance: a subclass may compute something else
    if kind is nn.Linear:
        return Linear(layer, prefix)  # type: ignore[arg-type]
    if kind is nn.Conv2d:
        return Conv2d(layer, prefix)  # type: ignore[arg-type]
    if kind is nn.Flatten and layer.start_dim == 1 and layer.end_dim == -1:
        return Flatten()
    if kind in ELEMENTWISE or (kind in POOLS and not getattr(layer, "return_indices", False)):
        return Apply(layer)
    if kind is nn.Dropout:
        return Dropout(layer, images)  # type: ignore[arg-type]
    if kind in (nn.BatchNorm1d, nn.BatchNorm2d):
        return BatchNorm(layer, prefix, images)  # type: ignore[arg-type]
    if kind is nn.LayerNorm:
        return LayerNorm(layer, prefix)  # type: ignore[arg-type]
    if kind is nn.GroupNorm:
        return GroupNorm(layer, prefix)  # type: ignore[arg-type]
    raise NotStackable(f"{prefix[:-1] or 'the model'}: no fast form of {kind.__name__}")


def _reorder(stages: list[Stage], plan: RoundPlan) -> None:
    """Reorder the outputs of `Linear` stages to match the sketch of the next `Linear`.

    Applies where only elementwise layers lie between the two stages.
    """
    # A sample leaves inputs out, so its order is not one of all of them.
    covered = {part.name for part in plan.tensors if part.sketched and part.scheme != "sampling-v1"}
    before: Linear | None = None
    for stage in stages:
        if isinstance(stage, Linear):
            if before is not None and stage.weight in covered:
                before.reorder_outputs(stage)
            before = stage
        elif not (isinstance(stage, Apply) and isinstance(stage.layer, ELEMENTWISE)):
            before = None
