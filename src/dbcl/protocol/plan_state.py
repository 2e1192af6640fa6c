"""Checkpoint representation of a run's plan: the digest, and the settings for error messages."""

from collections.abc import Mapping, Sequence
from typing import Any

from dbcl.errors import ProtocolError, listed, plain
from dbcl.plan import SketchPlan


def plan_values(plan: SketchPlan) -> dict[str, Any]:
    """Return the digest and the settings of a plan, for a checkpoint.

    The settings are used only to describe differences in an error.
    """
    tensors = {
        tensor.name: {
            "sketch": tensor.scheme, "ratio": list(tensor.ratio), "veil": tensor.veil, "input axes": list(tensor.inputs)
        }
        for tensor in plan.tensors
    }  # fmt: skip
    base = {tensor.name: tensor.veil for tensor in plan.base}
    return {"plan": plan.digest, "tensors": tensors, "lanes": plan.lanes, "base": base}


def check_plan(kept: Mapping[str, Any], plan: SketchPlan) -> None:
    """Compare a checkpoint's plan with the current plan.

    Args:
        kept: The values of the checkpoint.
        plan: The current plan.

    Raises:
        ProtocolError: The plans differ. The message lists all differences.
    """
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
    """Return the differences of two plans, one line per group of tensors with equal differences."""
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
    """Format a plan setting for an error message; a range with equal ends becomes one number.

    >>> _said([2.0, 2.0]), _said([2.0, 4.0]), _said("count-v1")
    ('2.0', '2.0, 4.0', 'count-v1')
    """
    return plain(", ".join(dict.fromkeys(map(str, value))) or "none" if isinstance(value, list) else str(value))


def _some(names: Sequence[str]) -> str:
    """Format the first names of a list and the number of remaining names.

    >>> _some(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
