"""The inner strategy of a `DoubleBlind`: its settings, its saved state and its random draws."""

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
    """A Flower strategy, with the settings that affect blinded rounds.

    Args:
        strategy: The strategy. If strategies wrap each other, the outermost strategy.
        seed: Seed of the strategy's random draws, for experiments; None leaves the draws random.

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
        """Metric by which the strategy weights the replies."""
        self.array_key = str(getattr(innermost, "arrayrecord_key", "arrays"))
        """Name under which the strategy expects the arrays of a reply."""

    @property
    def described(self) -> str:
        """Names of the wrapped strategies, outermost first."""
        return " around ".join(self._memory.names)

    @property
    def averages(self) -> bool:
        """True if the strategy only averages by examples.

        The server then averages first and lifts once.
        """
        plain = type(self.strategy).aggregate_train is flower.FedAvg.aggregate_train
        return plain and self.weight_key == EXAMPLES

    @property
    def fractions(self) -> tuple[float, float]:
        """Fractions of the nodes that train and that evaluate in a round."""
        settings = vars(self._memory.strategies[-1])
        return settings.get("fraction_train", 1.0), settings.get("fraction_evaluate", 0.0)

    def fewest(self, phase: str) -> int:
        """Return the number of nodes that the strategy waits for before training or evaluation."""
        names = ("min_available_nodes", f"min_{phase}_nodes")
        return max(getattr(each, name, 0) for each in self._memory.strategies for name in names)

    def server_optimizer(self, optimizer: ServerOptimizer | None) -> ServerOptimizer | None:
        """Return the server's optimizer, or None for the default optimizer.

        Weights that the strategy computes itself are used without an optimizer step.

        Raises:
            ConfigError: An optimizer is given, but the strategy computes the new weights itself.
        """
        if self.averages:
            return optimizer
        if optimizer is not None:
            raise ConfigError(f"{self.name} makes the new weights itself; an optimizer goes with FedAvg and FedProx")
        return fedavg()

    def waiting_for_at_most(self, nodes: float) -> contextlib.AbstractContextManager[None]:
        """Context manager that lowers the numbers of nodes for which the strategy waits."""
        return self._memory.waiting_for_at_most(nodes)

    @contextlib.contextmanager
    def repeatable(self, phase: str, round: int) -> Iterator[None]:
        """Context manager that seeds the strategy's random draws in one phase of a round."""
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
        """Return the attributes that a checkpoint cannot store."""
        return self._memory.forgotten()

    def state(self) -> State:
        """Return the state for a checkpoint."""
        return self._memory.state()

    def load_state(self, state: State) -> None:
        """Restore the state returned by `state`."""
        self._memory.load_state(state)
