"""Transcripts: all that one party saw in a run, and nothing else, as the only input of an attack.

A transcript is a folder with `setting.json`, which holds what everybody knows, and one safetensors file for each round
whose broadcast the party received, whether its update was used, lost or refused, or it was asked to evaluate only. The
messages are in it byte for byte as they crossed the wire. What really happened lies in a folder of its own, `truth`,
which no attack opens: only scoring does.

Longer than 350 lines: the recorder and the reader of a format stand together.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from dbcl.engines import LocalTraining
from dbcl.engines.training_server import TrainingServer
from dbcl.errors import AuditError, NotAttackableError, ProtocolError
from dbcl.files import SECRET, make_folder, write_atomic
from dbcl.model import networks
from dbcl.model.norm_stats import is_statistic
from dbcl.model.tensors import named_tensors
from dbcl.protocol import Broadcast, Update, decode_broadcast, decode_update, encode
from dbcl.protocol.aggregation import Weighted, average

SUM = "sum"


@dataclass(frozen=True)
class Setting:
    """Public setting that every party knows before the first round: the network, the local training, the cohort size.

    `momentum` and `server_lr` are those of the server's optimiser, `veil` the size of its noise relative to the
    weights. None of it is secret in a deployment: it is in the configuration that the parties agreed on.

    >>> Setting("mnist-mlp", (1, 28, 28), 10, {"lr": 0.01, "steps": 1}, clients=2, cohort=2).local.lr
    0.01
    """

    model: str
    shape: tuple[int, ...]
    outputs: int
    training: Mapping[str, float | int | str | None]
    clients: int
    cohort: int
    optimizer: str = "fedavg"
    momentum: float = 0.0
    server_lr: float = 1.0
    veil: float = 0.0

    @property
    def local(self) -> LocalTraining:
        """Settings of local training that are plain values; an optimiser and a schedule have only their names here."""
        numbers = {name: value for name, value in self.training.items() if name not in ("optimizer", "schedule")}
        return LocalTraining(**numbers)  # type: ignore[arg-type]

    def template(self) -> nn.Module:
        """Make a network of the right shape, with weights of its own."""
        if ":" in self.model or len(self.shape) != 3:  # a transcript never imports code by itself
            raise AuditError(f"the network {self.model!r} is code of its own: give Transcript a template that makes it")
        channels, height, width = self.shape
        return networks.build(self.model, shape=(channels, height, width), outputs=self.outputs, seed=1)


@dataclass(frozen=True, eq=False)
class RoundRecord:
    """Round as a party saw it.

    `updates` are by sender: a client's own under its number, the server's by client, or their sum under "sum", or with
    several lanes the sum of each lane under "sum 0", "sum 1" and so on. `broadcasts` are those of the lanes that it
    knows: a client one, the server all. `weights` is W before the round, which only the server holds. A client that was
    shown a round in which no update of its own counted has a broadcast and no updates.
    """

    broadcasts: tuple[Broadcast, ...]
    updates: Mapping[str, Update]
    weights: Mapping[str, Tensor] | None

    @property
    def broadcast(self) -> Broadcast:
        """Broadcast of the round; for the server, which knows them all, that of the first lane."""
        return self.broadcasts[0]

    def answered(self, sender: str) -> Broadcast:
        """Return the broadcast that a sender's update answers."""
        plan = self.updates[sender].plan
        return next(broadcast for broadcast in self.broadcasts if broadcast.plan.digest == plan)

    @property
    def round(self) -> int:
        return self.broadcast.round


