"""Simulations of the formulas in `theory.py`: means over many draws, with standard errors."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dbcl.sketch import Sketch, draw
from dbcl_audit.theory import linear_error, option_one, option_one_error, product_error, smooth, veil_cosine


@dataclass(frozen=True)
class Check:
    """Predicted and simulated value of one quantity. `error` is the standard error of `measured`.

    >>> Check("a mean", 1.02, 1.0, 0.01).deviation
    2.0
    """

    name: str
    measured: float
    predicted: float
    error: float

    @property
    def deviation(self) -> float:
        """Difference between measured and predicted value, in standard errors."""
        gap = self.measured - self.predicted
        return round(gap / self.error, 6) if self.error else (0.0 if abs(gap) < 1e-9 else math.copysign(math.inf, gap))


def simulate_option_one(
    scheme: str, *, dout: int = 4, dim: int = 24, width: int = 12, draws: int = 1000, seed: int = 0
) -> Check:
    """Simulate theorem 1: the mean of |D_hat - D|^2 over fresh sketches, relative to |D|^2.

    >>> check = simulate_option_one("count-v1", draws=50)
    >>> abs(check.deviation) < 4, check.predicted > 100  # the estimate is worse than none
    (True, True)
    """
    W_old, W_new, _ = draw_weights(dout, dim, 1, seed)
    D = W_old - W_new
    values = [float((hat - D).square().sum()) for hat in _estimates(scheme, W_old, W_new, width, draws, seed)]
    size = float(D.square().sum())
    return _check(
        f"option I, {scheme}",
        np.array(values) / size,
        option_one_error(scheme, W_old, W_new, width) / size,
    )


def simulate_linear(
    scheme: str, *, dout: int = 3, dim: int = 24, width: int = 12, draws: int = 1000, seed: int = 0
) -> Check:
    """Simulate theorem 2: the mean of |(D_hat - D) V^T|^2 over fresh sketches, relative to |D
    V^T|^2.

    >>> abs(simulate_linear("sampling-v1", draws=50).deviation) < 4
    True
    """
    W_old, W_new, V = draw_weights(dout, dim, 2, seed)
    target = (W_old - W_new) @ V.T
    values = [float((h @ V.T - target).square().sum()) for h in _estimates(scheme, W_old, W_new, width, draws, seed)]
    size = float(target.square().sum())
    return _check(
        f"linear property, {scheme}",
        np.array(values) / size,
        linear_error(scheme, W_old, W_new, V, width) / size,
    )


def simulate_product(
    scheme: str, *, rows: int = 3, dim: int = 24, width: int = 12, draws: int = 1000, seed: int = 0
) -> Check:
    """Simulate lemma 5: the mean of |A S S^T B^T - A B^T|^2 over fresh sketches, relative to |A
    B^T|^2.

    >>> abs(simulate_product("count-hashed-v1", draws=50).deviation) < 4
    True
    """
    A, _, B = draw_weights(rows, dim, rows, seed)
    product = A @ B.T
    sketches = (_sketch(scheme, dim, width, seed, index) for index in range(draws))
    values = [float((sketch.expand(sketch.apply(A)) @ B.T - product).square().sum()) for sketch in sketches]
    size = float(product.square().sum())
    return _check(f"product, {scheme}", np.array(values) / size, product_error(scheme, A, B, width) / size)


def simulate_unbiased(scheme: str, *, dim: int = 25, width: int = 12, draws: int = 1000, seed: int = 0) -> list[Check]:
    """Simulate E[S S^T] = I: compare the mean of x S S^T y^T with x y^T for three fixed pairs of
    vectors.

    >>> [abs(check.deviation) < 4 for check in simulate_unbiased("count-v1", draws=100)]
    [True, True, True]
    """
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 3, dim, generator=generator, dtype=torch.float64)
    y[0] = x[0]  # one pair of equals: the length of a vector
    sketches = (_sketch(scheme, dim, width, seed, index) for index in range(draws))
    values = np.array([(sketch.expand(sketch.apply(x)) * y).sum(1).tolist() for sketch in sketches])  # (draws, 3)
    return [_check(f"S S^T, {scheme}, pair {i}", values[:, i], float(x[i] @ y[i])) for i in range(3)]


def simulate_listing(*, dim: int = 25, ratio: int = 2, draws: int = 1000, seed: int = 0) -> Check:
    """Simulate the bias of the listing in the paper, which keeps q floor(dim / q) inputs: E |x S|^2
    is this fraction of |x|^2.

    >>> check = simulate_listing(draws=100)
    >>> check.predicted, abs(check.deviation) < 4
    (0.96, True)
    """
    numbers = np.random.default_rng(seed)
    width = dim // ratio
    x = numbers.standard_normal(dim)
    values = np.empty(draws)
    for index in range(draws):
        table = numbers.permutation(dim)[: width * ratio].reshape(ratio, width)  # hash_idx of the listing
        signs = numbers.choice([-1.0, 1.0], dim)
        values[index] = np.square((x * signs)[table].sum(0)).sum()
    return _check("the paper's listing", values / np.square(x).sum(), width * ratio / dim)


def simulate_veil(kappa: float, *, rounds: int = 20_000, seed: int = 0) -> Check:
    """Simulate the veil: the cosine between the smoothed and the true steps of a scalar random walk
    observed in noise of size kappa.

    The standard error is computed from 20 blocks of rounds.

    >>> abs(simulate_veil(2.0).deviation) < 4
    True
    """
    numbers = np.random.default_rng(seed)
    margin = 40 * math.ceil(1 + 2 * kappa)  # both ends are left out: there the smoother is not steady
    steps = numbers.standard_normal(rounds + 2 * margin)
    walk = np.concatenate([[0.0], np.cumsum(steps)])
    guess = smooth(walk + kappa * numbers.standard_normal(len(walk)), kappa)
    blocks = [np.array_split(series[margin:-margin], 20) for series in (guess, steps)]
    dots, own, true = (
        np.array([float(a @ b) for a, b in zip(first, second, strict=True)])
        for first, second in ((blocks[0], blocks[1]), (blocks[0], blocks[0]), (blocks[1], blocks[1]))
    )
    whole = dots.sum() / math.sqrt(own.sum() * true.sum())
    spread = (dots / np.sqrt(own * true)).std(ddof=1) / math.sqrt(len(dots))
    return Check(f"veil, kappa {kappa:g}", float(whole), veil_cosine(kappa), float(spread) if spread > 1e-12 else 0.0)


def draw_weights(dout: int, dim: int, rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the weights of the simulations: W_old, W_new = W_old - D with D of a tenth of the size,
    and a detector V.

    >>> [tuple(each.shape) for each in draw_weights(4, 24, 2, seed=0)]
    [(4, 24), (4, 24), (2, 24)]
    """
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(dout, dim, generator=generator, dtype=torch.float64)
    D = 0.1 * torch.randn(dout, dim, generator=generator, dtype=torch.float64)
    return W, W - D, torch.randn(rows, dim, generator=generator, dtype=torch.float64)


def _estimates(scheme: str, W_old: Tensor, W_new: Tensor, width: int, draws: int, seed: int) -> list[Tensor]:
    pairs = ((_sketch(scheme, W_old.shape[1], width, seed, 2 * index + k) for k in (0, 1)) for index in range(draws))
    return [option_one(W_old, W_new, old, new) for old, new in pairs]


def _sketch(scheme: str, dim: int, width: int, seed: int, index: int) -> Sketch:
    return draw(scheme, dim, width, seed=seed.to_bytes(32, "big"), round=index, name="theory")


def _check(name: str, values: NDArray[np.float64], predicted: float) -> Check:
    error = float(values.std(ddof=1) / math.sqrt(len(values)))
    return Check(name, float(values.mean()), predicted, error if error > 1e-12 * abs(predicted) else 0.0)
