"""Validation of a round's updates: individually, and relative to each other."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from dbcl.errors import ProtocolError
from dbcl.plan import SketchPlan
from dbcl.protocol.codec import decode_update
from dbcl.protocol.influence import InfluenceLimits
from dbcl.protocol.keeper import Keeper
from dbcl.protocol.messages import Update, UpdateStack
from dbcl.protocol.open_round import OpenRound
from dbcl.protocol.rejection import Rejection
from dbcl.protocol.validation import AcceptedUpdate, UpdateValidator, ValidationResult, duplicates, split

log = logging.getLogger(__name__)


class RoundValidation:
    """Validates the updates of a round, given as objects or bytes, individually or in a stack.

    Args:
        validator: Limits for updates.
        keeper: The enforcer of the guarantee. It makes the final decision on rejections and
            weights.
        plan: Names the sketched tensors, and holds the number of lanes.
        statistics: Names of the normalisation statistics.
    """

    def __init__(self, validator: UpdateValidator, keeper: Keeper, plan: SketchPlan, statistics: set[str]) -> None:
        self.validator, self.keeper, self.plan, self.statistics = validator, keeper, plan, statistics
        self.influence = InfluenceLimits(validator)

    def validate(
        self, updates: Iterable[Update | bytes] | Mapping[str, Update | bytes], opened: OpenRound
    ) -> ValidationResult:
        """Validate the updates for an open round. Does not change any state."""
        named = isinstance(updates, Mapping)
        self.keeper.check_senders(named=named)
        if isinstance(updates, UpdateStack) and (result := self._validate_stack(updates, opened)) is not None:
            return result
        items = updates.items() if isinstance(updates, Mapping) else ((f"update {n}", u) for n, u in enumerate(updates))
        accepted, rejected = self._validate_each(((str(who), update) for who, update in items), opened)
        if not named:
            rejected |= duplicates(accepted)
        kept = {who: each for who, each in accepted.items() if who not in rejected}
        return self._compared(kept, rejected, opened, named=named)

    def _validate_each(
        self, updates: Iterable[tuple[str, Update | bytes]], opened: OpenRound
    ) -> tuple[dict[str, AcceptedUpdate], dict[str, Rejection]]:
        repeated = Counter[str]()
        accepted: dict[str, AcceptedUpdate] = {}
        rejected: dict[str, Rejection] = {}
        for who, update in updates:
            if who in accepted or who in rejected:
                repeated[who] += 1
            elif (spent := self.keeper.rejection(opened.round, who, accepted)) is not None:
                rejected[who] = spent
            else:
                one = split([(who, self._validated(who, update, opened))])
                accepted |= one[0]
                rejected |= one[1]
        for who, count in repeated.items():
            log.warning("round %s: %s further answers of %s are ignored", opened.round, count, who)
        return accepted, rejected

    def _validated(self, who: str, update: Update | bytes, opened: OpenRound) -> AcceptedUpdate | Exception:
        try:
            encoded = isinstance(update, bytes | bytearray | memoryview)
            read = decode_update(bytes(update), lazy=True) if encoded else update  # type: ignore[arg-type]
            if isinstance(read, Update):
                read = self.keeper.protect(read)
            return self.validator.validate(read, opened.answered(read.plan if isinstance(read, Update) else "", who))
        except Exception as error:  # one client's error must not end the others' round
            log.debug("round %s: %s", opened.round, who, exc_info=True)
            return error

    def _validate_stack(self, stack: UpdateStack, opened: OpenRound) -> ValidationResult | None:
        """Validate a complete stack; return None if its updates need individual validation."""
        protected = self.keeper.protect_stack(opened.round, stack)
        if protected is None:
            return None
        stack = protected
        try:
            answered = [opened.answered(digest, who) for who, digest in zip(stack.senders, stack.plans, strict=True)]
        except ProtocolError:  # a client answers in another lane than its own
            return None
        accepted, rejected = split(zip(stack.senders, self.validator.validate_stack(stack, answered), strict=True))
        return replace(self._compared(accepted, rejected, opened, stack=stack), stack=stack)

    def _compared(
        self,
        accepted: Mapping[str, AcceptedUpdate],
        rejected: Mapping[str, Rejection],
        opened: OpenRound,
        *,
        named: bool = True,
        stack: UpdateStack | None = None,
    ) -> ValidationResult:
        """Apply the limits that compare clients, and the weights of the guarantee."""
        rejected = {**rejected, **self.influence.outliers(accepted)}
        kept = self.keeper.weigh({who: each for who, each in accepted.items() if who not in rejected})
        kept, influence = self.influence.capped(kept)
        cosines: dict[str, float] = {}
        if named:
            sketched = {tensor.name for tensor in self.plan.tensors if tensor.sketched}
            kept, distrusted, cosines = self.influence.trusted(kept, stack, sketched, self.statistics)
            rejected |= distrusted
        answers = Counter(opened.lane_of(each.update.plan) for each in kept.values())
        lanes = tuple(answers[lane] for lane in range(self.plan.lanes))
        return ValidationResult(opened.round, kept, rejected, influence, lanes=lanes, agreement=cosines)
