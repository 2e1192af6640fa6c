"""Transcripts: the complete view of one party in a run, which is the only input of an attack.

A transcript is a folder with `setting.json`, the public setting, and one safetensors file for each
round whose broadcast the party received. This includes rounds in which its update was lost or
rejected, and rounds in which it only evaluated. Messages are stored byte for byte as sent. The
ground truth is stored in a separate folder `truth`. Only scoring reads this folder; attacks never
do.

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
    """Public setting that every party knows before the first round: network, local training, cohort
    size.

    `momentum` and `server_lr` belong to the server's optimiser. `veil` is the standard deviation of
    the server's noise relative to the weights. None of these values is secret in a deployment,
    because they are part of the agreed configuration.

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
        """Local training settings that are plain values. An optimiser or a schedule is represented
        only by its name.
        """
        numbers = {name: value for name, value in self.training.items() if name not in ("optimizer", "schedule")}
        return LocalTraining(**numbers)  # type: ignore[arg-type]

    def template(self) -> nn.Module:
        """Make a network of the run's architecture with fresh initial weights."""
        if ":" in self.model or len(self.shape) != 3:  # a transcript never imports code by itself
            raise AuditError(f"the network {self.model!r} is code of its own: give Transcript a template that makes it")
        channels, height, width = self.shape
        return networks.build(self.model, shape=(channels, height, width), outputs=self.outputs, seed=1)


@dataclass(frozen=True, eq=False)
class RoundRecord:
    """One round as observed by one party.

    `updates` are keyed by sender. A client's transcript holds its own update under its number. The
    server's transcript holds each client's update, or the sum under "sum"; with several lanes, "sum
    0", "sum 1" and so on. `broadcasts` holds one broadcast for a client and the broadcasts of all
    lanes for the server. `weights` is W before the round, which only the server knows. A client
    whose update was not used has a broadcast and no updates.
    """

    broadcasts: tuple[Broadcast, ...]
    updates: Mapping[str, Update]
    weights: Mapping[str, Tensor] | None

    @property
    def broadcast(self) -> Broadcast:
        """Broadcast of the round. For the server, which knows the broadcasts of all lanes, the
        first lane's broadcast.
        """
        return self.broadcasts[0]

    def answered(self, sender: str) -> Broadcast:
        """Return the broadcast to which a sender's update responds."""
        plan = self.updates[sender].plan
        return next(broadcast for broadcast in self.broadcasts if broadcast.plan.digest == plan)

    @property
    def round(self) -> int:
        return self.broadcast.round


class Transcript:
    """Rounds that one party observed, read from a folder on demand.

    Args:
        folder: Folder of the party, such as `run/transcripts/client-0`.
        template: Function that makes the network; required if the setting names no built-in
            network.

    Raises:
        AuditError: The folder holds no transcript, or a damaged transcript.
        NotAttackableError: The party received no broadcast.

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
        """Make a network of the run's architecture with fresh initial weights.

        The network comes from the argument `template`, or from the name in the setting.
        """
        return self.setting.template() if self._template is None else self._template()

    @property
    def client(self) -> str | None:
        """Number of the observing client; None for the server."""
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
    """Ground truth for scoring attacks. `weights(t)` is W before round t."""

    def __init__(self, transcripts: Path) -> None:
        self.folder = transcripts / "truth"

    def weights(self, round: int) -> dict[str, Tensor]:
        try:
            return safetensors.torch.load_file(_path(self.folder, round))
        except (OSError, safetensors.SafetensorError) as error:
            raise AuditError(f"{self.folder}: round {round} cannot be read ({error})") from None

    def change(self, start: int, end: int) -> dict[str, Tensor]:
        """Return the change of W between the beginnings of rounds `start` and `end`."""
        before, after = self.weights(start), self.weights(end)
        return {name: after[name] - before[name] for name in before}

    def cohort(self, round: int) -> list[int]:
        """Return the clients whose updates were used in a round. Clients that only received the
        broadcast are excluded.
        """
        return list(map(int, self._plans(round)))

    def lane_of(self, round: int, client: int) -> tuple[str, list[int]]:
        """Return the digest of a client's plan in a round, and all clients with the same plan."""
        plans = self._plans(round)
        own = plans.get(str(client))
        if own is None:
            raise AuditError(f"{self.folder}: in cohorts.json client {client} takes no part in round {round}")
        return own, [int(each) for each, plan in plans.items() if plan == own]

    def _plans(self, round: int) -> dict[str, str]:
        """Return the participating clients of a round, each with the digest of its plan."""
        plans = _cohorts(self.folder).get(str(round))
        if plans is None:
            raise AuditError(f"{self.folder}: cohorts.json has no round {round}")
        return plans


class Recorder:
    """Writer of a run's transcripts, one file per round. Assign it to an engine's `observer`.

    A client's transcript contains every round whose broadcast the client received.

    Args:
        folder: Folder of all transcripts.
        parties: Client numbers, "server" or "server-sum". "server" records the server's view: each
            client's update, or under secure aggregation the sum of each group. "server-sum" records
            only sums in either case.
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
        """Record a closed round, or without messages, an open round with its broadcasts only.

        `broadcasts` may contain clients without a message: they received the broadcast, but their
        update was not used.
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
    """Return the example-weighted average of the updates of each lane, which is the server's view
    under secure aggregation.

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
    """Raise `AuditError` for a party that a run with this many clients does not have.

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
    """Return whether a round's file contains a broadcast and no update. A damaged file counts as
    empty.
    """
    try:
        with safetensors.safe_open(path, "pt") as file:
            return not any(name.startswith("update/") for name in file.keys())  # noqa: SIM118
    except (OSError, safetensors.SafetensorError):
        return False


def _cohorts(truth: Path) -> dict[str, dict[str, str]]:
    """Return the participating clients of each round, each with the digest of its plan."""
    try:
        read: dict[str, dict[str, str]] = json.loads((truth / "cohorts.json").read_text())
        if not all(map(str.isdecimal, read)) or not all(map(_are_plans, read.values())):
            raise ValueError("it has another form, as earlier versions wrote it")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise AuditError(f"{truth}: cohorts.json cannot be read ({error})") from None
    return read


def _are_plans(plans: object) -> bool:
    """Return whether a value maps client numbers to plan digests."""
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
