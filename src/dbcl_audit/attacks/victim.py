"""Attacker's knowledge of the victim's lane: the victim's broadcast, and the number of other
clients in the lane.

Reads: server, for the victim's plan; client-0 and its allies.

A client of another lane does not receive the victim's broadcast V_k = (W + N) R_k. It knows R_k and
estimates W with a smoother over all rounds, corrected by its own observation: W_hat + (V - W_hat R)
R^T. Clients are not told the lanes of other clients. The auditor gives the attacker the plan of the
victim's lane and the number of other clients in it. This is the worst case, because an attacker
could also try all lanes in turn.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from dbcl.protocol import Broadcast
from dbcl.round_plan import RoundPlan
from dbcl_audit.estimators.kalman import Smoothed
from dbcl_audit.estimators.observations import TensorObservations
from dbcl_audit.estimators.smoother import known_scales, smoother
from dbcl_audit.simulated_run import VICTIM, SimulatedRun

Changes = dict[str, list[Tensor]]
"""Estimated changes of each tensor between successive observed rounds, as matrices over the columns
of W.
"""


@dataclass(frozen=True, eq=False)
class VictimsRound:
    """One round of the victim, as far as an attacker knows it.

    Args:
        broadcast: the victim's broadcast, or an estimate of it.
        others: number of clients whose updates enter the change of an unsketched tensor.
        in_lane: number of clients whose updates enter the change of a sketched tensor, as seen
            through the victim's sketch.

    >>> import dbcl, torch
    >>> broadcast = dbcl.Server(torch.nn.Linear(6, 2), dbcl.SketchConfig(coverage="all")).open_round()
    >>> known = VictimsRound(broadcast, others=9, in_lane=5)
    >>> known.crowd("weight"), known.crowd("bias")
    (5, 9)
    """

    broadcast: Broadcast
    others: int
    in_lane: int

    def crowd(self, name: str) -> int:
        """Return the number of clients in the observed sum of a tensor."""
        return self.in_lane if name in self.broadcast.plan.sketches else self.others

    def others_sum(self, changes: Mapping[str, Sequence[Tensor]], index: int, cohort: int) -> dict[str, Tensor]:
        """Return the estimated sum of the other clients' updates in the space of the victim's V, as
        matrices.

        `index` counts the rounds that the attacker observed.

        >>> import dbcl, torch
        >>> broadcast = dbcl.Server(torch.nn.Linear(6, 2), dbcl.SketchConfig(coverage="all")).open_round()
        >>> changes = {"weight": [torch.ones(2, 6)], "bias": [torch.ones(1, 2)]}
        >>> sums = VictimsRound(broadcast, 1, 1).others_sum(changes, 0, cohort=2)
        >>> sums["weight"].shape, sums["bias"]
        (torch.Size([2, 3]), tensor([[2., 2.]]))
        """
        sketches = self.broadcast.plan.sketches
        found = {}
        for name, guesses in changes.items():
            guess = guesses[index] * cohort
            found[name] = sketches[name].apply(guess) if name in sketches else guess
        return found

    def others_update(self, changes: Mapping[str, Sequence[Tensor]], index: int, cohort: int) -> dict[str, Tensor]:
        """Return the average update of the other clients in the victim's lane. With one other
        client, this is its update.

        >>> import dbcl, torch
        >>> broadcast = dbcl.Server(torch.nn.Linear(6, 2), dbcl.SketchConfig(coverage="all")).open_round()
        >>> VictimsRound(broadcast, 2, 1).others_update({"bias": [torch.ones(1, 2)]}, 0, cohort=3)
        {'bias': tensor([[1.5000, 1.5000]])}
        """
        sums = self.others_sum(changes, index, cohort)
        return {name: tensor / max(1, self.crowd(name)) for name, tensor in sums.items()}


def victims_rounds(
    simulated: SimulatedRun, seen: Mapping[str, TensorObservations], found: Mapping[str, Changes], rounds: Sequence[int]
) -> list[VictimsRound]:
    """Return the victim's rounds: exact in a lane of the attacker or its allies, otherwise
    estimated.

    W is estimated by a smoother from `found`, if there is one, or by a new smoother.

    >>> from dbcl_audit.examples import example_batches
    >>> from dbcl_audit.estimators.observations import tensor_observations
    >>> played = example_batches("paper", model="dlg-lenet", lanes=2)
    >>> known = victims_rounds(played, tensor_observations(played.attacker), {}, [0, 1])
    >>> [each.broadcast.plan.lane == 1 - played.attacker[each.broadcast.round].broadcast.plan.lane for each in known]
    [True, True]
    """
    pooled = (simulated.attacker, *simulated.allies)
    own = {each.client for each in pooled}
    cohort, weights = simulated.attacker.setting.cohort, None
    known = []
    for round in rounds:
        digest, together = simulated.lane_of(round, VICTIM)
        plan = next(sent.plan for sent in simulated.server[round].broadcasts if sent.plan.digest == digest)
        in_lane = sum(str(client) not in own for client in together)
        held = {(each := transcript[round].broadcast).plan.digest: each for transcript in pooled}
        broadcast = held.get(plan.digest)
        if broadcast is None:
            weights = weights or _Weights(seen, found, simulated.attacker.setting.veil)
            broadcast = _estimated(next(iter(held.values())), plan, seen, weights, round)
        known.append(VictimsRound(broadcast, cohort - len(pooled), in_lane))
    return known


class _Weights:
    """Expected W before a round, from a smoother. Rounds must be requested in ascending order."""

    def __init__(self, seen: Mapping[str, TensorObservations], found: Mapping[str, Changes], veil: float) -> None:
        smoothed = (each for each in found.values() if all(isinstance(one, Smoothed) for one in each.values()))
        changes = next(smoothed, {})
        self.next, self.at = dict.fromkeys(seen, 0), dict[str, Tensor]()
        self.walks: dict[str, Iterator[Tensor]] = {}
        for name, view in seen.items():
            if view.sketched:
                each = changes[name] if name in changes else smoother(view, known_scales(view, veil))
                assert isinstance(each, Smoothed)
                self.walks[name] = each.weights(view)

    def __call__(self, name: str, index: int) -> Tensor:
        while self.next[name] <= index:
            self.at[name] = next(self.walks[name])
            self.next[name] += 1
        return self.at[name]


def _estimated(
    own: Broadcast, plan: RoundPlan, seen: Mapping[str, TensorObservations], weights: _Weights, round: int
) -> Broadcast:
    """Estimate the victim's broadcast: unsketched tensors as received, sketched tensors from the
    estimate of W.
    """
    tensors = dict(own.tensors)
    for name, sketch in plan.sketches.items():
        view = seen[name]
        index = view.rounds.index(round)
        guess, mine = weights(name, index), view.sketches[index]
        guess = guess + mine.lift(view.seen[index] - mine.apply(guess))
        tensors[name] = sketch.apply(guess).to(own.tensors[name].dtype)
    return Broadcast(plan, tensors, own.veil)
