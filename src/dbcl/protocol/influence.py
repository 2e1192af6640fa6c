"""Limits on each client's influence on the average, relative to other clients."""

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import replace

from dbcl.privacy import clip_factor
from dbcl.protocol.messages import Update, UpdateStack
from dbcl.protocol.rejection import Reason, Rejection
from dbcl.protocol.reputation import MIN_CLIENTS, Reputation, agreement
from dbcl.protocol.validation import AcceptedUpdate, UpdateValidator
from dbcl.state import State, join

MIN_FOR_MEDIAN = 3
"""Minimum number of clients or rounds for a median that no single value determines."""
RECENT_ROUNDS = 15
"""Number of recent rounds whose median influence is stored."""
DISAGREES = Rejection(
    Reason.DISAGREEMENT, "its updates have pointed against those of the others over the rounds that it took part in"
)

Accepted = Mapping[str, AcceptedUpdate]


class InfluenceLimits:
    """Rejects outliers, caps each client's influence, and reduces the weight of opposing clients.

    Stores the influence of the median client in recent rounds, and each client's reputation.

    Args:
        validator: Holds `max_influence` and `outlier_factor`.
    """

    def __init__(self, validator: UpdateValidator) -> None:
        self.validator = validator
        self.reputation = Reputation()
        self._recent: list[float] = []

    def outliers(self, accepted: Accepted) -> dict[str, Rejection]:
        """Return a rejection for each update whose norm is far above the median of its lane.

        >>> def sent(norm):
        ...     return AcceptedUpdate(Update(0, "ab", {}, examples=10), 1.0, 10.0, norm)
        >>> found = InfluenceLimits(UpdateValidator()).outliers(
        ...     {"ann": sent(1.0), "bob": sent(1.2), "cleo": sent(31.0)}
        ... )
        >>> print(found["cleo"])
        its norm 31 is 26 times the median of its lane, above 10: lower its learning rate, or raise outlier_factor
        """
        found: dict[str, Rejection] = {}
        factor = self.validator.outlier_factor
        if factor is None:
            return found
        lanes: dict[str, dict[str, AcceptedUpdate]] = {}
        for who, each in accepted.items():
            lanes.setdefault(each.update.plan, {})[who] = each
        for lane in lanes.values():
            median = statistics.median(each.norm for each in lane.values())
            usual = statistics.median(each.weight for each in lane.values())
            for who, each in lane.items() if len(lane) >= MIN_FOR_MEDIAN else ():
                if each.norm > factor * median * max(1.0, each.weight / usual) > 0:
                    times = f"its norm {each.norm:.4g} is {each.norm / median:.0f} times the median of its lane"
                    remedy = "lower its learning rate, or raise outlier_factor"
                    found[who] = Rejection(Reason.OUTLIER, f"{times}, above {factor:g}: {remedy}")
        return found

    def capped(self, accepted: Accepted) -> tuple[dict[str, AcceptedUpdate], float]:
        """Cap each client's weight and influence.

        Also return the influence of the round's median client.

        A client's influence is its weight relative to the median weight, times the norm of its
        update.

        >>> import torch
        >>> def sent(size, examples):
        ...     update = Update(0, "ab", {"b": torch.tensor([size])}, examples)
        ...     return AcceptedUpdate(update, 1.0, float(examples), abs(size))
        >>> honest = {f"client {number}": sent(1.0, 10) for number in range(3)}
        >>> made, influence = InfluenceLimits(UpdateValidator()).capped({**honest, "greedy": sent(-1e6, 10**6)})
        >>> made["greedy"].weight, made["greedy"].factor, influence
        (15.0, 1e-06, 1.0)
        """
        limit = self.validator.max_influence
        if not accepted or limit is None:
            return dict(accepted), 0.0
        median = statistics.median(each.weight for each in accepted.values())
        weighed = {
            who: each if each.weight <= limit * median else replace(each, weight=limit * median)
            for who, each in accepted.items()
        }
        influence = statistics.median(each.weight / median * each.norm for each in weighed.values())
        known = [influence] if len(weighed) >= MIN_FOR_MEDIAN else []
        known += [statistics.median(self._recent)] if len(self._recent) >= MIN_FOR_MEDIAN else []
        usual = min(known, default=0.0)
        if usual <= 0:  # no client moves, or nothing is known yet
            return weighed, influence
        made = {}
        for who, each in weighed.items():
            factor = clip_factor(each.norm, limit * usual * median / each.weight)
            made[who] = each
            if factor < 1.0:
                made[who] = replace(each, factor=each.factor * factor, norm=each.norm * factor)
        return made, influence

    def trusted(
        self, accepted: Accepted, stack: UpdateStack | None, sketched: Collection[str], statistics: Collection[str]
    ) -> tuple[dict[str, AcceptedUpdate], dict[str, Rejection], dict[str, float]]:
        """Scale weights by reputation.

        Returns:
            The remaining updates, the rejections, and the agreement of each update with the others.
        """
        if self.validator.max_influence is None or len(accepted) < MIN_CLIENTS:
            return dict(accepted), {}, {}
        trust = self.reputation.trust(accepted)
        updates: Mapping[str, Update] = {who: each.update for who, each in accepted.items()}
        if stack is not None:
            updates = stack.subset(list(accepted))
        cosines = agreement(updates, trust, sketched, statistics)
        rejected = {who: DISAGREES for who, factor in trust.items() if not factor}
        kept = {
            who: each if trust[who] == 1.0 else replace(each, weight=each.weight * trust[who])
            for who, each in accepted.items()
            if trust[who]
        }
        return kept, rejected, cosines

    def observe(self, influence: float, cosines: Mapping[str, float]) -> None:
        """Store the median influence and the agreement values of a closed round."""
        if influence > 0:
            self._recent = [*self._recent, influence][-RECENT_ROUNDS:]
        self.reputation.observe(cosines)

    def state(self) -> State:
        """Return the state for a checkpoint."""
        return join(recent=State({"influence": list(self._recent)}, {}), reputation=self.reputation.state())

    def load_state(self, state: State) -> None:
        """Restore the state returned by `state`."""
        recent = [float(each) for each in state.values["recent"]["influence"]]
        if not all(map(math.isfinite, recent)):
            raise ValueError("the influence of a round")
        self.reputation.load_state(state.part("reputation"))
        self._recent = recent
