"""The client's verbs with what people have around their models and metrics."""

import numpy as np
import pytest
import torch
from torch import nn

import dbcl
from protocol.conftest import net


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_an_update_is_made_of_the_model_inside_a_wrapper(wrap) -> None:
    broadcast = dbcl.Server(net()).open_round()
    local = dbcl.blinded(net(), broadcast)
    wrapped = wrap(local)
    with torch.no_grad():
        local[2].bias.add_(1.0)
    update = dbcl.make_update(wrapped, broadcast, examples=3)
    torch.testing.assert_close(update.tensors["2.bias"], torch.ones(2))


def test_metrics_may_be_tensors_and_numpy_numbers(server: dbcl.Server) -> None:
    broadcast = server.open_round()
    metrics = {"loss": torch.tensor(0.5), "accuracy": np.float32(0.25), "steps": 3}
    update = dbcl.make_update(dbcl.blinded(net(), broadcast), broadcast, examples=3, metrics=metrics)
    assert dbcl.protocol.decode_update(dbcl.encode(update)).metrics == {"loss": 0.5, "accuracy": 0.25, "steps": 3.0}
