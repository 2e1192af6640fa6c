"""2-D wavelet scattering transform (Bruna and Mallat 2013): image features without learned filters.

The transform convolves an image with oriented wavelets, takes the modulus, and averages over blocks
of 2^scales pixels. The second order repeats this for the moduli of the first order. All filters are
fixed, so the features reveal nothing about training data, and each client can compute them locally.
Training only a small head on these features needs far less noise for a guarantee than training a
complete network.

Filters are Morlet wavelets in the frequency domain, where they are real. A signal is downsampled by
folding its spectrum, so all operations after a wavelet of scale j work on 2^j times fewer rows and
columns.
"""

import math

import torch
from torch import Tensor, nn

from dbcl.errors import ConfigError

SIGMA = 0.8
"""Width of the finest wavelet's envelope, in pixels."""
CENTRE = 0.75 * math.pi
"""Centre frequency of the finest wavelet, in radians per pixel."""
ALIASES = 2
"""Number of spectral periods on each side that are folded into a filter. Further periods are below
float32 precision.
"""


class Scattering(nn.Module):
    """Module that maps images (..., height, width) to scattering coefficients of orders 0 to 2,
    (..., channels, height', width').

    `channels` is 1 + scales * angles + angles^2 * scales * (scales - 1) / 2. Height and width are
    divided by 2^scales.

    Args:
        height: Height of the images.
        width: Width of the images.
        scales: Number of wavelet scales. The features are invariant to shifts much smaller than
            2^scales pixels.
        angles: Number of wavelet orientations in [0, pi).

    >>> Scattering(28, 28)(torch.zeros(5, 1, 28, 28)).shape
    torch.Size([5, 1, 81, 7, 7])
    """

    phi: Tensor
    psi: Tensor

    def __init__(self, height: int, width: int, *, scales: int = 2, angles: int = 8) -> None:
        super().__init__()
        step = 2**scales
        if scales < 1 or angles < 1 or min(height, width) <= step:
            raise ConfigError(
                f"scattering takes 1 scale and 1 angle or more, and images of more than 2^scales pixels a side, got "
                f"{scales} scales, {angles} angles and {height} x {width} pixels"
            )
        self.scales, self.angles = scales, angles
        self.channels = 1 + scales * angles + angles**2 * scales * (scales - 1) // 2
        self.size = (-(-height // step), -(-width // step))
        # A block of reflected pixels on each side keeps one border out of the other: convolutions are periodic.
        padded = [(blocks + 2) * step for blocks in self.size]
        before = [(whole - own) // 2 for whole, own in zip(padded, (height, width), strict=True)]
        self._padding = (before[1], padded[1] - width - before[1], before[0], padded[0] - height - before[0])
        slant = 4 / angles
        wavelets = [
            [_morlet(padded, j, math.pi * angle / angles, slant) for angle in range(angles)] for j in range(scales)
        ]
        self.register_buffer("psi", torch.stack([torch.stack(row) for row in wavelets]).float(), persistent=False)
        low = _gaussian(padded, SIGMA * 2 ** (scales - 1), 1.0, 0.0, 0.0)
        self.register_buffer("phi", low.float(), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the coefficients, with channels sorted by order, scale and angle."""
        leading = images.shape[:-2]
        padded = nn.functional.pad(images.flatten(0, -3)[None], self._padding, mode="reflect")[0]
        spectrum = torch.fft.fft2(padded)
        found, second = [self._averaged(spectrum, 0).unsqueeze(1)], []
        for j in range(self.scales):
            first = torch.fft.fft2(_modulus(spectrum.unsqueeze(1) * self.psi[j], 2**j))
            found.append(self._averaged(first, j))
            for coarser in range(j + 1, self.scales):
                wavelets = _folded(self.psi[coarser], 2**j)
                moduli = _modulus(first.unsqueeze(2) * wavelets, 2 ** (coarser - j))
                second.append(self._averaged(torch.fft.fft2(moduli), coarser).flatten(1, 2))
        coefficients = torch.cat([*found, *second], dim=1)
        return coefficients.view(*leading, *coefficients.shape[1:])

    def _averaged(self, spectrum: Tensor, scale: int) -> Tensor:
        """Average a signal of resolution 2^-scale over blocks of 2^scales pixels, and remove the
        padding.
        """
        factor = 2 ** (self.scales - scale)
        smooth = spectrum * _folded(self.phi, 2**scale)
        values: Tensor = torch.fft.ifft2(_folded(smooth, factor)).real / factor**2
        return values[..., 1 : 1 + self.size[0], 1 : 1 + self.size[1]]


def _modulus(spectrum: Tensor, factor: int) -> Tensor:
    """Return the modulus of every `factor`-th value of a signal, given its spectrum."""
    signal: Tensor = torch.fft.ifft2(_folded(spectrum, factor))
    return signal.abs() / factor**2


def _folded(spectrum: Tensor, factor: int) -> Tensor:
    """Return the spectrum of a signal subsampled by `factor` in each direction, times factor^2."""
    if factor == 1:
        return spectrum
    height, width = (length // factor for length in spectrum.shape[-2:])
    rows, columns = ([slice(k * own, (k + 1) * own) for k in range(factor)] for own in (height, width))
    # In place, block by block: a sum over two axes of a reshaped spectrum takes four times as long.
    folded = spectrum[..., rows[0], columns[0]].clone()
    for row in rows:
        for column in columns:
            if row.start or column.start:
                folded += spectrum[..., row, column]
    return folded


def _morlet(size: list[int], scale: int, angle: float, slant: float) -> Tensor:
    """Return the spectrum of a zero-mean Morlet wavelet."""
    sigma, centre = SIGMA * 2**scale, CENTRE / 2**scale
    wave, envelope = (_gaussian(size, sigma, slant, angle, at) for at in (centre, 0.0))
    return wave - envelope * (wave[0, 0] / envelope[0, 0])


def _gaussian(size: list[int], sigma: float, slant: float, angle: float, centre: float) -> Tensor:
    """Return the spectrum of a frequency-shifted Gaussian, with width sigma along `angle` and sigma
    / slant across it.
    """
    periods = 2 * math.pi * torch.arange(-ALIASES, ALIASES + 1, dtype=torch.float64)
    rows, columns = (2 * math.pi * torch.fft.fftfreq(length, dtype=torch.float64) for length in size)
    y = (rows[:, None] + periods).view(len(rows), 1, -1, 1)
    x = (columns[:, None] + periods).view(1, len(columns), 1, -1)
    along = x * math.cos(angle) + y * math.sin(angle) - centre
    across = y * math.cos(angle) - x * math.sin(angle)
    return torch.exp(-0.5 * sigma**2 * (along**2 + (across / slant) ** 2)).sum(dim=(2, 3))
