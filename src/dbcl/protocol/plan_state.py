"""The plan of a run in a checkpoint: its digest, and its choices for the error if they differ."""

from collections.abc import Mapping, Sequence
from typing import Any

from dbcl.errors import ProtocolError, listed, plain
from dbcl.plan import SketchPlan


def plan_values(plan: SketchPlan) -> dict[str, Any]:
    """Return what a checkpoint keeps of a plan: its digest, and its choices for the error where they differ."""
    tensors = {
        tensor.name: {
            "sketch": tensor.scheme, "ratio": list(tensor.ratio), "veil": tensor.veil, "input axes": list(tensor.inputs)
        }
        for tensor in plan.tensors
    }  # fmt: skip
    base = {tensor.name: tensor.veil for tensor in plan.base}
    return {"plan": plan.digest, "tensors": tensors, "lanes": plan.lanes, "base": base}


def check_plan(kept: Mapping[str, Any], plan: SketchPlan) -> None:
    """Raise `ProtocolError`, with all differences, if a checkpoint was written under another plan."""
    if kept["plan"] == plan.digest:
        return
    own, found = plan_values(plan), list[str]()
    if kept.get("lanes", plan.lanes) != plan.lanes:
        found.append(f"lanes is {plan.lanes} here and {plain(str(kept['lanes']))} in the checkpoint")
    before = kept.get("tensors")
    if isinstance(before, Mapping):
        found += _plan_differences(own["tensors"], before)
    if kept.get("base", own["base"]) != own["base"]:
        found.append("the frozen parameters that are sent, or their veils, differ (send_frozen)")
    raise ProtocolError(
        listed("the checkpoint belongs to another plan:", found or ["the plan's layout differs"], most=8)
    )


def _plan_differences(own: Mapping[str, Mapping[str, Any]], kept: Mapping[str, Any]) -> list[str]:
    """Return the differences of two plans, one line for all tensors that differ in the same way."""
    lines: dict[str, list[str]] = {}
    for name in [*own, *(other for other in kept if other not in own)]:
        was = kept.get(name)
        if name not in own:
            lines.setdefault("in the checkpoint, and not sent here", []).append(plain(name))
        elif not isinstance(was, Mapping):
            lines.setdefault("sent here, and not in the checkpoint", []).append(name)
        else:
            for what, value in own[name].items():
                if value != was.get(what):
                    line = f"{what} is {_said(value)} here and {_said(was.get(what))} in the checkpoint"
                    lines.setdefault(line, []).append(name)
    return [f"{line}: {_some(names)}" for line, names in lines.items()]


def _said(value: Any) -> str:
    """Write a plan's choice for an error: a ratio with two equal ends as one number.

    >>> _said([2.0, 2.0]), _said([2.0, 4.0]), _said("count-v1")
    ('2.0', '2.0, 4.0', 'count-v1')
    """
    return plain(", ".join(dict.fromkeys(map(str, value))) or "none" if isinstance(value, list) else str(value))


def _some(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are.

    >>> _some(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
