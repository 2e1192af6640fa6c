"""Typed reasons for which an update does not count."""

from dataclasses import dataclass
from enum import StrEnum

from dbcl.errors import ProtocolError, plain


class Reason(StrEnum):
    """Kinds of reasons for which an update is rejected."""

    UNREADABLE = "unreadable"
    """The bytes or the object are no update."""
    STALE = "stale"
    """It answers another round, plan or lane."""
    FORM = "form"
    """Names, shapes, dtypes or counts are not those of the broadcast."""
    NOT_FINITE = "not finite"
    """It holds NaN or infinity, or its norm is beyond the range of the weights."""
    NORM = "norm"
    """Its norm is above the bound."""
    OUTLIER = "outlier"
    """Its norm is far above the median of its lane."""
    DISAGREEMENT = "disagreement"
    """The client's updates point against those of the others."""
    DUPLICATE = "duplicate"
    """It equals another update of the round."""
    BUDGET = "budget"
    """The guarantee does not allow the client to take part in this round."""
    SECURE_AGGREGATION = "secure aggregation"
    """It could not be added up securely."""
    NO_ANSWER = "no answer"
    """The client failed or did not answer."""


@dataclass(frozen=True)
class Rejection:
    """The reason for which an update does not count, with a sentence for people.

    >>> str(Rejection(Reason.STALE, "answers round 2, and round 3 is open"))
    'answers round 2, and round 3 is open'
    """

    reason: Reason
    detail: str

    def __str__(self) -> str:
        return self.detail


class RejectedError(ProtocolError):
    """An update is rejected; `rejection` says why."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.rejection = Rejection(reason, plain(detail))


def rejection_of(error: Exception) -> Rejection:
    """Return the rejection that an error stands for; an error of another kind means that the update is unreadable.

    >>> rejection_of(ValueError("x")).detail, rejection_of(RejectedError(Reason.FORM, "bias is missing")).reason
    ('cannot be read (ValueError)', <Reason.FORM: 'form'>)
    """
    if isinstance(error, RejectedError):
        return error.rejection
    detail = str(error) if isinstance(error, ProtocolError) else f"cannot be read ({type(error).__name__})"
    return Rejection(Reason.UNREADABLE, plain(detail))
