"""Random linear maps (sketches) derived from a seed."""

from collections.abc import Callable
from functools import partial

from dbcl.errors import SketchError
from dbcl.sketch.count import CountSketch
from dbcl.sketch.identity import Identity
from dbcl.sketch.lanes import LaneSketch
from dbcl.sketch.operator import Sketch
from dbcl.sketch.sampling import UniformSampling

SCHEMES: dict[str, Callable[..., Sketch]] = {
    "count-v1": CountSketch,
    "count-hashed-v1": partial(CountSketch, hashed=True),
    "sampling-v1": UniformSampling,
    "identity-v1": Identity,
    LaneSketch.scheme: LaneSketch,
}


def draw(
    scheme: str, dim: int, width: int, *, seed: bytes, round: int, name: str, lane: int = 0, lanes: int = 1
) -> Sketch:
    """Draw the sketch of a scheme. The same arguments give the same map on every machine.

    Args:
        scheme: Name of the sketch scheme, such as "count-v1".
        dim: Number of inputs.
        width: Number of outputs.
        seed: Public seed.
        round: Number of the round.
        name: Name of the tensor.
        lane: Index of the lane. Only "lanes-v1" depends on the lane.
        lanes: Number of lanes.

    >>> draw("count-v1", 6, 3, seed=bytes(32), round=0, name="fc1.weight")
    CountSketch(6 -> 3)
    """
    if scheme not in SCHEMES:
        raise SketchError(f"unknown sketch {scheme!r}; this version knows {', '.join(SCHEMES)}")
    own = {"lane": lane, "lanes": lanes} if scheme == LaneSketch.scheme else {}
    return SCHEMES[scheme](dim, width, seed=seed, round=round, name=name, **own)


__all__ = ["SCHEMES", "CountSketch", "Identity", "LaneSketch", "Sketch", "UniformSampling", "draw"]
