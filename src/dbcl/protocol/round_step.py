"""The atomic step of a round: take an optimizer step on the aggregate and close the round."""

import logging

from dbcl.privacy import norm
from dbcl.protocol.aggregation import Aggregate
from dbcl.protocol.averaging import changes_of
from dbcl.protocol.keeper import Keeper
from dbcl.protocol.messages import AggregationStats, RoundReport
from dbcl.protocol.round_sequence import RoundSequence
from dbcl.protocol.trained_weights import TrainedWeights
from dbcl.state import restored_on_error

log = logging.getLogger(__name__)


class RoundStep:
    """Closes rounds with an optimizer step on an aggregate.

    Args:
        trained: The weights W.
        keeper: The enforcer of the guarantee.
        sequence: The rounds.
    """

    def __init__(self, trained: TrainedWeights, keeper: Keeper, sequence: RoundSequence) -> None:
        self.trained, self.keeper, self.sequence = trained, keeper, sequence

    def take(
        self, aggregate: Aggregate, stats: AggregationStats, min_updates: int
    ) -> tuple[RoundReport, AggregationStats]:
        """Lift the mean of an aggregate, validate it, and take an optimizer step.

        Args:
            aggregate: The aggregate of the updates.
            stats: Statistics of the updates.
            min_updates: Minimum number of updates.

        Returns:
            The report and the statistics, limited to values that may be reported.

        Raises:
            ProtocolError: The aggregate is invalid or the step failed. Nothing has changed and the
                round stays open.
        """
        trained, keeper, sequence, round = self.trained, self.keeper, self.sequence, self.sequence.number
        changes = changes_of(aggregate, sequence.opened().first.plan, trained.read(), min_updates)
        keeper.check_use(round, stats, aggregate.count)
        sequence.check_weights()
        size = norm({name: change for name, change in changes.items() if name not in trained.statistics})
        report, stats = keeper.report(stats.report(round, aggregate.count, size), stats)
        changes = keeper.project(changes, size, aggregate.count)
        try:
            # A PyTorch optimizer steps in place, so the weights cannot be a value that replaces the old one: the old
            # values are kept until nothing can fail any more.
            with restored_on_error(trained, keeper):
                trained.step(keeper.noisy(changes, round, sequence.keys.of_update(round), trained.model))
                keeper.use(round, stats.senders)
                sequence.noise.end(round)
        except BaseException:
            sequence.weights_restored()
            raise
        sequence.advance()
        if report.unanswered and report.accepted >= len(report.lanes):
            lanes = ", ".join(map(str, report.unanswered))
            remedy = "open_round(client) gives each client its lane"
            log.warning("round %s: no answer in lanes %s of %s; %s", round, lanes, len(report.lanes), remedy)
        return report, stats
