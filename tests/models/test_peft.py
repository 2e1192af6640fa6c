"""LoRA on a transformer: what is sent is the adapters, and a base that the server sends once."""

import pytest
import torch
from torch import nn

import dbcl
from models.zoo import GPT2, TEXT, hugging, lora

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("transformers")
pytest.importorskip("peft")


def adapted(rank: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    large = {**GPT2, "n_embd": 128}
    return lora(hugging("GPT2Config", "GPT2LMHeadModel", **large), "c_attn", fan_in_fan_out=True, r=rank)()


def trained(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def test_a_round_sends_the_adapters_alone() -> None:
    sizes = {}
    for rank in (8, 64):
        model = adapted(rank)
        sizes[rank] = len(dbcl.encode(dbcl.Server(model, dbcl.SketchConfig(coverage="all")).open_round()))
        whole = 4 * sum(parameter.numel() for parameter in model.parameters())
        assert sizes[rank] < 4 * trained(model) // 2 + 8_000  # half of the adapters, names and fingerprints
        assert sizes[rank] < 0.15 * whole
    more = 4 * (trained(adapted(64)) - trained(adapted(8))) // 2
    assert abs(sizes[64] - sizes[8] - more) < 500


def test_a_client_without_the_base_gets_it_once_and_trains() -> None:
    server = dbcl.Server(adapted(8), dbcl.SketchConfig(coverage="all", send_frozen=True, veil=0.05))
    mine = dbcl.protocol.load_base(adapted(8, seed=1), dbcl.protocol.decode_base(dbcl.encode(server.base())))
    losses = []
    for _ in range(15):
        broadcast = dbcl.protocol.decode_broadcast(dbcl.encode(server.open_round()))
        local = dbcl.blinded(mine, broadcast)
        optimizer = torch.optim.SGD([p for p in local.parameters() if p.requires_grad], lr=1.0)
        for _ in range(3):
            optimizer.zero_grad()
            loss = local(**TEXT).loss
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
        assert server.close_round([dbcl.make_update(local, broadcast, examples=2)]).accepted == 1
    with torch.no_grad():
        assert float(server.model(**TEXT).loss) < 0.9 * float(adapted(8)(**TEXT).loss)
