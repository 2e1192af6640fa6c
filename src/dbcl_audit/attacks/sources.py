"""What each seat takes for the victim's gradients when it looks for a property. Reads: server; client-0."""

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
    """The sum of the other clients' gradients in the space of the victim's V as an attacker has it, for tested rounds.

    `victims` holds for each of these rounds what the victim was sent, as the attacker has it, and how many clients are
    in the sum. `exact` says that the attacker knows it to be the very sum, because there was no veil on what it was
    computed from.

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
    """The server's, each estimator's, and what a client gets from the unsketched tensors alone.

    Where clients collude, it is they who are rehearsed, and the server is left out. Buffers, such as running means,
    have no gradient and are left out.

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
    """The server has what the victim was sent; where a client has the same (`held`), its object is taken."""
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
    whole = all(view.sketches[0].width == view.dim for view in seen.values())  # who sees all lanes sees everything
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
    """Whether two broadcasts are of one lane and number for number the same."""
    tensors = one.tensors.items()
    return one.plan.digest == other.plan.digest and all(tensor.equal(other.tensors[name]) for name, tensor in tensors)


def _trained(transcript: Transcript) -> set[str]:
    return {name for name, _ in transcript.template().named_parameters()}
