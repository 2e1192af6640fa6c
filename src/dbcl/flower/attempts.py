"""Repeated attempts at a round under secure aggregation, in case an attempt yields no sum."""

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
"""Maximum attempts at a round before the run stops."""


def play_securely(
    secure: SecureExchange, configure: Callable[[], list[Message]], grid: Grid, timeout: float
) -> tuple[RoundReport, MetricRecord]:
    """Run a round under secure aggregation, with up to `ATTEMPTS` attempts.

    Only the last attempt drops unavailable nodes: they leave their group permanently.

    Args:
        secure: The message exchanges of a round.
        configure: Creates the first messages of an attempt.
        grid: The grid that transports the messages.
        timeout: Maximum time to wait for answers, in seconds.

    Returns:
        The report and the metrics of the round.

    Raises:
        ProtocolError: All attempts failed, and the round cannot be skipped.
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
    """Return True if a round without a sum may be skipped.

    Rounds can be skipped only if groups may change, because clients then mask only once per round.
    """
    return privacy is not None and privacy.shared and privacy.least < privacy.clients


def counted(report: RoundReport, metrics: MetricRecord) -> MetricRecord:
    """Add the numbers of accepted and rejected updates to the metrics of a round."""
    metrics["dbcl-accepted"], metrics["dbcl-refused"] = report.accepted, len(report.refused)
    return metrics
