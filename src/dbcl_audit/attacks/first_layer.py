"""Recover one example from the gradient of a dense first layer with a bias by solving linear
equations.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import Bounds, minimize
from torch import Tensor

from dbcl.errors import ConfigError
from dbcl.protocol import Broadcast
from dbcl.sketch import Sketch
from dbcl_audit.attacks.matching import total_variation
from dbcl_audit.attacks.roc import Array

RIDGE = 1e-3  # of the examples' mean variance: what is added to each, since some pixels are always black


@dataclass(frozen=True, eq=False)
class FirstLayer:
    """Gradients of the weight and bias of a dense first layer in one round, with the sketch of the
    layer.

    >>> from dbcl.sketch import CountSketch
    >>> FirstLayer(torch.zeros(3, 2), torch.ones(3), CountSketch(4, 2, seed=bytes(32))).sketch
    CountSketch(4 -> 2)
    """

    weight: Tensor  # (dout, width)
    bias: Tensor  # (dout,)
    sketch: Sketch

    def inputs(self) -> Tensor:
        """Return x R of a single example. Because dV = db^T (x R D), every row of dV with a nonzero
        bias gradient is a multiple of x R D.
        """
        weight, bias = self.weight.detach().cpu().double(), self.bias.detach().cpu().double()
        if not bias.any():
            raise ConfigError("the first layer's bias gradient is zero: no unit was active, and nothing can be read")
        return (bias @ weight) / (bias @ bias) / self.sketch.gain(weight)

    def sees(self, examples: Tensor) -> Array:
        """Return the sketched layer inputs of the examples, with a 1 for the bias: c = (x R D,
        1).
        """
        x = examples.detach().cpu().double().flatten(1)
        return np.concatenate([self.sketch.project(x).numpy(), np.ones((len(x), 1))], axis=1)

    def rows(self) -> Array:
        """Return the matrix [dV, db] without the rows of units whose gradient is zero."""
        weight, bias = (part.detach().cpu().double().numpy() for part in (self.weight, self.bias))
        if weight.shape != (len(bias), self.sketch.width):
            raise ConfigError(
                f"the first layer's change must have the shape {(len(bias), self.sketch.width)} that its bias and "
                f"{self.sketch} say, got {weight.shape}"
            )
        rows: Array = np.concatenate([weight, bias[:, None]], axis=1)
        if not np.isfinite(rows).all():
            raise ConfigError("the first layer's change holds values that are not finite")
        rows = rows[np.abs(rows).max(axis=1) > 0]
        if not len(rows) or not rows[:, -1].any():
            raise ConfigError("the first layer's bias did not change: no unit was active, and nothing can be read")
        return rows


def metric_root(c: Array) -> Array:
    """Return a root of the inverse second moments M = root root^T of examples; c root is then
    white.

    >>> root = metric_root(np.array([[2.0, 0.0], [0.0, 1.0]]))
    >>> (root @ root.T).round(2).tolist()
    [[0.5, 0.0], [0.0, 2.0]]
    """
    values, vectors = np.linalg.eigh(c.T @ c / len(c))
    root: Array = vectors / np.sqrt(np.maximum(values, 0) + RIDGE * values.mean())
    return root


def dense_first_layer(broadcast: Broadcast, shape: Sequence[int]) -> str | None:
    """Return the name prefix of a dense first layer that has a bias and takes the whole image, or
    None.

    >>> import dbcl
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> dense_first_layer(dbcl.Server(net).open_round(), (1, 4, 4))
    '1.'
    """
    first = broadcast.plan.tensors[0]
    prefix = first.name.removesuffix("weight")
    biased = any(part.name == f"{prefix}bias" for part in broadcast.plan.tensors)
    whole = len(first.shape) == 2 and first.shape[1] == math.prod(shape)
    return prefix if first.name.endswith("weight") and biased and whole else None


def solve_first_layer(
    rounds: Sequence[FirstLayer], shape: Sequence[int], *, box: tuple[float, float], tv: float = 1e-3, steps: int = 300
) -> Tensor:
    """Recover one example by minimising sum_t |x R_t - y_t|^2 + tv TV(x) over x in the box.

    Each round whose batch was this example alone adds equations. Two rounds at compression ratio 2
    give as many equations as x has entries. The weight of the total variation decreases to zero in
    stages; the prior therefore determines only the components that the equations do not.

    >>> import dbcl
    >>> x, delta = torch.tensor([[0.2, 0.9, 0.4]]), torch.tensor([[1.0], [2.0]])
    >>> seen = FirstLayer(delta @ x, delta[:, 0], dbcl.sketch.Identity(3))
    >>> solve_first_layer([seen], (3,), box=(0, 1)).round(decimals=4)
    tensor([0.2000, 0.9000, 0.4000], dtype=torch.float64)
    """
    return solve_inputs([(one.sketch, one.inputs()) for one in rounds], shape, box=box, tv=tv, steps=steps)


def solve_inputs(
    seen: Sequence[tuple[Sketch, Tensor]],
    shape: Sequence[int],
    *,
    box: tuple[float, float],
    tv: float = 1e-3,
    steps: int = 300,
) -> Tensor:
    """Invert the sketch of an example, given y_t = x R_t: minimise sum_t |x R_t - y_t|^2 + tv TV(x)
    over x in the box.

    >>> import dbcl
    >>> x, sketch = torch.full((1, 4, 4), 0.75, dtype=torch.float64), dbcl.sketch.CountSketch(16, 8, seed=bytes(32))
    >>> found = solve_inputs([(sketch, sketch.apply(x.flatten()))], (1, 4, 4), box=(0, 1))
    >>> bool((found - x).abs().max() < 1e-3)
    True
    """
    low, high = box

    def objective(values: NDArray[np.float64], weight: float) -> tuple[float, NDArray[np.float64]]:
        x = torch.from_numpy(values).clone().requires_grad_()
        errors = [sketch.project(x) / sketch.gain(y) - y for sketch, y in seen]
        loss = torch.stack([error.square().sum() for error in errors]).sum()
        if weight:
            loss = loss + weight * x.numel() * total_variation(x.reshape(1, *shape))
        (grad,) = torch.autograd.grad(loss, x)
        return float(loss.detach()), grad.numpy()

    x = np.full(math.prod(shape), (low + high) / 2)
    for weight in (tv, 1e-2 * tv, 1e-4 * tv, 0.0):
        options = {"maxiter": steps, "maxfun": 2 * steps, "maxcor": 50, "ftol": 0.0, "gtol": 1e-12}
        x = minimize(objective, x, (weight,), "L-BFGS-B", jac=True, bounds=Bounds(low, high), options=options).x
    return torch.from_numpy(x).reshape(*shape)