class Transcript:
    """Sequence of the rounds that one party saw, read from a folder one at a time.

    Args:
        folder: Folder of the party, such as `run/transcripts/client-0`.
        template: Function that makes the network, if its name does not say how.

    Raises:
        AuditError: The folder holds no transcript, or a damaged one.
        NotAttackableError: The party was sent nothing.

    >>> Transcript(Path("nowhere"))
    Traceback (most recent call last):
        ...
    dbcl.errors.AuditError: nowhere holds no transcript: it has no setting.json
    """

    def __init__(self, folder: Path, template: Callable[[], nn.Module] | None = None) -> None:
        self.folder, self.party, self._template = folder, folder.name, template
        try:
            read = json.loads((folder / "setting.json").read_text())
            self.setting = Setting(**{**read, "shape": tuple(read["shape"])})
            _check_kinds(self.setting)
        except OSError:
            raise AuditError(f"{folder} holds no transcript: it has no setting.json") from None
        except (ValueError, KeyError, TypeError) as error:
            raise AuditError(f"{folder}: setting.json is damaged ({error!r})") from None
        self.rounds = _rounds(folder)
        if not self.rounds:
            raise NotAttackableError(f"{folder.name} holds no rounds: nothing was sent to it")

    def template(self) -> nn.Module:
        """Make a network of the right shape, with weights of its own: by `template`, or as the setting names it."""
        return self.setting.template() if self._template is None else self._template()

    @property
    def client(self) -> str | None:
        """Number of the transcript's client; None for the server."""
        return self.party.removeprefix("client-") if self.party.startswith("client-") else None

    def __len__(self) -> int:
        return len(self.rounds)

    def __getitem__(self, round: int) -> RoundRecord:
        try:
            held = safetensors.torch.load_file(_path(self.folder, round))
            sent = tuple(decode_broadcast(_bytes(tensor)) for _, tensor in sorted(_under(held, "broadcast").items()))
            updates = {who: decode_update(_bytes(tensor)) for who, tensor in _under(held, "update/").items()}
        except (OSError, safetensors.SafetensorError, ProtocolError, KeyError) as error:
            raise AuditError(f"{self.folder}: round {round} cannot be read ({error})") from None
        return RoundRecord(sent, updates, _under(held, "weights/") or None)

    def __iter__(self) -> Iterator[RoundRecord]:
        return (self[round] for round in self.rounds)


class Truth:
    """Ground truth, for scoring only. `weights(t)` is W before round t."""

    def __init__(self, transcripts: Path) -> None:
        self.folder = transcripts / "truth"

    def weights(self, round: int) -> dict[str, Tensor]:
        try:
            return safetensors.torch.load_file(_path(self.folder, round))
        except (OSError, safetensors.SafetensorError) as error:
            raise AuditError(f"{self.folder}: round {round} cannot be read ({error})") from None

    def change(self, start: int, end: int) -> dict[str, Tensor]:
        """Return the change of W from before round `start` to before round `end`."""
        before, after = self.weights(start), self.weights(end)
        return {name: after[name] - before[name] for name in before}

    def cohort(self, round: int) -> list[int]:
        """Return the clients that took part in a round, and did not only see its broadcast."""
        return list(map(int, self._plans(round)))

    def lane_of(self, round: int, client: int) -> tuple[str, list[int]]:
        """Return the digest of the plan that a client answered in a round, and all clients that answered it."""
        plans = self._plans(round)
        own = plans.get(str(client))
        if own is None:
            raise AuditError(f"{self.folder}: in cohorts.json client {client} takes no part in round {round}")
        return own, [int(each) for each, plan in plans.items() if plan == own]

    def _plans(self, round: int) -> dict[str, str]:
        """Return the clients that took part in a round, with the digest of the plan that each answered."""
        plans = _cohorts(self.folder).get(str(round))
        if plans is None:
            raise AuditError(f"{self.folder}: cohorts.json has no round {round}")
        return plans


