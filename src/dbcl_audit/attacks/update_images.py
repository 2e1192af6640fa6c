"""Recovery of a client's few images from one update of several local steps, by replaying the
training.

Reads no transcript. The inputs are one client's update, which the server receives without secure
aggregation, and the client's broadcast. `span.py` recovers more from clients with many images and a
dense first layer. This attack applies to any network and few images.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from dbcl.data import Dataset
from dbcl.engines import LocalTraining
from dbcl.errors import ConfigError
from dbcl.protocol import blinded
from dbcl_audit import image_quality
from dbcl_audit.attacks.gradients import as_gradient
from dbcl_audit.attacks.images import Attack, recovered_image_findings
from dbcl_audit.attacks.local_steps import LocalSteps
from dbcl_audit.attacks.matching import Matching, Recovered, recover
from dbcl_audit.attacks.update_labels import Answered, LabelReader
from dbcl_audit.context import OnProgress
from dbcl_audit.findings import Finding

COSINE = Matching("cosine", steps=300, restarts=1, tv=1e-2)
"""Settings for networks with ReLU, whose gradients are discontinuous; L-BFGS does not converge on
them.
"""
L2 = Matching("l2", steps=300, restarts=1, tv=1e-3)
"""Settings for smooth networks, which this objective recovers more exactly."""


def recover_from_update(
    template: nn.Module,
    answered: Answered,
    shape: Sequence[int],
    training: LocalTraining,
    settings: Sequence[Matching] = (COSINE, L2),
    *,
    reader: LabelReader | None = None,
    seed: int = 0,
) -> Recovered:
    """Find the images whose replayed training reproduces the update.

    All `settings` are tried, and the result with the smallest error is returned. For two or more
    images, the labels come from `reader`, if given. The label of a single image follows from the
    output layer's gradient.

    >>> import numpy as np
    >>> from dbcl import Server, SketchConfig, make_update
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Sigmoid(), nn.Linear(8, 2))
    >>> broadcast = Server(net, SketchConfig(veil=0, sketch="identity-v1")).open_round()
    >>> local, training, x = blinded(net, broadcast), LocalTraining(lr=0.5, epochs=3), torch.rand(1, 1, 4, 4)
    >>> _ = training.train(local, (x, torch.tensor([1])), seed=bytes(32), round=0, client=0)
    >>> sent = Answered(broadcast, make_update(local, broadcast, examples=1).tensors, np.array([0]))
    >>> found = recover_from_update(net, sent, (1, 4, 4), training, [Matching(steps=100, restarts=1)])
    >>> found.labels, image_quality.psnr(found.images, x).item() > 25
    (tensor([1]), True)
    """
    broadcast, tensors, rows = answered
    count = len(rows)
    steps = LocalSteps.from_training(training, count, broadcast.round)
    trained = {part.name for part in broadcast.plan.tensors if not part.measured}
    changes = {name: tensor.double() for name, tensor in tensors.items() if name in trained}
    target = as_gradient(changes, steps.rate, len(steps.batches))
    labels = None
    if reader is not None and count > 1:
        counts = torch.from_numpy(reader.counts(broadcast, tensors, count))
        labels = torch.arange(len(counts)).repeat_interleave(counts)
        settings = [replace(one, label="known") for one in settings]
    model = blinded(template, broadcast).double()
    found = [recover(model, target, shape, labels, count, one, seed, steps) for one in settings]
    best = min(found, key=lambda each: _misfit(model, target, steps, each))
    return replace(best, seconds=sum(each.seconds for each in found))


def _misfit(model: nn.Module, target: dict[str, Tensor], steps: LocalSteps, found: Recovered) -> float:
    """Return the squared error |g - g*|^2 of the replayed training, relative to the norm of each
    tensor.
    """
    replayed = steps.mean_gradient(model, found.images, found.labels)
    parts = [
        (replayed[name].detach() - wanted).square().sum() / wanted.square().sum()
        for name, wanted in target.items()
        if wanted.any()
    ]
    return float(torch.stack(parts).sum().nan_to_num(float("inf")))


def update_image_findings(
    template: nn.Module,
    updates: Sequence[Answered],
    dataset: Dataset,
    training: LocalTraining,
    settings: Sequence[Matching] = (COSINE, L2),
    *,
    reader: LabelReader | None = None,
    tell: OnProgress = lambda text: None,
) -> list[Finding]:
    """Recover clients' images from one update each with `recover_from_update`, and measure the
    quality over all images.

    The `rows` of an update are indices of the dataset's training images.

    >>> import numpy as np
    >>> from dbcl import Server, data, make_update
    >>> from dbcl.model import networks
    >>> digits, net, training = data.load("digits"), networks.build("dlg-lenet"), LocalTraining(lr=0.1, epochs=2)
    >>> broadcast = Server(net).open_round()
    >>> local, rows = blinded(net, broadcast), np.array([7])
    >>> _ = training.train(local, (digits.x_train[rows], digits.y_train[rows]), seed=bytes(32), round=0, client=0)
    >>> sent = Answered(broadcast, make_update(local, broadcast, examples=1).tensors, rows)
    >>> found = update_image_findings(net, [sent], digits, training, [Matching(steps=1, restarts=1)])
    >>> [(one.target, one.measure) for one in found]
    [('image', 'psnr'), ('image', 'ssim'), ('image', 'share above 20 dB'), ('label', 'accuracy')]
    """
    box, results = image_quality.span(dataset), list[Recovered | str]()
    boxed = [replace(one, box=box) for one in settings]
    for number, each in enumerate(updates):
        tell(f"images, server, replaying local steps: {number + 1} of {len(updates)}")
        try:
            found = recover_from_update(template, each, dataset.shape, training, boxed, reader=reader, seed=number)
            results += _in_order(found, dataset.x_train[each.rows].double(), box)
        except (ConfigError, ValueError, RuntimeError) as error:
            results += [str(error).split("\n")[0]] * len(each.rows)
    victims = torch.cat([torch.as_tensor(each.rows) for each in updates])
    attack = Attack("matching all local steps", "server", "adaptive")
    more = {
        "clients": len(updates),
        "local steps": len(LocalSteps.from_training(training, len(updates[0].rows)).batches),
    }
    findings = recovered_image_findings(attack, results, dataset, victims)
    return [replace(finding, budget={**finding.budget, **more}) for finding in findings]


def _in_order(found: Recovered, truth: Tensor, box: tuple[float, float]) -> list[Recovered]:
    """Split a recovered batch into single images, in the order of the true images that they are
    paired with.
    """
    paired = image_quality.pair(found.images, truth, box)
    order = [next(n for n, image in enumerate(found.images) if torch.equal(image, one)) for one in paired]
    return [
        replace(
            found,
            images=found.images[place : place + 1],
            labels=found.labels[place : place + 1],
            failures=found.failures if number == 0 else (),
            seconds=found.seconds / len(order),
        )
        for number, place in enumerate(order)
    ]
