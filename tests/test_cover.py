"""What leaves the server and what stays at home, on models of the kinds that people have."""

import pytest
import torch
from torch import Tensor, nn

import dbcl
from dbcl.cover import fingerprint
from dbcl.privacy import norm


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4, dtype=torch.bfloat16),
        torch.arange(6, dtype=torch.int8).reshape(2, 3),
        torch.randn(2, 3, dtype=torch.complex64),
        torch.randn(4, 4).T,
        torch.empty(0, 3),
        torch.tensor(1.5),
    ],
    ids=["float", "bfloat16", "int8", "complex", "transposed", "empty", "scalar"],
)
def test_a_fingerprint_is_of_the_values(tensor: Tensor) -> None:
    assert fingerprint(tensor) == fingerprint(tensor.clone())
    if tensor.numel():
        assert fingerprint(tensor) != fingerprint(tensor + 1)
    assert fingerprint(torch.zeros(2, 3)) != fingerprint(torch.zeros(3, 2))
    assert fingerprint(torch.zeros(2)) != fingerprint(torch.zeros(2, dtype=torch.float64))


class Adapted(nn.Module):
    """A frozen base with a trained low-rank adapter; its base may be of any dtype."""

    def __init__(self, base: Tensor) -> None:
        super().__init__()
        self.base = nn.Parameter(base, requires_grad=False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
        self.out = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        base = self.base.real if self.base.is_complex() else self.base
        return self.out(x @ base.to(x.dtype).T + self.up(self.down(x)))


@pytest.mark.parametrize(
    "base",
    [
        torch.randn(64, 64),
        torch.randint(-8, 8, (64, 64), dtype=torch.int8),
        torch.randn(64, 64, dtype=torch.complex64),
    ],
    ids=["float", "int8", "complex"],
)
def test_an_adapters_round_sends_the_adapter_alone(base: Tensor) -> None:
    server = dbcl.Server(Adapted(base.clone()), insecure_seed=0)
    template = Adapted(base.clone())
    for _ in range(2):
        data = dbcl.encode(server.open_round())
        broadcast = dbcl.decode_broadcast(data)
        local = dbcl.blinded(template, broadcast)
        local(torch.randn(8, 64)).square().mean().backward()
        torch.optim.SGD([p for p in local.parameters() if p.requires_grad], lr=0.1).step()
        assert server.close_round([dbcl.update(local, broadcast, examples=8)]).accepted == 1
    numbers = 64 * 4 + 4 * 64 + 64 * 2 + 2  # the base has 4,096
    assert len(data) < 4 * numbers + 1500
    assert "stays at home: 1 frozen parameters (base)" in str(server.plan)
    with pytest.raises(dbcl.PlanError, match="base is frozen, and this model's copy differs from the server's"):
        dbcl.blinded(Adapted(base + 1), broadcast)


def test_a_mask_is_no_weight() -> None:
    """A causal mask of minus infinity, veiled, would be NaN or no mask at all."""

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.out = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.attention(x, x, x, attn_mask=self.mask, need_weights=False)[0])

    server = dbcl.Server(Causal(), veil=0.5)
    broadcast = server.open_round()
    assert "mask" not in broadcast.tensors
    local = dbcl.blinded(Causal(), broadcast)
    assert torch.equal(local.mask, server.model.mask)
    x = torch.randn(1, 4, 8)
    changed = x.clone()
    changed[:, 3] += 1
    torch.testing.assert_close(local(x)[:, :3], local(changed)[:, :3])
    assert norm(dbcl.update(local, broadcast, examples=1).tensors) == 0
