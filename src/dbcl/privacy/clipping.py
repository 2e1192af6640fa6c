"""Norm and clipping of updates, and optional noise added by the client.

R has orthonormal columns, so an update of V and the lifted update of W have the same norm.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dbcl import seeds
from dbcl.errors import ConfigError


def norm(tensors: Mapping[str, Tensor]) -> float:
    """Return the Euclidean norm of all tensors together. The result does not depend on the order of
    the tensors.

    >>> norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    5.0
    """
    lengths = [torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64) for _, tensor in sorted(tensors.items())]
    return float(torch.linalg.vector_norm(torch.stack(lengths))) if lengths else 0.0


def clip_factor(length: float, bound: float | None) -> float:
    """Return the factor that scales an update down to a maximum norm.

    Args:
        length: Norm of the update.
        bound: Maximum norm; None disables clipping.

    >>> clip_factor(4.0, 1.0), clip_factor(0.5, 1.0), clip_factor(4.0, None)
    (0.25, 1.0, 1.0)
    """
    return 1.0 if bound is None or length <= bound else bound / length


@dataclass(frozen=True)
class UpdateNoise:
    """Clipping and Gaussian noise that a client applies to its update before encoding.

    The privacy cost is not accounted, so there is no guarantee. For a guarantee use
    `dbcl.privacy.PrivacyPlan`.

    Args:
        clip: Clipping norm of the update.
        multiplier: Noise multiplier: standard deviation of the noise divided by `clip`.
        insecure_seed: Seed for reproducible experiments. The noise is then a function of the seed,
            the round, the client and the tensor's name. By default each call draws fresh noise from
            the operating system.
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
        """Clip an update to `clip` and add noise.

        Args:
            tensors: Tensors of the update by name.
            round: Number of the round, for `insecure_seed`.
        """
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
