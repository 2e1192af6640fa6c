"""Master weights in a wider dtype, to preserve small updates."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

HALF = (torch.bfloat16, torch.float16)


class MasterWeights:
    """float32 master copies of half-precision tensors; the model holds the rounded values.

    bfloat16 has 8 significant bits, so changes below 1/256 of a weight would be rounded away. With
    `exact`, every tensor has a float64 copy. A guarantee requires the weights to equal the sum of
    all updates, and float32 rounding could change this sum by more than the contribution of one
    example.

    >>> model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    >>> own = {"weight": nn.init.ones_(model.weight)}
    >>> master_weights = MasterWeights(own)
    >>> for _ in range(100):
    ...     _ = master_weights.read(own)["weight"].data.add_(0.001)
    ...     master_weights.write(own)
    >>> model.weight.item()
    1.1015625
    """

    def __init__(self, own: Mapping[str, Tensor], *, exact: bool = False) -> None:
        wide = torch.float64 if exact else torch.float32
        self.tensors = {
            name: nn.Parameter(tensor.detach().to(wide)) if isinstance(tensor, nn.Parameter) else tensor.to(wide)
            for name, tensor in own.items()
            if tensor.dtype in HALF or (exact and tensor.dtype == torch.float32)
        }

    def get(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """Return a parameter's master copy, or the parameter itself if it has no master copy."""
        master = self.tensors.get(name)
        return master if isinstance(master, nn.Parameter) else parameter

    @torch.no_grad()
    def read(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the master weights, including changes made to the model since the last `write`."""
        for name, master in self.tensors.items():
            tensor = own[name].detach()
            if master.device != tensor.device:
                master.data = master.data.to(tensor.device)
            master.copy_(torch.where(master.to(tensor.dtype) == tensor, master, tensor.to(master.dtype)))
        return dict(self.tensors)

    @torch.no_grad()
    def write(self, own: Mapping[str, Tensor]) -> None:
        """Write the rounded master weights into the model."""
        for name, master in self.tensors.items():
            own[name].copy_(master)

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Restore saved master weights."""
        for name, master in self.tensors.items():
            master.copy_(saved[name])
