"""Factors of covariances that are none by the letter: singular, indefinite by rounding, of very unequal scales."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dbcl.errors import AuditError
from dbcl_audit.estimators.covariance import cholesky, solve


def singular(dtype: torch.dtype) -> Tensor:
    """Rank 3 of 20, as where one party knows the other's updates exactly."""
    half = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (half @ half.T).to(dtype)


def indefinite(dtype: torch.dtype) -> Tensor:
    """The same with eigenvalues below zero, by a hundred times the rounding error."""
    return singular(dtype) - 100 * torch.finfo(dtype).eps * torch.eye(20, dtype=dtype)


def unequal(dtype: torch.dtype) -> Tensor:
    return torch.diag(torch.tensor([1e-30, 1e6, 1e-30], dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", [singular, indefinite, unequal])
def test_a_factor_is_that_of_the_matrix_up_to_rounding(
    make: Callable[[torch.dtype], Tensor], dtype: torch.dtype
) -> None:
    matrix = make(dtype)
    assert torch.linalg.cholesky_ex(matrix)[1] > 0 or make is unequal
    factor = cholesky(matrix)
    assert torch.equal(factor, factor.tril())
    torch.testing.assert_close(factor @ factor.T, matrix, rtol=0, atol=2e3 * torch.finfo(dtype).eps * matrix.max())
    right = matrix @ torch.ones(len(matrix), 1, dtype=dtype)
    assert solve(matrix, right).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_value_that_is_not_finite_is_refused(dtype: torch.dtype) -> None:
    for value in (math.nan, math.inf):
        matrix = torch.eye(3, dtype=dtype)
        matrix[1, 1] = value
        with pytest.raises(AuditError, match="not finite"):
            cholesky(matrix)


def test_no_covariance_at_all_ends_with_a_reason() -> None:
    """Jitter that grew beyond all numbers would be tried for ever."""
    with pytest.raises(AuditError, match="is no covariance"):
        cholesky(torch.tensor([[1e38, 3e38], [3e38, 1e38]]))
