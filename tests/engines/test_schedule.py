from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dbcl import seeds
from dbcl.engines import LocalTraining
from dbcl.engines.stacked.engine import one_thread
from dbcl.engines.stacked.schedule import Schedule


@given(
    sizes=st.lists(st.integers(1, 25), min_size=1, max_size=5),
    batch=st.integers(1, 12),
    epochs=st.integers(1, 3),
    steps=st.sampled_from([None, 1, 2, 5, 9]),
)
@settings(max_examples=100, deadline=None)
def test_all_clients_at_once_have_the_batches_of_each(sizes: list[int], batch: int, epochs: int, steps: Any) -> None:
    training = LocalTraining(batch_size=batch, epochs=epochs, steps=steps)
    clients, where = list(range(len(sizes))), {"seed": bytes(32), "round": 3}
    one = Schedule.for_clients(clients, sizes, training, **where)  # type: ignore[arg-type]
    other = Schedule.together(clients, sizes, training, device=torch.device("cpu"), **where)  # type: ignore[arg-type]
    assert torch.equal(one.index, other.index)
    assert torch.equal(one.counts, other.counts)
    assert torch.equal(one.weight, other.weight)
    assert one.padded == other.padded


def test_the_number_of_threads_is_given_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread(wanted=True):
            assert torch.get_num_threads() == 1
        with one_thread(wanted=False):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_makes_the_same_normal_numbers() -> None:
    words = seeds.words(bytes(32), "veil", n=5000)
    one, other = (seeds.normals_on(torch.device(device), words, 9999) for device in ("cpu", "cuda"))
    torch.testing.assert_close(one, other.cpu(), rtol=0, atol=1e-12)
