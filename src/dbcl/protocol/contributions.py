"""Counts of each client's rejected or down-weighted updates over a run."""

from collections import Counter
from typing import Any

from dbcl.errors import plain
from dbcl.protocol.inspection import is_count
from dbcl.protocol.messages import AggregationStats
from dbcl.protocol.rejection import Reason, Rejection
from dbcl.state import State

NAMED_CLIENTS = 5
"""Maximum number of clients that `Contributions.lines` names individually."""
COUNTS = ("rounds", "rejected", "capped", "clipped")


class Contributions:
    """Per-client counts of rejected, capped and clipped updates, saved in the server's checkpoints.

    A client is `capped` in a round if its weight is below its number of examples, and `clipped` if
    its update is scaled down. `reasons` holds the last rejection of each client.

    >>> counted = Contributions()
    >>> stale = Rejection(Reason.STALE, "answers round 3")
    >>> counted.add(AggregationStats({"bob": stale}, capped=("ann",), senders=("ann", "eve")))
    >>> print(counted)
    bob: rejected in 1 of 1 rounds (answers round 3)
    ann: counted for fewer examples than it has in 1 of 1 rounds
    """

    def __init__(self) -> None:
        self.rounds: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.capped: Counter[str] = Counter()
        self.clipped: Counter[str] = Counter()
        self.reasons: dict[str, Rejection] = {}

    def add(self, stats: AggregationStats) -> None:
        """Add the statistics of a closed round."""
        self.rounds.update({*stats.senders, *stats.rejected, *stats.capped, *stats.clipped})
        self.rejected.update(stats.rejected.keys())
        self.capped.update(stats.capped)
        self.clipped.update(stats.clipped)
        self.reasons.update(stats.rejected)

    def lines(self) -> list[str]:
        """Return a line per client with rejected or down-weighted updates, most affected first."""

        def line(client: str) -> str:
            rounds = f"of {self.rounds[client]} rounds"
            said = []
            if count := self.rejected[client]:
                why = self.reasons[client]
                diverged = why.reason is Reason.NOT_FINITE
                hint = ": look for NaN in its examples, or lower its learning rate" if diverged else ""
                said.append(f"rejected in {count} {rounds} ({plain(why.detail, 150)}{hint})")
            if count := self.capped[client]:
                said.append(f"counted for fewer examples than it has in {count} {rounds}")
            if count := self.clipped[client]:
                said.append(f"its update was scaled down in {count} {rounds}")
            return f"{client}: {', '.join(said)}"

        def loss(client: str) -> tuple[float, int, int]:
            rounds = self.rounds[client]
            return -self.rejected[client] / rounds, -self.rejected[client], -self.capped[client] - self.clipped[client]

        affected = sorted({*self.rejected, *self.capped, *self.clipped}, key=lambda client: (loss(client), client))
        rest = len(affected) - NAMED_CLIENTS
        return [line(client) for client in affected[:NAMED_CLIENTS]] + (
            [f"and {rest} more clients"] if rest > 0 else []
        )

    def __str__(self) -> str:
        return "\n".join(self.lines()) or "every update counted in full"

    def warning(self) -> str:
        """Return a summary for the end of a run, or "" if all updates had full weight."""
        if not (lines := self.lines()):
            return ""
        bounded = "\n(`max_influence` bounds the influence of one client; 0 removes the bound)"
        text = "\n  ".join(["not every update counted in full:", *lines])
        return text + (bounded if self.capped or self.clipped else "")

    def facts(self) -> dict[str, Any]:
        """Return the counts as plain values.

        >>> counted = Contributions()
        >>> counted.add(AggregationStats({"bob": Rejection(Reason.NOT_FINITE, "bias holds NaN")}))
        >>> counted.facts()["rejected"]
        {'bob': {'rounds': 1, 'reason': 'bias holds NaN'}}
        """
        rejected = {who: {"rounds": count, "reason": self.reasons[who].detail} for who, count in self.rejected.items()}
        return {"rejected": rejected, "capped": dict(self.capped), "clipped": dict(self.clipped)}

    def state(self) -> State:
        """Return the state for a checkpoint."""
        reasons = {who: [each.reason.value, each.detail] for who, each in self.reasons.items()}
        return State({**{name: dict(getattr(self, name)) for name in COUNTS}, "reasons": reasons}, {})

    def load_state(self, state: State) -> None:
        """Restore the state returned by `state`."""
        counts = {name: Counter({str(who): int(n) for who, n in state.values[name].items()}) for name in COUNTS}
        reasons = {
            str(who): Rejection(Reason(reason), str(detail))
            for who, (reason, detail) in state.values["reasons"].items()
        }
        if (
            not all(is_count(n) for each in counts.values() for n in each.values())
            or counts["rejected"].keys() - reasons
        ):
            raise ValueError("counts of clients")
        vars(self).update(counts, reasons=reasons)
