"""The strategy inside a `DoubleBlind`: its settings, its memory, and its random draws."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from dbcl import seeds
from dbcl.errors import ConfigError
from dbcl.flower.records import EXAMPLES
from dbcl.flower.state import StrategyState
from dbcl.optim import ServerOptimizer, fedavg
from dbcl.state import State


class InnerStrategy:
    """A Flower strategy, with the settings of it on which the blinded rounds depend.

    Args:
        strategy: The strategy; of strategies that wrap each other the outermost.
        seed: Fixes its random draws for an experiment. None leaves them random.

    >>> inner = InnerStrategy(flower.FedAvg(min_train_nodes=3), seed=None)
    >>> inner.name, inner.averages, inner.fewest("train")
    ('FedAvg', True, 3)
    """

    def __init__(self, strategy: Strategy, seed: bytes | None) -> None:
        self.strategy, self._seed = strategy, seed
        self._memory = StrategyState(strategy)
        self.name = self._memory.names[0]
        innermost = self._memory.strategies[-1]
        self.weight_key = str(getattr(innermost, "weighted_by_key", EXAMPLES))
        """Metric by which it weights the answers."""
        self.array_key = str(getattr(innermost, "arrayrecord_key", "arrays"))
        """Name under which it expects the arrays of an answer."""

    @property
    def described(self) -> str:
        """The names of the strategies that wrap each other, outermost first."""
        return " around ".join(self._memory.names)

    @property
    def averages(self) -> bool:
        """True if it only averages by examples: to average first and lift once is equal and cheaper."""
        plain = type(self.strategy).aggregate_train is flower.FedAvg.aggregate_train
        return plain and self.weight_key == EXAMPLES

    @property
    def fractions(self) -> tuple[float, float]:
        """Fractions of the nodes that train and that evaluate in a round."""
        settings = vars(self._memory.strategies[-1])
        return settings.get("fraction_train", 1.0), settings.get("fraction_evaluate", 0.0)

    def fewest(self, phase: str) -> int:
        """Return the number of nodes for which it waits before it trains or evaluates."""
        names = ("min_available_nodes", f"min_{phase}_nodes")
        return max(getattr(each, name, 0) for each in self._memory.strategies for name in names)

    def server_optimizer(self, optimizer: ServerOptimizer | None) -> ServerOptimizer | None:
        """Return the server's optimizer, None for its default; weights that the strategy makes are taken as they are.

        Raises:
            ConfigError: An optimizer is given, and the strategy makes the new weights itself.
        """
        if self.averages:
            return optimizer
        if optimizer is not None:
            raise ConfigError(f"{self.name} makes the new weights itself; an optimizer goes with FedAvg and FedProx")
        return fedavg()

    def waiting_for_at_most(self, nodes: float) -> contextlib.AbstractContextManager[None]:
        """Lower the numbers of nodes for which it waits, until the context ends."""
        return self._memory.waiting_for_at_most(nodes)

    @contextlib.contextmanager
    def repeatable(self, phase: str, round: int) -> Iterator[None]:
        """With a seed, let all that the strategy draws in this phase of a round follow from it."""
        if self._seed is None:
            yield
            return
        word = int(seeds.words(self._seed, phase, round, n=1)[0]) >> 32
        before, numpy_before = random.getstate(), np.random.get_state()
        random.seed(word)
        np.random.seed(word)
        try:
            yield
        finally:
            random.setstate(before)
            np.random.set_state(numpy_before)

    def forgotten(self) -> list[str]:
        """Return the attributes that a checkpoint cannot hold."""
        return self._memory.forgotten()

    def state(self) -> State:
        """Return what a checkpoint keeps."""
        return self._memory.state()

    def load_state(self, state: State) -> None:
        """Restore what `state` returned."""
        self._memory.load_state(state)
