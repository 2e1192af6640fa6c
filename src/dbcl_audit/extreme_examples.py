"""Contribution of real extreme examples to updates, measured with the clients' own code.

A guarantee for one example relies on clipping by the clients, which the server cannot verify. The
contribution is therefore measured. Two simulated clients train on the same examples, and one of
them has an additional example, as extreme as the task permits. Both use the engine of the run and
the same code path. The contribution of the example is the norm of the difference between the two
updates.
"""

from dataclasses import replace
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from dbcl.data import DatasetExamples, Examples, TensorExamples
from dbcl.data.trees import join, map_tensors
from dbcl.engines import Engine
from dbcl.engines.engine import client_name
from dbcl.privacy import norm
from dbcl.protocol import Broadcast, Update, decode_update
from dbcl.simulation.task import Task

PAIRS = 20
"""Number of extreme examples, each with one pair of clients."""
COMPANIONS = 2
"""Number of ordinary examples in a client's batch, in addition to the extreme example."""
SCALES = (1.0, 30.0)
"""Factors of the inputs, used in turn. Large inputs have large gradients unless they saturate the
network.
"""


def with_extremes(task: Task, *, separation: int, seed: int = 0) -> Task:
    """Return a task with pairs of clients, in which the first client has one more example, the
    extreme one.

    The extreme input is a training input, scaled if it is floating-point, with the target of
    another example. It is the last example of its client and takes part in rounds 0, `separation`,
    ...

    >>> from dbcl.simulation import RunConfig, task_of
    >>> made = with_extremes(task_of(RunConfig()), separation=3)
    >>> [len(rows) for rows in made.division[:4]], len(made.division)
    ([7, 6, 7, 6], 40)
    """
    generator = np.random.default_rng(seed)
    count = len(task.train)
    ordinary, extreme, other = (generator.integers(count, size=size) for size in (COMPANIONS * PAIRS, PAIRS, PAIRS))
    scales = torch.tensor([SCALES[number % len(SCALES)] for number in range(PAIRS)])

    def scaled(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor * scales.to(tensor).view(-1, *(1,) * (tensor.ndim - 1))

    inputs = map_tensors(scaled, task.train.take(extreme).inputs)
    targets = map_tensors(scaled, task.train.take(other).targets)
    every = join([tuple(task.train.take(ordinary)), (inputs, targets)])
    train: Examples = TensorExamples(*every)
    if not isinstance(task.train, TensorExamples):  # an engine takes another path for datasets
        pairs = [map_tensors(itemgetter(row), every) for row in range(len(train))]
        train = DatasetExamples(pairs)
    division = []
    for pair in range(PAIRS):
        # Only every `separation`-th example has its turn together with the extreme one; the others fill the places.
        first = COMPANIONS * pair
        rows = np.repeat(np.arange(first, first + COMPANIONS), separation)
        division += [np.append(rows, COMPANIONS * PAIRS + pair), rows]
    return replace(task, train=train, division=division, pictures=None, holds=None)


def contributions(engine: Engine, broadcast: Broadcast) -> list[float]:
    """Return the norm of each extreme example's contribution to its client's update of a round.

    `engine` holds the clients of `with_extremes`. They train as in a run, but no update is sent to
    a server.

    >>> import dbcl
    >>> from dbcl.engines import LocalEngine, LocalTraining
    >>> from dbcl.simulation import RunConfig, task_of
    >>> task = with_extremes(task_of(RunConfig()), separation=1)
    >>> net, training = task.make_model(0), LocalTraining(lr=0.1, steps=1, example_clip=1.0)
    >>> server = dbcl.Server(task.make_model(1))
    >>> engine = LocalEngine(server, net, task.train.divide(task.division), training, seed=bytes(32))
    >>> round(max(contributions(engine, server.open_round())), 4)  # the clip, times the learning rate
    0.1
    """
    return [difference(*pair) for pair in paired_updates(engine, broadcast)]


def difference(one: Update, other: Update) -> float:
    """Return the norm of the difference of two updates.

    >>> one, other = (Update(0, "ab", {"bias": torch.tensor(values)}, 1) for values in ([3.0, 0.0], [0.0, 4.0]))
    >>> difference(one, other)
    5.0
    """
    return norm({name: tensor - other.tensors[name] for name, tensor in one.tensors.items()})


def paired_updates(engine: Engine, broadcast: Broadcast) -> list[tuple[Update, Update]]:
    """Return the updates of each pair of clients. The first client of a pair has the extreme
    example.

    >>> import dbcl
    >>> from dbcl.engines import LocalEngine, LocalTraining
    >>> from dbcl.simulation import RunConfig, task_of
    >>> task = with_extremes(task_of(RunConfig()), separation=1)
    >>> training = LocalTraining(lr=0.1, steps=1, example_clip=1.0)
    >>> server = dbcl.Server(task.make_model(1))
    >>> engine = LocalEngine(server, task.make_model(0), task.train.divide(task.division), training, seed=bytes(32))
    >>> len(paired_updates(engine, server.open_round()))
    20
    """
    answers = engine.train_cohort(dict.fromkeys(range(len(engine.clients)), broadcast))
    return [
        (_read(answers[client_name(2 * pair)]), _read(answers[client_name(2 * pair + 1)]))
        for pair in range(len(engine.clients) // 2)
    ]


def _read(message: Update | bytes) -> Update:
    return message if isinstance(message, Update) else decode_update(message)
