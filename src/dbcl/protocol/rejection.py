"""Typed reasons for the rejection of updates."""

from dataclasses import dataclass
from enum import StrEnum

from dbcl.errors import ProtocolError, plain


class Reason(StrEnum):
    """Categories of rejections."""

    UNREADABLE = "unreadable"
    """The message cannot be read as an update."""
    STALE = "stale"
    """The update answers another round, plan or lane."""
    FORM = "form"
    """Names, shapes, dtypes or counts differ from the broadcast."""
    NOT_FINITE = "not finite"
    """The update holds NaN or infinity, or its norm exceeds the range of the weights."""
    NORM = "norm"
    """The norm of the update is above the bound."""
    OUTLIER = "outlier"
    """The norm of the update is far above the median of its lane."""
    DISAGREEMENT = "disagreement"
    """The client's updates point in the opposite direction of the other clients' updates."""
    DUPLICATE = "duplicate"
    """The update equals another update of the round."""
    BUDGET = "budget"
    """The guarantee does not allow the client to take part in this round."""
    SECURE_AGGREGATION = "secure aggregation"
    """The update could not be added under secure aggregation."""
    NO_ANSWER = "no answer"
    """The client failed or did not answer."""


@dataclass(frozen=True)
class Rejection:
    """The reason for rejecting an update, with a human-readable explanation.

    >>> str(Rejection(Reason.STALE, "answers round 2, and round 3 is open"))
    'answers round 2, and round 3 is open'
    """

    reason: Reason
    detail: str

    def __str__(self) -> str:
        return self.detail


class RejectedError(ProtocolError):
    """An update is rejected; `rejection` holds the reason."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.rejection = Rejection(reason, plain(detail))


def rejection_of(error: Exception) -> Rejection:
    """Convert an error to a rejection; unknown error types mean that the update is unreadable.

    >>> rejection_of(ValueError("x")).detail, rejection_of(RejectedError(Reason.FORM, "bias is missing")).reason
    ('cannot be read (ValueError)', <Reason.FORM: 'form'>)
    """
    if isinstance(error, RejectedError):
        return error.rejection
    detail = str(error) if isinstance(error, ProtocolError) else f"cannot be read ({type(error).__name__})"
    return Rejection(Reason.UNREADABLE, plain(detail))
