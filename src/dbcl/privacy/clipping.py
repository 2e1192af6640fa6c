"""Norm and clipping of updates, and a client's own noise.

R has orthonormal columns, so an update of V and the update of W that it is lifted to have the same length.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dbcl import seeds
from dbcl.errors import ConfigError


def norm(tensors: Mapping[str, Tensor]) -> float:
    """Return the Euclidean norm of all tensors together, to the last digit the same in any order.

    >>> norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    5.0
    """
    lengths = [torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64) for _, tensor in sorted(tensors.items())]
    return float(torch.linalg.vector_norm(torch.stack(lengths))) if lengths else 0.0


def clip_factor(length: float, bound: float | None) -> float:
    """Return the factor that scales an update of norm `length` down to the bound.

    >>> clip_factor(4.0, 1.0), clip_factor(0.5, 1.0), clip_factor(4.0, None)
    (0.25, 1.0, 1.0)
    """
    return 1.0 if bound is None or length <= bound else bound / length


@dataclass(frozen=True)
class UpdateNoise:
    """Clipping and normal noise (the Gaussian mechanism) that a client applies to its update before it is encoded.

    Nothing is accounted, so no guarantee is stated. For a guarantee use `dbcl.privacy.PrivacyPlan`.

    Args:
        clip: Norm to which the update is clipped.
        multiplier: Standard deviation of the noise on each value, relative to `clip`.
        insecure_seed: Fixes the noise for experiments: it then follows from this number, the round, the client and the
            tensor's name. By default it comes from the operating system, anew in every call.
        client: Number of the client, for `insecure_seed`.

    >>> noise = UpdateNoise(clip=1.0, multiplier=0.01, insecure_seed=0)
    >>> noise({"w": torch.ones(4)}, round=0)["w"]
    tensor([0.5028, 0.5000, 0.5010, 0.4936])
    """

    clip: float
    multiplier: float = 0.0
    insecure_seed: int | None = None
    client: int = 0

    def __post_init__(self) -> None:
        if not self.clip > 0 or not self.multiplier >= 0:
            raise ConfigError(
                f"update_clip must be above 0 and update_noise 0 or more, got {self.clip} and {self.multiplier}"
            )

    def __call__(self, tensors: Mapping[str, Tensor], *, round: int) -> dict[str, Tensor]:
        """Clip the tensors of one update and add noise."""
        factor = clip_factor(norm(tensors), self.clip)
        key = seeds.fresh()
        if self.insecure_seed is not None:
            key = seeds.derive(bytes(seeds.SEED_BYTES), "update-noise", self.insecure_seed, round, self.client)
        noised = {}
        for name, tensor in tensors.items():
            noised[name] = tensor * factor
            if self.multiplier:
                drawn = torch.from_numpy(seeds.normals(key, "update-noise-v1", name, n=tensor.numel())).to(tensor)
                noised[name] += self.multiplier * self.clip * drawn.reshape(tensor.shape)
        return noised
