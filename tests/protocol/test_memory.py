"""What a server takes to close a round of many encoded updates: little beside the bytes themselves."""

import subprocess
import sys

import pytest

from dbcl.protocol import decode_update, encode
from dbcl.protocol.messages import Update

ROUND = """
import sys
import torch, dbcl
from dbcl.model import networks

def kilobytes(field):
    return int(next(line for line in open("/proc/self/status") if line.startswith(field)).split()[1])

server = dbcl.Server(networks.build("mnist-mlp"), insecure_seed=0)
updates = {}
for number in range(int(sys.argv[1])):
    broadcast = server.open_round(f"client {number}")
    tensors = {name: 0.01 * torch.randn_like(tensor) for name, tensor in broadcast.tensors.items()}
    updates[f"client {number}"] = dbcl.encode(dbcl.Update(0, broadcast.plan.digest, tensors, 60))
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
before = kilobytes("VmRSS")
assert server.close_round(updates).accepted == len(updates)
print(kilobytes("VmHWM") - before, sum(map(len, updates.values())) // 1024)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_updates_are_added_up_without_holding_them_all() -> None:
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", ROUND, "200"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    more, size = map(int, ended.stdout.split())
    assert size > 75_000
    assert more < 0.4 * size


def test_a_lazy_update_is_the_update() -> None:
    import torch

    tensors = {"b": torch.randn(3).half(), "a": torch.randn(2, 3), "none": torch.zeros(0, 4), "one": torch.tensor(2.0)}
    data = encode(Update(3, "ab" * 32, tensors, 5, {"loss": 0.5}))
    whole, lazy = decode_update(data), decode_update(data, lazy=True)
    assert list(lazy.tensors) == list(whole.tensors)
    assert (lazy.round, lazy.plan, lazy.examples, lazy.metrics) == (whole.round, whole.plan, 5, {"loss": 0.5})
    for name, tensor in whole.tensors.items():
        assert lazy.tensors[name].dtype == tensor.dtype
        assert torch.equal(lazy.tensors[name], tensor)
    assert "c" not in lazy.tensors
