"""Similarity of recovered and true images (PSNR, SSIM), and a PNG grid of both."""

import base64
import io
from collections.abc import Sequence

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from dbcl.data import Dataset

Span = tuple[float, float]
INK, MUTED, WORST = "#1c2733", "#5f6b78", "#c0392b"
CEILING = 200.0  # dB, for equal images instead of infinity


def span(dataset: Dataset) -> Span:
    """Return the values of black and white in a dataset: (0 - mean) / std and (1 - mean) / std.

    >>> from dbcl.data import load
    >>> low, high = span(load("digits"))
    >>> f"{low:.2f} {high:.2f}"
    '-0.43 2.82'
    """
    return (0 - dataset.mean) / dataset.std, (1 - dataset.mean) / dataset.std


def unit(images: Tensor, span: Span) -> Tensor:
    """Scale pixels to [0, 1], clipped to the range of the dataset.

    >>> unit(torch.tensor([-3.0, -1.0, 0.0, 1.0]), (-1.0, 1.0))
    tensor([0.0000, 0.0000, 0.5000, 1.0000], dtype=torch.float64)
    """
    low, high = span
    return ((images.detach().cpu().double() - low) / (high - low)).clamp(0, 1)


def pair(recovered: Tensor, truth: Tensor, span: Span = (0.0, 1.0)) -> Tensor:
    """Reorder recovered images to match the true images, by the permutation with the smallest total
    squared error.

    The gradient of a batch does not contain the order of the images, and an attack may return them
    in any order.

    >>> truth = torch.stack([torch.zeros(1, 2, 2), torch.ones(1, 2, 2)])
    >>> pair(truth.flip(0), truth).equal(truth)
    True
    """
    one, other = unit(recovered, span).flatten(1), unit(truth, span).flatten(1)
    cost = (one[None] - other[:, None]).square().sum(dim=-1)  # (true, recovered)
    _, order = linear_sum_assignment(cost.numpy())
    return recovered[torch.from_numpy(order).to(recovered.device)]


def psnr(recovered: Tensor, truth: Tensor, span: Span = (0.0, 1.0), *, ordered: bool = False) -> Tensor:
    """Peak signal-to-noise ratio of each true image in dB: -10 log10 of the mean squared error of
    pixels in [0, 1].

    The images of one batch are paired first, unless `ordered` is set. Results of separate attacks
    must not be paired, because each would then count the best of all results. Equal images have 200
    dB.

    >>> psnr(torch.full((1, 1, 4, 4), 0.6), torch.full((1, 1, 4, 4), 0.5)).round(decimals=1)
    tensor([20.], dtype=torch.float64)
    """
    aligned = recovered if ordered else pair(recovered, truth, span)
    errors = (unit(aligned, span) - unit(truth, span)).square().flatten(1).mean(dim=1)
    return -10 * torch.log10(errors.clamp(min=10 ** (-CEILING / 10)))


def ssim(recovered: Tensor, truth: Tensor, span: Span = (0.0, 1.0), *, ordered: bool = False) -> Tensor:
    """Structural similarity of each true image, 1 for equal images (Wang 2004, Gaussian window of
    11 pixels).

    >>> image = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    >>> ssim(image, image).round(decimals=3)
    tensor([1., 1.], dtype=torch.float64)
    """
    from torchmetrics.functional.image import structural_similarity_index_measure  # slow to import

    aligned = recovered if ordered else pair(recovered, truth, span)
    found = structural_similarity_index_measure(
        unit(aligned, span), unit(truth, span), data_range=1.0, reduction="none"
    )
    assert isinstance(found, Tensor)
    return found.reshape(-1)


def share_above(psnrs: Tensor | Sequence[float], threshold: float = 20.0) -> float:
    """Return the fraction of images above a PSNR threshold in dB. Images above about 20 dB are
    recognisable.

    >>> share_above([3.0, 25.0, 40.0, 19.0])
    0.5
    """
    return float((torch.as_tensor(psnrs, dtype=torch.float64) > threshold).double().mean())


def grid_png(rows: Sequence[tuple[str, Tensor]], span: Span = (0.0, 1.0)) -> str:
    """Draw the true images above their reconstructions, as a PNG encoded as base64.

    The first row is (caption, true images). Every further row is (caption, reconstructions in the
    same order). The PSNR is printed below each reconstruction. The reconstruction with the highest
    PSNR of a row, the worst case for the victim, is framed.

    >>> truth = torch.zeros(2, 1, 4, 4)
    >>> grid_png([("truth", truth), ("attack", truth + 0.1)])[:8]
    'iVBORw0K'
    """
    from matplotlib.figure import Figure  # slow to import

    truth = rows[0][1]
    figure = Figure(figsize=(1.2 * len(truth) + 1.6, 1.4 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), len(truth), squeeze=False)
    for line, (caption, images) in zip(panels, rows, strict=True):
        values = [] if images is truth else psnr(images, truth, span, ordered=True).tolist()
        for column, (axes, image) in enumerate(zip(line, unit(images, span), strict=True)):
            image = image[0] if image.shape[0] == 1 else image.permute(1, 2, 0)
            axes.imshow(image.numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            worst = bool(values) and values[column] == max(values)
            axes.spines[:].set(color=WORST, linewidth=2.5, visible=worst)
            if values:
                label = f"{values[column]:.1f} dB" + (", worst" if worst else "")
                axes.set_xlabel(label, color=WORST if worst else MUTED, fontsize=8)
        line[0].set_ylabel(caption, color=INK, rotation=0, ha="right", va="center", fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return base64.b64encode(buffer.getvalue()).decode()
