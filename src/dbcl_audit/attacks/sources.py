"""Estimates of the victim's gradients by each adversary, for property inference. Reads: server;
client-0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dbcl.protocol import Broadcast
from dbcl.transcripts import Transcript
from dbcl_audit.attacks.gradients import as_gradient
from dbcl_audit.attacks.own_data import Gradients
from dbcl_audit.attacks.updates import ESTIMATORS
from dbcl_audit.attacks.victim import Changes, VictimsRound, victims_rounds
from dbcl_audit.estimators.observations import tensor_observations
from dbcl_audit.estimators.paper_estimators import option_2
from dbcl_audit.simulated_run import SimulatedRun


@dataclass(frozen=True, eq=False)
class Source:
    """Sums of the other clients' gradients in the tested rounds, in the space of the victim's V.

    Args:
        name: name of the estimator or observation.
        adversary: party that attacks.
        attacker: "naive" or "adaptive".
        gradients: sum of the gradients in each tested round.
        victims: the victim's broadcast in each round, as far as the attacker knows it, and the
            number of clients in the sum.
        exact: True if the sums are known exactly because the run has no veil.

    >>> Source("rewind", "client", "adaptive", [], [], exact=True).adversary
    'client'
    """

    name: str
    adversary: str
    attacker: str
    gradients: list[Gradients]
    victims: Sequence[VictimsRound]
    exact: bool


def sources(simulated: SimulatedRun, found: Mapping[str, Changes], tested: Sequence[int]) -> list[Source]:
    """Return the summed gradients that each adversary has: the server, each estimator, and a client
    that reads the unsketched tensors alone.

    The server is omitted if clients collude. Buffers, such as running means, have no gradient and
    are omitted.

    >>> from dbcl_audit.examples import example_batches
    >>> played = example_batches("paper", model="dlg-lenet")
    >>> [(source.name, source.adversary) for source in sources(played, {}, tested=[0, 1])]
    [('the update itself', 'server'), ('unsketched tensors only', 'client')]
    """
    client = _of_client(simulated, found, tested)
    if simulated.colluders:
        return client
    return [_of_server(simulated, tested, client[0].victims if client else []), *client]


def _of_server(simulated: SimulatedRun, tested: Sequence[int], held: Sequence[VictimsRound]) -> Source:
    """Return the server's source. If the client's broadcasts (`held`) are equal to the server's,
    they are reused.
    """
    lr, trained = simulated.server.setting.local.lr, _trained(simulated.server)
    rounds = [simulated.server_observation(round) for round in tested]
    sent = [saw.broadcast for saw in rounds]
    if held and all(_equal(one.broadcast, broadcast) for one, broadcast in zip(held, sent, strict=True)):
        sent = [one.broadcast for one in held]
    gradients, victims = [], []
    for saw, broadcast in zip(rounds, sent, strict=True):
        crowd = len(saw.clients)
        gradients.append(as_gradient({n: tensor * crowd for n, tensor in saw.tensors.items() if n in trained}, lr))
        victims.append(VictimsRound(broadcast, crowd, crowd))
    name = "the update itself" if simulated.bound is None else f"the sum of {len(rounds[0].clients)} updates"
    return Source(name, "server", "adaptive", gradients, victims, exact=True)


def _of_client(simulated: SimulatedRun, found: Mapping[str, Changes], tested: Sequence[int]) -> list[Source]:
    transcript, adversary = simulated.attacker, simulated.adversary
    seen = tensor_observations(transcript, allies=simulated.allies)
    setting, trained = transcript.setting, _trained(transcript)
    victims = victims_rounds(simulated, seen, found, tested)

    def sums(changes: Changes) -> list[Gradients]:
        of_trained = {name: guesses for name, guesses in changes.items() if name in trained}
        places = [transcript.rounds.index(round) for round in tested]
        each = zip(victims, places, strict=True)
        return [as_gradient(one.others_sum(of_trained, place, setting.cohort), setting.local.lr) for one, place in each]

    sources = []
    lanes = transcript[tested[0]].broadcast.plan.lanes
    whole = all(view.sketches[0].width == view.dim for view in seen.values())  # all lanes together show everything
    for name, changes in found.items():
        kind = ESTIMATORS[name][0]
        exact = setting.veil == 0 and kind == "adaptive" and (lanes == 1 or whole)
        sources.append(Source(name, adversary, kind, sums(changes), victims, exact))
    plan = transcript[tested[0]].broadcast.plan
    unsketched = [part.name for part in plan.tensors if not part.sketched and part.name in trained]
    if unsketched:
        differences: Changes = {name: option_2(seen[name]) for name in unsketched}
        exact = setting.veil == 0
        sources.append(Source("unsketched tensors only", adversary, "naive", sums(differences), victims, exact))
    return sources


def _equal(one: Broadcast, other: Broadcast) -> bool:
    """Return True if two broadcasts belong to the same lane and have equal values."""
    tensors = one.tensors.items()
    return one.plan.digest == other.plan.digest and all(tensor.equal(other.tensors[name]) for name, tensor in tensors)


def _trained(transcript: Transcript) -> set[str]:
    return {name for name, _ in transcript.template().named_parameters()}
