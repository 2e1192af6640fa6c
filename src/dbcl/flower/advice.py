"""Warnings about settings that weaken the protection of the nodes. Each is given once per run."""

import logging

from dbcl.flower.inner import InnerStrategy
from dbcl.protocol import Server

log = logging.getLogger("flwr.dbcl")

MIN_NODES = 10
"""Number of nodes per round below which a warning is issued.

With fewer nodes, membership inference between nodes succeeds.
"""


class Advice:
    """Issues each warning about weak protection at most once per run.

    Args:
        server: The server whose rounds are run.
        insecure: True if the server's secrets are derived from a known seed.
        evaluate_cohort_only: True if only the nodes of the training cohort evaluate its broadcast.
    """

    def __init__(self, server: Server, *, insecure: bool, evaluate_cohort_only: bool) -> None:
        self.server, self.insecure, self.evaluate_cohort_only = server, insecure, evaluate_cohort_only
        self._given: set[str] = set()

    def on_start(self, inner: InnerStrategy, *, checkpoints: bool) -> None:
        """Warn about weak settings when the run starts."""
        if self.server.privacy is not None and self.insecure:
            log.warning("the noise follows from insecure_seed, so there is no guarantee: for experiments only")
        if self.server.privacy is not None and not checkpoints:
            log.warning("no checkpoint: should this run die, another one on the same data spends a second budget")
        train, evaluate = inner.fractions
        if evaluate > 0 and train < 1:
            self._onlookers(f"{evaluate:.0%} of the nodes evaluate and {train:.0%} train in a round")

    def on_round(self, server_round: int, *, nodes: int, onlookers: int) -> None:
        """Warn about small cohorts, and about nodes with the broadcast that do not train."""
        if onlookers:
            self._onlookers(f"{onlookers} nodes have seen round {server_round} and do not train in it")
        # Without a veil, with a seed or with a guarantee, other facts matter more, and the summary names them.
        veiled = self.server.privacy is None and not self.insecure and any(self.server.plan.veils.values())
        if veiled and 0 < nodes < MIN_NODES:
            self._once(
                "few",
                f"{nodes} nodes train in a round: with fewer than {MIN_NODES}, a node that remembers what it received "
                "told whether single examples are another's (AUC 0.95 and more between two, about 0.8 with ten); more "
                "nodes in a round help, and only a guarantee bounds it: DoubleBlind(privacy=...)",
            )

    def _onlookers(self, who: str) -> None:
        if not self.evaluate_cohort_only:
            self._once(
                "onlookers",
                f"{who}: who evaluates sees the broadcast of a round that it may take no part in, and the more rounds "
                "a node sees, the more it can work out; leave out evaluate_cohort_only=False, or take "
                "fraction_evaluate=0.0, and evaluate_fn on the server",
            )

    def _once(self, problem: str, text: str) -> None:
        if problem not in self._given:
            self._given.add(problem)
            log.warning("%s", text)