class Recorder:
    """Writes the transcripts of a run round by round: set it as an engine's `observer`.

    A client's transcript has every round whose broadcast it was sent.

    Args:
        folder: Folder of all transcripts.
        parties: Numbers of clients, "server" (sees each client's update, or under secure aggregation the sum of each
            group) and "server-sum" (sees only sums, whatever the run's server sees).
        server: The server of the run.
        setting: Public setting of the run.

    >>> import tempfile, dbcl
    >>> from dbcl.engines import LocalEngine
    >>> net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> clients = [(torch.randn(4, 8), torch.arange(4) % 2) for _ in range(2)]
    >>> engine = LocalEngine(dbcl.Server(net), nn.Sequential(*net), clients, LocalTraining(), seed=bytes(32))
    >>> folder = Path(tempfile.mkdtemp())
    >>> setting = Setting("net", (1, 1, 8), 2, LocalTraining().settings(), clients=2, cohort=2)
    >>> engine.observer = Recorder(folder, ["0", "server"], engine.server, setting)
    >>> report = engine.play_round()
    >>> seen = Transcript(folder / "client-0")[0]
    >>> sorted(seen.updates), seen.weights is None
    (['0'], True)
    """

    def __init__(self, folder: Path, parties: Sequence[str], server: TrainingServer, setting: Setting) -> None:
        check_parties(parties, setting.clients)
        self.server = server
        self.folders = {party: folder / (f"client-{party}" if party.isdigit() else party) for party in parties}
        for place in self.folders.values():
            make_folder(place, secret=True)
            write_atomic(place / "setting.json", json.dumps(asdict(setting), indent=1).encode(), mode=SECRET)
        self.truth = folder / "truth"
        make_folder(self.truth, secret=True)
        for place in (*self.folders.values(), self.truth):  # rounds that a crash recorded and resume plays again
            for round in _rounds(place):
                # What was only shown of the open round stays seen: it is sent again as it was, perhaps to others.
                shown = round == server.round > 0 and _only_shown(_path(place, round)) and place != self.truth
                if round >= server.round and not shown:
                    _path(place, round).unlink()
        read = _cohorts(self.truth) if server.round else {}
        lost = [round for round in range(server.round) if str(round) not in read]
        if lost:
            said = ", ".join(map(str, lost[:5])) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
            raise AuditError(
                f"{self.truth}: cohorts.json has not all {server.round} rounds: it lacks {said}; restore it, or begin "
                "a new run"
            )
        self.cohorts = {key: value for key, value in read.items() if int(key) < server.round}
        self.before = self._weights()
        self._save(self.truth, server.round, self.before)

    def __call__(self, broadcasts: Mapping[int, Broadcast], messages: Mapping[int, Update | bytes]) -> None:
        """Record a round that was just closed, or without messages, one that is open and was only shown.

        `broadcasts` may hold clients that are not in `messages`: they saw the round, and no update of theirs was used.
        """
        lanes = list({id(broadcast): broadcast for broadcast in broadcasts.values()}.values())
        round = lanes[0].round
        sent = {f"broadcast/{number:06d}": _tensor(encode(broadcast)) for number, broadcast in enumerate(lanes)}
        updates = {str(client): message for client, message in messages.items()}
        for party, folder in self.folders.items():
            if party.isdigit():
                if int(party) in broadcasts:
                    own_lane = {"broadcast": _tensor(encode(broadcasts[int(party)]))}
                    answer = {f"update/{party}": _message(updates[party])} if party in updates else {}
                    self._save(folder, round, {**own_lane, **answer})
                continue
            if not updates:
                continue
            told: Mapping[str, Update | bytes] = self.server.sums() or updates
            if party == "server-sum" and told is updates:
                told = sums(list(updates.values()))
            received = {f"update/{who}": _message(update) for who, update in told.items()}
            own = {f"weights/{name}": tensor for name, tensor in self.before.items()}
            self._save(folder, round, {**sent, **received, **own})
        if not updates:  # the weights have not changed
            return
        self.cohorts[str(round)] = {who: _update(message).plan for who, message in updates.items()}
        write_atomic(self.truth / "cohorts.json", json.dumps(self.cohorts).encode(), mode=SECRET)
        self.before = self._weights()
        self._save(self.truth, round + 1, self.before)

    def _weights(self) -> dict[str, Tensor]:
        own = named_tensors(self.server.model)
        return {each.name: own[each.name].detach().cpu().clone() for each in self.server.plan.tensors}

    @staticmethod
    def _save(folder: Path, round: int, tensors: Mapping[str, Tensor]) -> None:
        write_atomic(_path(folder, round), safetensors.torch.save(dict(tensors)), mode=SECRET)


