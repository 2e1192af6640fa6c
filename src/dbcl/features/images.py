"""Scattering features of images, normalised without looking at any data."""

import torch
from torch import Tensor, nn

from dbcl.features.scattering import Scattering

YUV = ((0.299, 0.587, 0.114), (-0.14713, -0.28886, 0.436), (0.615, -0.51499, -0.10001))
"""Brightness and two colour differences (ITU-R BT.601). On CIFAR-10 a linear head gains 3 points from it."""
MIN_GROUP_CHANNELS = 3
"""Channels that are normalised together, at least."""
FAINTEST = 1e-5
"""Variance below which a group is not amplified to 1: what is fainter than that in an image is mostly noise."""


class ImageFeatures(nn.Module):
    """Features of images for a linear or a small convolutional head: (n, channels, height, width) to (n, ...).

    Colour images become brightness and colour differences, each channel is scattered, and groups of channels are
    normalised in each image by itself. There are no parameters and no statistics of a data set.

    Args:
        shape: Channels, height and width of an image.
        scales: Number of wavelet scales, as in `Scattering`.
        angles: Number of wavelet orientations.

    >>> features = ImageFeatures((1, 28, 28))
    >>> features(torch.rand(5, 1, 28, 28)).shape, sum(each.numel() for each in features.parameters())
    (torch.Size([5, 81, 7, 7]), 0)
    """

    def __init__(self, shape: tuple[int, int, int], *, scales: int = 2, angles: int = 8) -> None:
        super().__init__()
        channels, height, width = shape
        self.scattering = Scattering(height, width, scales=scales, angles=angles)
        self.shape = (channels * self.scattering.channels, *self.scattering.size)
        self.version = f"scattering-v1 {shape} {scales} {angles}"
        """Identifier of the computation; other features have another version."""
        group = next(size for size in range(MIN_GROUP_CHANNELS, self.shape[0] + 1) if self.shape[0] % size == 0)
        self.normalise = nn.GroupNorm(self.shape[0] // group, self.shape[0], eps=FAINTEST, affine=False)
        self.register_buffer("colours", torch.tensor(YUV) if channels == 3 else None, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the features, (n, channels', height', width')."""
        if self.colours is not None:
            images = torch.einsum("ij,njhw->nihw", self.colours, images)
        features: Tensor = self.normalise(self.scattering(images).flatten(1, 2))
        return features
