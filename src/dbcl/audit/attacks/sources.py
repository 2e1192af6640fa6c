"""What each seat takes for the victim's gradients when it looks for a property. Reads: server; client-0."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dbcl.audit.attacks.gradients import as_gradient
from dbcl.audit.attacks.own_data import Gradients
from dbcl.audit.attacks.updates import ESTIMATORS, Changes
from dbcl.audit.estimators.options import option_2
from dbcl.audit.estimators.view import View, views
from dbcl.audit.rehearsal import VICTIM, Rehearsal
from dbcl.transcripts import Transcript


@dataclass(frozen=True, eq=False)
class Source:
    """The sum of the other clients' gradients in V's space as an attacker has it, one for each tested round.

    `others` is how many clients are in the sum. `exact` says that the attacker knows it to be the very sum, because
    there was no veil on what it was computed from.

    >>> Source("rewind", "client", "adaptive", [], others=1, exact=True).seat
    'client'
    """

    name: str
    seat: str
    attacker: str
    gradients: list[Gradients]
    others: int
    exact: bool


def sources(rehearsal: Rehearsal, found: Mapping[str, Changes], tested: Sequence[int]) -> list[Source]:
    """The server's, each estimator's, and what a client gets from the unsketched tensors alone.

    Buffers, such as running means, have no gradient and are left out.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> from dbcl.audit.rehearsal import draw_batches, rehearse
    >>> from dbcl.run import preset, task_of
    >>> script = draw_batches(np.arange(100), (3, 2, 1), seed=0)
    >>> config = preset("paper", model="dlg-lenet")
    >>> played = rehearse(config, task_of(config), script, Path(tempfile.mkdtemp()))
    >>> [(source.name, source.seat) for source in sources(played, {}, tested=[0, 1])]
    [('the update itself', 'server'), ('unsketched tensors only', 'client')]
    """
    return [_of_server(rehearsal.server, tested), *_of_client(rehearsal.attacker, found, tested)]


def _of_server(transcript: Transcript, tested: Sequence[int]) -> Source:
    lr, trained = transcript.setting.local.lr, _trained(transcript)
    updates = (transcript[round].updates[str(VICTIM)].tensors for round in tested)
    gradients = [
        as_gradient({name: tensor for name, tensor in update.items() if name in trained}, lr) for update in updates
    ]
    return Source("the update itself", "server", "adaptive", gradients, 1, exact=True)


def _of_client(transcript: Transcript, found: Mapping[str, Changes], tested: Sequence[int]) -> list[Source]:
    seen, setting, trained = views(transcript), transcript.setting, _trained(transcript)
    others = setting.cohort - 1

    def sums(changes: Changes) -> list[Gradients]:
        of_trained = {name: guesses for name, guesses in changes.items() if name in trained}
        return [as_gradient(_sum(seen, of_trained, n, setting.cohort), setting.local.lr) for n in range(len(tested))]

    sources = []
    for name, changes in found.items():
        kind = ESTIMATORS[name][0]
        exact = setting.veil == 0 and kind == "adaptive"
        sources.append(Source(name, "client", kind, sums(changes), others, exact))
    plan = transcript[tested[0]].broadcast.plan
    unsketched = [part.name for part in plan.tensors if not part.sketched and part.name in trained]
    if unsketched:
        differences: Changes = {name: option_2(seen[name]) for name in unsketched}
        exact = setting.veil == 0
        sources.append(Source("unsketched tensors only", "client", "naive", sums(differences), others, exact))
    return sources


def _sum(seen: Mapping[str, View], changes: Changes, index: int, cohort: int) -> Gradients:
    """The estimated sum of the others' updates of one round, in V's space."""
    return {name: seen[name].sketches[index].apply(guesses[index]) * cohort for name, guesses in changes.items()}


def _trained(transcript: Transcript) -> set[str]:
    return {name for name, _ in transcript.template().named_parameters()}