def sums(messages: Sequence[Update | bytes]) -> dict[str, Update]:
    """Return the average of the updates of each lane by examples, which is all that secure aggregation shows.

    >>> one = Update(0, "ab", {"bias": torch.ones(2)}, examples=1)
    >>> sums([one, Update(0, "ab", {"bias": torch.zeros(2)}, examples=3)])["sum"].tensors["bias"]
    tensor([0.2500, 0.2500])
    """
    lanes: dict[str, list[Update]] = {}
    for message in messages:
        update = _update(message)
        lanes.setdefault(update.plan, []).append(update)
    if len(lanes) == 1:
        return {SUM: _mean(next(iter(lanes.values())))}
    return {f"{SUM} {number}": _mean(updates) for number, updates in enumerate(lanes.values())}


def _mean(updates: Sequence[Update]) -> Update:
    first = updates[0]
    like = {name: tensor for update in updates for name, tensor in update.tensors.items()}
    statistics = {name for name in like if is_statistic(name)}
    mean = average([Weighted(update.tensors, update.examples) for update in updates], like, statistics).mean()
    return Update(first.round, first.plan, mean, sum(update.examples for update in updates))


def check_parties(parties: Sequence[str], clients: int) -> None:
    """Raise `AuditError` for parties that a run of this many clients does not have.

    >>> check_parties(["0", "server"], clients=2)
    """
    known = {"server", "server-sum", *map(str, range(clients))}
    unknown = [party for party in parties if party not in known]
    if unknown or not parties:
        raise AuditError(
            f"no such party: {', '.join(unknown) or 'none was named'}; transcripts can be of server, server-sum "
            f"and of clients 0 to {clients - 1}"
        )


def _check_kinds(setting: Setting) -> None:
    if not isinstance(setting.model, str) or not all(isinstance(size, int) for size in setting.shape):
        raise TypeError("its model or shape is of the wrong kind")
    if not setting.local or not all(isinstance(each, int) for each in (setting.clients, setting.cohort)):
        raise TypeError("its numbers of clients are of the wrong kind")


def _rounds(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in folder.glob("*.safetensors") if path.stem.isdecimal())


def _only_shown(path: Path) -> bool:
    """Return whether a round's file holds a broadcast without any update; a damaged file holds nothing."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            return not any(name.startswith("update/") for name in file.keys())  # noqa: SIM118
    except (OSError, safetensors.SafetensorError):
        return False


def _cohorts(truth: Path) -> dict[str, dict[str, str]]:
    """Return for each round the clients that took part, with the digest of the plan that each answered."""
    try:
        read: dict[str, dict[str, str]] = json.loads((truth / "cohorts.json").read_text())
        if not all(map(str.isdecimal, read)) or not all(map(_are_plans, read.values())):
            raise ValueError("it has another form, as earlier versions wrote it")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise AuditError(f"{truth}: cohorts.json cannot be read ({error})") from None
    return read


def _are_plans(plans: object) -> bool:
    """Return whether these are digests of plans by the number of a client."""
    if not isinstance(plans, dict) or not all(map(str.isdecimal, plans)):
        return False
    return all(isinstance(digest, str) for digest in plans.values())


def _path(folder: Path, round: int) -> Path:
    return folder / f"{round:06d}.safetensors"


def _tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def _bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _update(message: Update | bytes) -> Update:
    return decode_update(message) if isinstance(message, bytes) else message


def _message(update: Update | bytes) -> Tensor:
    return _tensor(update if isinstance(update, bytes) else encode(update))


def _under(held: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in held.items() if name.startswith(prefix)}
