"""A simulated round, 10 clients, one local epoch, on one thread: samples a second of every way to run it.

The sides: a plain loop of PyTorch over the clients without any sketch; the same loop over the authors' layers; our
`local` and `stacked` engines with DBCL, which include blinding, checks and aggregation; `stacked` without a sketch; and
pfl-research, without a sketch, where it is installed, as in the environment of `make bench`.
"""

import copy
from collections.abc import Callable

import numpy as np
import torch
from authors import SketchConv2d, SketchLinear
from common import interleaved, one_thread, ratios, report, sizes
from torch import Tensor, nn

import dbcl
from dbcl.config import UNSKETCHED
from dbcl.data import examples_of
from dbcl.engines import Engine, LocalEngine, LocalTraining, StackedEngine
from dbcl.model import networks

SEED = bytes(range(32))
# name, one example, examples a client, batch, learning rate, repeats
NETWORKS = [
    ("mnist-mlp", (1, 28, 28), 600, 10, 0.05, 9),
    ("mnist-cnn", (1, 28, 28), 60, 10, 0.01, 5),
    ("cifar-cnn", (3, 32, 32), 100, 50, 0.001, 3),
]


def loop(model: nn.Module, x: Tensor, y: Tensor, shards: list, batch: int, lr: float) -> Callable[[], None]:
    def play() -> None:
        for shard in shards:
            local = copy.deepcopy(model)
            optimizer = torch.optim.SGD(local.parameters(), lr=lr)
            own, labels = x[shard], y[shard]
            for index in torch.randperm(len(shard)).split(batch):
                optimizer.zero_grad()
                nn.functional.cross_entropy(local(own[index]), labels[index]).backward()
                optimizer.step()

    return play


def authors(model: nn.Module) -> nn.Module:
    """A network with the authors' layers in place of all but the last."""

    def swap(module: nn.Module) -> None:
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and child.out_features != 10:
                setattr(module, name, SketchLinear(child.in_features, child.out_features))
            elif isinstance(child, nn.Conv2d):
                setattr(module, name, SketchConv2d(child.in_channels, child.out_channels, child.kernel_size[0]))
            else:
                swap(child)

    swap(model)
    return model


def pfl_round(model: nn.Module, x: Tensor, y: Tensor, shards: list, batch: int, lr: float) -> Callable[[], None] | None:
    try:
        from pfl.aggregate.simulate import SimulatedBackend
        from pfl.algorithm.base import NNAlgorithmParams
        from pfl.algorithm.federated_averaging import FederatedAveraging
        from pfl.data.dataset import Dataset
        from pfl.data.federated_dataset import FederatedDataset
        from pfl.hyperparam import NNTrainHyperParams
        from pfl.model.pytorch import PyTorchModel
    except ImportError:
        print("pfl-research is not installed: left out (`make bench` installs it)")
        return None

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.net(inputs), labels)

        def metrics(self, inputs: Tensor, labels: Tensor) -> dict:
            return {}

    order = {"next": 0}

    def sampler() -> int:
        order["next"] = (order["next"] + 1) % len(shards)
        return order["next"]

    wrapped = WithLoss()
    made = PyTorchModel(wrapped, torch.optim.SGD, torch.optim.SGD(wrapped.parameters(), lr=1.0))
    people = [Dataset((x[shard], y[shard])) for shard in shards]
    train = FederatedDataset(lambda user: people[user], sampler)
    backend = SimulatedBackend(training_data=train, val_data=train)
    params = NNAlgorithmParams(
        central_num_iterations=1, evaluation_frequency=10**9, train_cohort_size=len(shards), val_cohort_size=0
    )
    local = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=lr, local_batch_size=batch)

    def play() -> None:
        FederatedAveraging().run(params, backend, made, local, send_metrics_to_platform=False)

    return play


def main() -> None:
    one_thread()
    torch.manual_seed(0)
    results = {}
    for name, shape, share, batch, lr, repeats in sizes(NETWORKS):
        x, y = torch.randn(10 * share, *shape), torch.arange(10 * share) % 10
        shards = np.array_split(np.random.default_rng(0).permutation(10 * share), 10)
        training = LocalTraining(lr=lr, batch_size=batch)

        def engine(kind: type[Engine], **settings: dbcl.SketchConfig) -> Callable[[], object]:
            model, template = (networks.build(name, shape=shape, seed=seed) for seed in (0, 1))  # noqa: B023
            server = dbcl.Server(model, **settings)
            return kind(server, template, examples_of((x, y)).divide(shards), training, seed=SEED).play_round  # noqa: B023

        index = [torch.from_numpy(shard) for shard in shards]
        sides = {
            "plain loop": loop(networks.build(name, shape=shape), x, y, index, batch, lr),
            "authors' layers": loop(authors(networks.build(name, shape=shape)), x, y, index, batch, lr),
            "local": engine(LocalEngine),
            "stacked": engine(StackedEngine),
            "stacked, no sketch": engine(StackedEngine, sketch=UNSKETCHED),
        }
        pfl = pfl_round(networks.build(name, shape=shape), x, y, index, batch, lr)
        if pfl is not None:
            sides["pfl-research"] = pfl
        table = ratios(interleaved(sides, repeats=repeats), to="stacked")
        print(f"\n{name}, 10 clients of {share}, batch {batch}")
        for side, row in table.items():
            row["samples_per_s"] = round(10 * share / row["median_us"] * 1e6)
            print(f"  {side:<20} {row['samples_per_s']:>8,} samples/s   stacked is {row['ratio']:.2f} times it")
        results[name] = table
    report("rounds", results, "make bench")


if __name__ == "__main__":
    main()
