"""Attempts at a round under secure aggregation: a round in which no sum could be made begins anew."""

import logging
from collections.abc import Callable

from flwr.app import Message, MetricRecord
from flwr.serverapp import Grid

from dbcl.errors import ProtocolError
from dbcl.flower.secure_server import SecureExchange
from dbcl.privacy import PrivacyPlan
from dbcl.protocol import RoundReport

log = logging.getLogger("flwr.dbcl")

ATTEMPTS = 3
"""Number of attempts at a round before the run gives up."""


def play_securely(
    secure: SecureExchange, configure: Callable[[], list[Message]], grid: Grid, timeout: float
) -> tuple[RoundReport, MetricRecord]:
    """Play a round in which the server learns only a sum.

    Only the last attempt goes without nodes that are lost: from then on they are no part of their group.

    Args:
        secure: The exchanges of a round.
        configure: Makes the first messages of an attempt.
        grid: The grid that carries the messages.
        timeout: Longest wait for answers, in seconds.

    Raises:
        ProtocolError: No attempt succeeded, and the round cannot be given up.
    """
    number = secure.server.round + 1
    for left in reversed(range(ATTEMPTS)):
        messages = configure()
        try:
            report = secure.play(messages, grid, timeout, partial=not left)
            break
        except ProtocolError as error:
            if not left and _may_void(secure.server.privacy):
                log.warning("%s\nround %s is given up: the next one has other nodes", error, number)
                secure.server.void_round()
                return RoundReport(number - 1, 0), MetricRecord({"dbcl-accepted": 0, "dbcl-refused": len(messages)})
            if not left:
                raise ProtocolError(
                    f"{error}\nThis was attempt {ATTEMPTS} of {ATTEMPTS}. The remedy: start the nodes named above "
                    "again, each with its own folder, and then run the same command again"
                ) from error
            log.warning("%s\nround %s begins anew", error, number)
    for reason in report.refused:
        log.warning("round %s: left out %s", number, reason)
    return report, counted(report, MetricRecord())


def _may_void(privacy: PrivacyPlan | None) -> bool:
    """Return whether a round without a sum may be given up: where groups change, clients mask once in a round."""
    return privacy is not None and privacy.shared and privacy.least < privacy.clients


def counted(report: RoundReport, metrics: MetricRecord) -> MetricRecord:
    """Add the numbers of accepted and rejected updates to the metrics of a round."""
    metrics["dbcl-accepted"], metrics["dbcl-refused"] = report.accepted, len(report.refused)
    return metrics
