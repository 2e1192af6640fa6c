"""Theorems of the paper and the cosine formula for the veil. `theory_checks.py` simulates each
formula.

Results (each is tested in tests/audit/test_theory.py):

- E[S S^T] = I holds for every sketch of this library. It does not hold for the listing in the paper
  if q does not divide dim.
- Theorems 1 and 2 hold with equality for textbook (hashed) buckets. For balanced buckets, which the
  listing in the paper draws, the factor is not 1/s but the probability that two inputs share a
  bucket: at ratio 2, half of the printed factor. The bound "Omega(dim / s) for s < dim" then fails:
  the factor is ratio - 1, which is near 0 for s near dim.
- The corollary requires entries with mean zero. For any other mean, the error is of order 1/s
  instead of dim/s times |W V^T|^2.
- The "stronger bound" in the remark of the paper is false as printed: for weights in general
  position, the minimum is zero if dout <= s, because Z_1 and Z_2 may depend on D. This result does
  not imply a successful attack.
- The statement of Lemma 5 swaps the indices of a and b. The proof of the lemma and this module use
  the correct indices.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dbcl.errors import SketchError
from dbcl.sketch import Sketch

COUNTS = ("count-v1", "count-hashed-v1")


def collision(scheme: str, dim: int, width: int) -> float:
    """Return the probability that two given inputs of a count sketch share a bucket: 1/s if hashed,
    about (q - 1)/(dim - 1) if balanced.

    >>> collision("count-hashed-v1", 8, 4), round(collision("count-v1", 8, 4), 4)
    (0.25, 0.1429)
    """
    if scheme not in COUNTS:
        raise SketchError(f"only count sketches have buckets ({', '.join(COUNTS)}), got {scheme!r}")
    if scheme == "count-hashed-v1":
        return 1 / width
    size, larger = divmod(dim, width)
    return (larger * (size + 1) * size + (width - larger) * size * (size - 1)) / (dim * (dim - 1))


def product_error(scheme: str, A: Tensor, B: Tensor, width: int) -> float:  # (n, dim), (m, dim)
    """Return the expected squared error of a sketched product, E |A S S^T B^T - A B^T|^2.

    With a_k the k-th column of A:

    - Count sketch, p = `collision`: p (|A|^2 |B|^2 + |A B^T|^2 - 2 sum_k |a_k|^2 |b_k|^2)
    - Sampling of s out of dim: (dim - s) / (s (dim - 1)) * (dim sum_k |a_k|^2 |b_k|^2 - |A B^T|^2)

    >>> product_error("sampling-v1", torch.ones(1, 4), torch.ones(1, 4), 2)  # any half of 4 ones adds up to the same
    0.0
    >>> round(product_error("count-v1", torch.ones(1, 4), torch.ones(1, 4), 2), 6)
    8.0
    """
    dim = A.shape[1]
    columns = float((A.square().sum(0) * B.square().sum(0)).sum())
    whole, product = float(A.square().sum() * B.square().sum()), float((A @ B.T).square().sum())
    if scheme == "sampling-v1":
        return (dim - width) / (width * (dim - 1)) * (dim * columns - product)
    return collision(scheme, dim, width) * (whole + product - 2 * columns)


def linear_error(scheme: str, W_old: Tensor, W_new: Tensor, V: Tensor, width: int) -> float:
    """Return the error of a linear property detector V on option I by theorem 2, E |(D_hat - D)
    V^T|^2.

    The error is the sum of `product_error` over both rounds. The cross term vanishes because the
    new sketch is independent of all other variables.

    >>> one = torch.ones(1, 4)
    >>> round(linear_error("count-v1", one, one, one, 2), 6)
    16.0
    """
    return product_error(scheme, W_old, V, width) + product_error(scheme, W_new, V, width)


def printed_linear_error(W_old: Tensor, W_new: Tensor, V: Tensor, width: int) -> float:
    """Return the error of theorem 2 as printed in the paper, with an explicit sum over pairs of
    columns.

    The error is (1/s) sum_ij sum_(k != l) (w_ik^2 v_jl^2 + w_ik v_jk w_il v_jl), summed over the
    old and the new weights.

    >>> one = torch.ones(1, 4)
    >>> printed_linear_error(one, one, one, 2)
    24.0
    """
    total = 0.0
    for W in (W_old, W_new):
        pairs = W[:, None] * V[None]  # (dout, r, dim): w_ik v_jk
        apart = W.square().sum(1)[:, None] * V.square().sum(1)[None] - pairs.square().sum(2)
        total += float((apart + pairs.sum(2).square() - pairs.square().sum(2)).sum())
    return total / width


def option_one_error(scheme: str, W_old: Tensor, W_new: Tensor, width: int) -> float:
    """Return the error of a client's estimate from two rounds by theorem 1, E |D_hat - D|^2 = c
    (|W_old|^2 + |W_new|^2).

    c is (dim - 1) `collision` for a count sketch, and dim/s - 1 for sampling. At ratio 2, c is 1
    for sampling and for balanced buckets.

    >>> one = torch.ones(1, 8)
    >>> [round(option_one_error(name, one, one, 4), 6) for name in ("count-v1", "count-hashed-v1", "sampling-v1")]
    [16.0, 28.0, 16.0]
    """
    dim = W_old.shape[1]
    factor = dim / width - 1 if scheme == "sampling-v1" else (dim - 1) * collision(scheme, dim, width)
    return factor * float(W_old.square().sum() + W_new.square().sum())


def option_one(W_old: Tensor, W_new: Tensor, old: Sketch, new: Sketch) -> Tensor:  # (dout, dim)
    """Return a client's estimate of the update by option I of the paper: D_hat = V_old D_old
    R_old^T - V_new D_new R_new^T.

    >>> from dbcl.sketch import Identity
    >>> option_one(torch.ones(1, 2), torch.zeros(1, 2), Identity(2, 2), Identity(2, 2))
    tensor([[1., 1.]])
    """
    return old.expand(old.apply(W_old)) - new.expand(new.apply(W_new))


def remark_residual(W_old: Tensor, W_new: Tensor, old: Sketch, new: Sketch) -> float:
    """Return the residual in the remark of the paper, computed by least squares.

    The residual is the minimum over Z_1, Z_2 of |W_old S_old Z_1 - W_new S_new Z_2 - D|^2 / |D|^2.
    The paper conjectures Omega(1). If dout <= s, the columns of a single sketch span the whole
    space, and the residual is 0.

    >>> from dbcl.sketch import CountSketch
    >>> W = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).double()
    >>> remark_residual(W, 0.9 * W, *(CountSketch(8, 4, seed=bytes(32), round=number) for number in (0, 1))) < 1e-20
    True
    """
    seen, D = torch.cat([old.apply(W_old), new.apply(W_new)], dim=1), W_old - W_new
    basis, sizes, _ = torch.linalg.svd(seen, full_matrices=False)
    basis = basis[:, sizes > 1e-10 * sizes[0]]
    return float((D - basis @ (basis.T @ D)).square().sum() / D.square().sum())


def veil_cosine(kappa: float) -> float:
    """Return the smoother's cosine for an isotropic random walk in noise: (1 + 4 kappa^2)^(-1/4),
    kappa = tau / rms(u).

    The Wiener smoother of u from v_(t+1) - v_t = u_t + tau (z_(t+1) - z_t) retains the fraction 1 /
    (1 + 2 kappa^2 (1 - cos w)) of frequency w. The mean of this fraction over w is 1 / sqrt(1 + 4
    kappa^2), the squared cosine. The formula is not an upper bound: an attacker that knows the
    covariance of the updates can reach a larger cosine.

    >>> veil_cosine(0.0), round(veil_cosine(10.0), 4)
    (1.0, 0.2235)
    """
    return float((1 + 4 * kappa**2) ** -0.25)


def smooth(seen: NDArray[np.float64], kappa: float) -> NDArray[np.float64]:  # (rounds + 1,) -> (rounds,)
    """Return the steady-state smoother's estimates of a random walk's steps: u_hat_t = sum_j h_j
    (v_(t+j+1) - v_(t+j)).

    h_j = r^|j| / sqrt(1 + 4 kappa^2) with r = 1 - 2 / (1 + sqrt(1 + 4 kappa^2)), the inverse
    Fourier transform of the fraction in `veil_cosine`.

    >>> smooth(np.array([0.0, 1.0, 3.0]), kappa=0.0)
    array([1., 2.])
    """
    root = math.sqrt(1 + 4 * kappa**2)
    decay = 1 - 2 / (1 + root)
    reach = math.ceil(math.log(1e-14) / math.log(decay)) if decay > 0 else 0
    kernel = decay ** np.abs(np.arange(-reach, reach + 1)) / root
    steps = np.diff(seen)
    return np.convolve(steps, kernel)[reach : reach + len(steps)]


def corollary_factor(mean: float, dim: int, *, width: int = 8, rows: int = 64, seed: int = 0) -> float:
    """Return the constant of the corollary, E |(W S S^T - W) V^T|^2 / (dim/s |W V^T|^2), for
    entries drawn from N(mean, 1).

    The corollary states that this ratio is bounded from below as dim increases. The result is
    exact, from `product_error` with hashed buckets.

    >>> [round(corollary_factor(0.0, dim), 1) for dim in (16, 1024)]
    [0.9, 1.0]
    >>> [round(corollary_factor(1.0, dim), 3) for dim in (16, 1024)]  # falls like 1 / dim
    [0.242, 0.005]
    """
    generator = torch.Generator().manual_seed(seed)
    W, V = mean + torch.randn(2, rows, dim, generator=generator, dtype=torch.float64)
    return product_error("count-hashed-v1", W, V, width) / (dim / width * float((W @ V.T).square().sum()))
