"""Contract tests of sketches."""

import copy
from abc import ABC, abstractmethod

import pytest
import torch
from torch import Tensor

from dbcl.errors import SketchError
from dbcl.sketch import Sketch

SEED = bytes(range(32))


class SketchContract(ABC):
    @abstractmethod
    def draw(self, dim: int, width: int, seed: bytes = SEED, round: int = 0, name: str = "w") -> Sketch: ...

    @pytest.fixture(params=[(6, 3), (75, 37), (10, 7), (9, 1), (40, 20)], ids=str)
    def sketch(self, request: pytest.FixtureRequest) -> Sketch:
        return self.draw(*request.param)

    def test_columns_are_orthonormal(self, sketch: Sketch) -> None:
        R = sketch.dense()
        assert R.shape == (sketch.dim, sketch.width)
        torch.testing.assert_close(R.T @ R, torch.eye(sketch.width, dtype=torch.float64), rtol=0, atol=1e-14)

    def test_apply_and_lift_are_the_dense_products(self, sketch: Sketch) -> None:
        R, D = sketch.dense(), sketch.gain(torch.empty(0, dtype=torch.float64))
        x = torch.randn(4, 2, sketch.dim, dtype=torch.float64)
        y = torch.randn(3, sketch.width, dtype=torch.float64)
        torch.testing.assert_close(sketch.apply(x), x @ R)
        torch.testing.assert_close(sketch.lift(y), y @ R.T)
        torch.testing.assert_close(sketch.project(x), x @ R @ D.diag())
        torch.testing.assert_close(sketch.expand(y), y @ D.diag() @ R.T)

    def test_derivatives_of_any_order(self, sketch: Sketch) -> None:
        x = torch.randn(2, sketch.dim, dtype=torch.float64, requires_grad=True)
        y = torch.randn(2, sketch.width, dtype=torch.float64, requires_grad=True)
        for function, at in [(sketch.apply, x), (sketch.lift, y), (sketch.project, x), (sketch.expand, y)]:
            assert torch.autograd.gradcheck(function, (at,))
            assert torch.autograd.gradgradcheck(function, (at,))

    def test_torch_func_sees_through_it(self, sketch: Sketch) -> None:
        x = torch.randn(5, sketch.dim, dtype=torch.float64)
        torch.testing.assert_close(torch.func.vmap(sketch.project)(x), sketch.project(x))
        grad = torch.func.vmap(torch.func.grad(lambda row: sketch.project(row).square().sum()))(x)
        torch.testing.assert_close(grad, 2 * sketch.expand(sketch.project(x)))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    def test_keeps_the_dtype(self, sketch: Sketch, dtype: torch.dtype) -> None:
        assert sketch.apply(torch.ones(2, sketch.dim, dtype=dtype)).dtype == dtype
        assert sketch.lift(torch.ones(2, sketch.width, dtype=dtype)).dtype == dtype
        assert sketch.gain(torch.empty(0, dtype=dtype)).dtype == dtype

    def test_does_not_change_its_input(self, sketch: Sketch) -> None:
        x, y = torch.ones(2, sketch.dim), torch.ones(2, sketch.width)
        for function, at in [(sketch.apply, x), (sketch.lift, y), (sketch.project, x), (sketch.expand, y)]:
            function(at).zero_()
        assert bool((x == 1).all())
        assert bool((y == 1).all())

    def test_wrong_size_and_whole_numbers_are_refused(self, sketch: Sketch) -> None:
        with pytest.raises(SketchError, match=f"must have {sketch.dim} entries"):
            sketch.apply(torch.ones(2, sketch.dim + 1))
        with pytest.raises(SketchError, match="floating-point"):
            sketch.apply(torch.ones(2, sketch.dim, dtype=torch.int64))

    def test_the_same_labels_give_the_same_map_and_others_another(self) -> None:
        one = self.draw(64, 32)
        assert one.fingerprint() == self.draw(64, 32).fingerprint()
        others = [
            self.draw(64, 32, seed=bytes(32)),
            self.draw(64, 32, round=1),
            self.draw(64, 32, name="v"),
            self.draw(64, 31),
        ]
        assert len({one.fingerprint(), *(other.fingerprint() for other in others)}) == 5
        assert copy.deepcopy(one) is one

    def test_mean_of_s_s_transposed_is_the_identity(self) -> None:
        # The mean over n draws of an entry with standard deviation at most sigma lies within 6 sigma / sqrt(n) of its
        # expectation with near certainty, for each of the dim^2 entries; sigma is 1 or less for these sketches at
        # ratio 2, and the seed is fixed.
        n, dim = 2000, 12
        total = torch.zeros(dim, dim, dtype=torch.float64)
        for round in range(n):
            total += self.outer(self.draw(dim, 6, round=round))
        assert (total / n - torch.eye(dim)).abs().max() < 6 / n**0.5

    @staticmethod
    def outer(sketch: Sketch) -> Tensor:
        """Return the matrix S S^T of a sketch S."""
        R = sketch.dense()
        return (R * sketch.gain(R)) @ R.T

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    def test_the_same_bytes_on_the_gpu(self, sketch: Sketch) -> None:
        for dtype in (torch.float64, torch.float32):
            assert torch.equal(sketch.dense(dtype), sketch.dense(dtype, "cuda").cpu())
        x = torch.randn(3, sketch.dim)
        torch.testing.assert_close(sketch.project(x), sketch.project(x.cuda()).cpu())
