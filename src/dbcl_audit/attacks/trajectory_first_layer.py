"""Likelihood of images given all rounds of a dense first layer, independent of the rest of the
network.

An image x adds delta_t (x, 1) to the gradient of the layer's weight and bias. delta_t is the
derivative of the loss by the layer's output. The deltas depend on labels, later layers and, in
other lanes, a veil that the attacker does not know. The model omits all of these and marginalises
the deltas as normal variables.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dbcl_audit.attacks.trajectory_likelihood import TensorLikelihood
from dbcl_audit.estimators.covariance import cholesky, solve


class FirstLayerLikelihood:
    """Likelihood of a first layer's broadcasts, given only the images.

    With changes c_t = sum_b delta_tb (x_b, 1), the negative log-likelihood of `weight` and `bias`
    is a quadratic form in the deltas, 1/2 d M d + g d, with the same M for every row of the layer.
    Marginalising d ~ N(0, Sigma) gives

        -log p = rows/2 log det (I + Sigma M) - 1/2 sum over rows of g (Sigma^-1 + M)^-1 g.

    The argument `sizes` of the methods holds one standard deviation of the deltas per round,
    estimated together with the images. The deltas shrink once the victim has learnt its images, and
    later rounds then give no information.

    >>> from dbcl_audit.estimators.kalman import Scales
    >>> from dbcl_audit.estimators.observations import TensorObservations
    >>> from dbcl.sketch import Identity
    >>> x, still = torch.tensor([[3.0, 1.0]]).double(), (torch.zeros(1, 2).double(),) * 3
    >>> shown = TensorObservations("w", (0, 1, 2), (1,) * 3, (Identity(2),) * 3, tuple(t * x for t in range(3)), still)
    >>> ones = tuple(torch.full((1, 1), float(t)).double() for t in range(3))  # what one image's bias does
    >>> bias = TensorObservations("b", (0, 1, 2), (1,) * 3, (Identity(1),) * 3, ones, (torch.zeros(1, 1).double(),) * 3)
    >>> likelihood = FirstLayerLikelihood(*(TensorLikelihood(v, Scales(1e-4, 0.0, 1.0)) for v in (shown, bias)))
    >>> likelihood.deltas(x, torch.ones(2).double()).flatten().round(decimals=3)
    tensor([1., 1.], dtype=torch.float64)
    >>> bool(likelihood(x, torch.ones(2).double()) < likelihood(2 * x, torch.ones(2).double()))
    True
    """

    def __init__(self, weight: TensorLikelihood, bias: TensorLikelihood) -> None:
        self.weight, self.rounds, self.rows = weight, len(weight.at_zero), weight.at_zero.shape[1]
        age = np.maximum(np.subtract.outer(np.arange(self.rounds + 1), np.arange(self.rounds)), 0)
        beta = weight.view.momentum
        self.kernel = torch.from_numpy(weight.view.lr * (1 - beta**age) / (1 - beta))  # (rounds + 1, rounds)
        one = torch.ones(1, 1, dtype=torch.float64)
        self.of_bias = self._quadratic(bias, torch.stack([through(one) for through in bias.through]))
        self.at_zero_of_bias = bias.at_zero[:, :1].transpose(1, 2).reshape(self.rounds, 1, self.rows).double()

    def __call__(self, images: Tensor, sizes: Tensor) -> Tensor:  # (count, dim), (rounds,) -> ()
        """Return -log p, up to an additive constant."""
        M, g = self._form(images)
        size = sizes.repeat_interleave(len(images))
        factor = cholesky(size[:, None] * M * size + torch.eye(len(M), dtype=M.dtype))
        solved = torch.linalg.solve_triangular(factor, size[:, None] * g, upper=False)
        value: Tensor = self.rows * factor.diagonal().log().sum() - solved.square().sum() / 2
        return value

    def deltas(self, images: Tensor, sizes: Tensor) -> Tensor:  # -> (rounds, count, rows)
        """Return the expected deltas given the images."""
        M, g = self._form(images)
        size = sizes.repeat_interleave(len(images))
        whole = size[:, None] * M * size + torch.eye(len(M), dtype=M.dtype)
        found: Tensor = -size[:, None] * solve(whole, size[:, None] * g)
        return found.reshape(self.rounds, len(images), self.rows)

    def _form(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return M and g over rounds and images, with shapes (rounds * count, rounds * count) and
        (rounds * count, rows).
        """
        count = len(images)
        entered = torch.stack([through(images) for through in self.weight.through])  # (rounds, count, dim)
        M = self._quadratic(self.weight, entered) + self.of_bias.repeat_interleave(count, 0).repeat_interleave(count, 1)
        slopes = torch.einsum("trd,bd->tbr", self.weight.at_zero, images.to(self.weight.dtype)).double()
        return M, (slopes + self.at_zero_of_bias).reshape(len(M), self.rows)

    def _quadratic(self, likelihood: TensorLikelihood, entered: Tensor) -> Tensor:
        """Return the quadratic form of a row's -log p in the coefficients of the rows `entered`."""
        rounds, count, dim = entered.shape
        size = rounds * count
        total, kept = entered.new_zeros(size, size), entered.new_zeros(size, dim)
        for t in range(1, rounds + 1):
            added = (entered[:t] * self.kernel[t, :t, None, None]).reshape(t * count, dim)
            shown = likelihood.projections[t](added)
            rest = size - t * count
            total = total + pad(added @ shown.T, (0, rest, 0, rest))
            kept = kept + pad(shown, (0, 0, 0, rest))
        return likelihood.precision * (total - kept @ likelihood.expected_start(kept).T)
