"""A transcript holds what crossed the wire to and from one party, byte for byte, and nothing that it could not see."""

import copy
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import dbcl
from dbcl import cli
from dbcl.data import examples_of
from dbcl.engines import Engine, LocalEngine, LocalTraining, StackedEngine, cohort_size
from dbcl.errors import AuditError, ConfigError
from dbcl.optim import momentum
from dbcl.protocol import Broadcast, Update
from dbcl.simulation.presets import preset
from dbcl.testing.nested import nested
from dbcl.testing.secrecy import leaks
from dbcl.transcripts import Recorder, Setting, Transcript, Truth, sums
from dbcl_audit.attacks.updates import ESTIMATORS, estimates, update_findings
from dbcl_audit.estimators.observations import tensor_observations
from dbcl_audit.scoring import score

SEED = bytes(range(32))
CLIENTS = 4
TRAINING = LocalTraining(lr=0.1, batch_size=4)
EVERYBODY = ("0", "1", "2", "3", "server", "server-sum")
COVERED = "0.weight"


class Recording:
    """A small run that is recorded, with a second pair of eyes.

    `crossed` has for every round what each client was sent and what it answered, by client.
    """

    def __init__(
        self,
        folder: Path,
        kind: type[Engine] = LocalEngine,
        *,
        fraction: float = 1.0,
        parties: Sequence[str] = EVERYBODY,
        dtype: torch.dtype = torch.float64,
        **settings: Any,
    ) -> None:
        self.folder, self.parties = folder, parties
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)).to(dtype)
            self.examples = examples_of((torch.randn(40, 12, dtype=dtype), torch.arange(40) % 3))
        validator = dbcl.protocol.UpdateValidator(
            max_influence=None
        )  # what an attacker works out is exact where nobody is held back
        self.server = dbcl.Server(
            net, insecure_seed=0, validator=validator, **nested({"coverage": "hidden", **settings})
        )
        shards = [np.arange(0, 12), np.arange(12, 20), np.arange(20, 32), np.arange(32, 40)]
        self.engine = kind(
            self.server, copy.deepcopy(net), self.examples.divide(shards), TRAINING, fraction=fraction, seed=SEED
        )
        cohort = cohort_size(CLIENTS, fraction)
        self.setting = Setting(
            "net", (1, 1, 12), 3, TRAINING.settings(), CLIENTS, cohort, veil=settings.get("veil", 0.2)
        )
        self.crossed: dict[int, tuple[dict[int, bytes], dict[int, bytes]]] = {}
        self.before: list[dict[str, Tensor]] = []
        self.record()

    def record(self) -> None:
        recorder = Recorder(self.folder, self.parties, self.server, self.setting)

        def watch(sent: Mapping[int, Broadcast], answers: Mapping[int, Update | bytes]) -> None:
            round = next(iter(sent.values())).round
            self.crossed[round] = (
                {client: dbcl.encode(broadcast) for client, broadcast in sent.items()},
                {client: each if isinstance(each, bytes) else dbcl.encode(each) for client, each in answers.items()},
            )
            recorder(sent, answers)

        self.engine.observer = watch

    def play(self, rounds: int) -> "Recording":
        for _ in range(rounds):
            weights = self.server.model.state_dict()
            self.before.append({name: tensor.detach().clone() for name, tensor in weights.items()})
            self.engine.play_round()
        return self

    def of(self, party: str) -> Transcript:
        return Transcript(self.folder / party)


def raw(transcript: Transcript, round: int) -> dict[str, Any]:
    """A round's file as it is: messages as bytes, weights as tensors."""
    held = safetensors.torch.load_file(transcript.folder / f"{round:06d}.safetensors")
    return {name: t if name.startswith("weights/") else t.numpy().tobytes() for name, t in held.items()}


ENGINES = pytest.mark.parametrize("kind", [LocalEngine, StackedEngine])
LANES = pytest.mark.parametrize("lanes", [1, 2])


@ENGINES
@pytest.mark.parametrize("veil", [0.0, 0.2])
def test_a_client_has_the_broadcasts_and_its_own_updates_byte_for_byte(
    tmp_path: Path, kind: type[Engine], veil: float
) -> None:
    run = Recording(tmp_path, kind, veil=veil, dtype=torch.float32).play(3)
    for client in range(CLIENTS):
        transcript = run.of(f"client-{client}")
        assert transcript.client == str(client)
        assert transcript.rounds == [0, 1, 2]
        assert len(transcript) == 3
        assert transcript.setting == run.setting
        for round, (sent, answers) in run.crossed.items():
            assert raw(transcript, round) == {"broadcast": sent[client], f"update/{client}": answers[client]}
            seen = transcript[round]
            assert [dbcl.encode(broadcast) for broadcast in seen.broadcasts] == [sent[client]]
            assert seen.answered(str(client)) is seen.broadcast
            assert {who: dbcl.encode(each) for who, each in seen.updates.items()} == {str(client): answers[client]}
            assert seen.weights is None
            assert seen.round == round
        assert [seen.round for seen in transcript] == [0, 1, 2]


@ENGINES
@LANES
def test_the_server_has_everybodys_update_and_its_own_weights(tmp_path: Path, kind: type[Engine], lanes: int) -> None:
    run = Recording(tmp_path, kind, lanes=lanes).play(2)
    transcript = run.of("server")
    assert transcript.client is None
    for round, (sent, answers) in run.crossed.items():
        seen = transcript[round]
        read = [dbcl.encode(broadcast) for broadcast in seen.broadcasts]
        assert len(read) == lanes
        assert set(read) == set(sent.values())
        assert {int(who): dbcl.encode(seen.answered(who)) for who in seen.updates} == sent
        assert {who: dbcl.encode(each) for who, each in seen.updates.items()} == {
            str(client): answer for client, answer in answers.items()
        }
        assert seen.weights is not None
        assert seen.weights.keys() == run.before[round].keys()
        assert all(torch.equal(tensor, run.before[round][name]) for name, tensor in seen.weights.items())


@ENGINES
@LANES
def test_under_secure_aggregation_the_server_has_only_the_average_of_each_lane(
    tmp_path: Path, kind: type[Engine], lanes: int
) -> None:
    run = Recording(tmp_path, kind, lanes=lanes).play(3)
    unequal = 0
    for round, (_, answers) in run.crossed.items():
        seen = run.of("server-sum")[round]
        assert sorted(seen.updates) == (["sum"] if lanes == 1 else ["sum 0", "sum 1"])
        assert len(seen.broadcasts) == lanes
        decoded = [dbcl.protocol.decode_update(answer) for answer in answers.values()]
        assert {total.plan for total in seen.updates.values()} == {each.plan for each in decoded}
        for who, total in seen.updates.items():
            assert seen.answered(who).plan.digest == total.plan
            own = [each for each in decoded if each.plan == total.plan]
            assert len(own) == CLIENTS / lanes
            examples = torch.tensor([float(each.examples) for each in own], dtype=torch.float64)
            unequal += len(set(examples.tolist())) > 1
            assert total.examples == examples.sum()
            assert total.round == round
            for name, tensor in total.tensors.items():
                every = torch.stack([each.tensors[name] for each in own])
                torch.testing.assert_close(tensor, torch.tensordot(examples / examples.sum(), every, dims=1))
        parts = {bytes(tensor.numpy().tobytes()) for each in decoded for tensor in each.tensors.values()}
        whole = (run.folder / "server-sum" / f"{round:06d}.safetensors").read_bytes()
        assert not any(part in whole for part in parts)
    assert unequal > 0


def test_a_client_that_is_not_chosen_sees_nothing_of_the_round(tmp_path: Path) -> None:
    run = Recording(tmp_path, fraction=0.5).play(14)
    chosen = {round: sorted(answers) for round, (_, answers) in run.crossed.items()}
    assert all(len(clients) == 2 for clients in chosen.values())
    truth = Truth(tmp_path)
    assert {round: truth.cohort(round) for round in range(14)} == chosen
    for client in range(CLIENTS):
        transcript = run.of(f"client-{client}")
        assert transcript.rounds == [round for round, clients in chosen.items() if client in clients]
        assert 0 < len(transcript) < 14
        missed = next(round for round in range(14) if round not in transcript.rounds)
        with pytest.raises(AuditError, match=f"round {missed} cannot be read"):
            transcript[missed]
        view = tensor_observations(transcript)[COVERED]
        assert view.rounds == tuple(transcript.rounds)
        assert [a + gap for a, gap in zip(view.rounds, view.gaps, strict=True)][:-1] == list(view.rounds[1:])
    assert run.of("server").rounds == list(range(14))
    assert all(sorted(seen.updates) == [str(c) for c in chosen[seen.round]] for seen in run.of("server"))


def test_both_engines_record_the_same(tmp_path: Path) -> None:
    one, two = (
        Recording(tmp_path / kind.__name__, kind, fraction=0.5).play(5) for kind in (LocalEngine, StackedEngine)
    )
    for party in ("client-0", "client-1", "client-2", "client-3", "server", "server-sum"):
        first, second = one.of(party), two.of(party)
        assert first.rounds == second.rounds
        for a, b in zip(first, second, strict=True):
            assert [sent.plan for sent in a.broadcasts] == [sent.plan for sent in b.broadcasts]
            assert a.updates.keys() == b.updates.keys()
            pairs = [(x.tensors, y.tensors) for x, y in zip(a.broadcasts, b.broadcasts, strict=True)]
            pairs += [(a.weights or {}, b.weights or {})]
            pairs += [(a.updates[who].tensors, b.updates[who].tensors) for who in a.updates]
            for mine, other in pairs:
                torch.testing.assert_close(dict(mine), dict(other), rtol=0, atol=1e-10)
            assert [u.examples for u in a.updates.values()] == [u.examples for u in b.updates.values()]


def test_the_truth_is_what_happened(tmp_path: Path) -> None:
    run = Recording(tmp_path).play(4)
    truth = Truth(tmp_path)
    for round in range(4):
        assert all(torch.equal(tensor, run.before[round][name]) for name, tensor in truth.weights(round).items())
    now = run.server.model.state_dict()
    assert all(torch.equal(tensor, now[name]) for name, tensor in truth.weights(4).items())
    assert torch.equal(truth.change(1, 3)[COVERED], run.before[3][COVERED] - run.before[1][COVERED])


@pytest.mark.parametrize("veil", [0.0, 0.2])
@LANES
def test_estimates_meet_the_truth_as_scored(tmp_path: Path, veil: float, lanes: int) -> None:
    """Equal shares, so that a client's part is one in all chosen; with momentum, what the round put in counts."""
    run = Recording(tmp_path, veil=veil, optimizer=momentum(0.5), lanes=lanes)
    run.engine.clients = run.examples.divide(np.array_split(np.arange(40), CLIENTS))
    run.setting = Setting(**{**asdict(run.setting), "momentum": 0.5})
    run.record()
    run.play(4)
    view = tensor_observations(run.of("client-1"))[COVERED]
    sent, answers = run.crossed[2]
    sketches = {who: dbcl.protocol.decode_broadcast(broadcast).sketches()[COVERED] for who, broadcast in sent.items()}
    assert len({sketch.fingerprint() for sketch in sketches.values()}) == lanes
    lifted = {
        who: sketches[who].lift(dbcl.protocol.decode_update(each).tensors[COVERED]) for who, each in answers.items()
    }
    others = torch.stack([change for who, change in lifted.items() if who != 1]).sum(dim=0)
    real = [torch.zeros(8, 12, dtype=torch.float64)] * 2 + [others / CLIENTS]
    scores = score(Truth(tmp_path), view, real)
    assert scores.cosines[2] == pytest.approx(1.0, abs=1e-9)
    assert scores.errors[2] == pytest.approx(0.0, abs=1e-6)
    assert scores.errors[0] == pytest.approx(1.0)
    assert (scores.rounds, scores.lags) == ((0, 1, 2), (3, 2, 1))


# --- going on with a recording --------------------------------------------------------------------------------------


def test_a_resumed_recording_drops_later_rounds_and_goes_on(tmp_path: Path) -> None:
    whole = Recording(tmp_path / "whole", fraction=0.75).play(7)
    run = Recording(tmp_path / "parts", fraction=0.75).play(3)
    saved = copy.deepcopy(run.engine.server.state())
    run.play(2)  # recorded, and then lost with the process
    crossed = run.crossed
    again = Recording(tmp_path / "other", fraction=0.75)
    again.engine.server.load_state(saved)
    again.folder = tmp_path / "parts"
    again.record()
    truth = Truth(again.folder)
    assert again.of("server").rounds == [0, 1, 2]
    for client in range(CLIENTS):
        assert again.of(f"client-{client}").rounds == [r for r in range(3) if client in crossed[r][1]]
    assert len(truth.weights(3)) == 4
    with pytest.raises(AuditError, match="round 4 cannot be read"):
        truth.weights(4)
    again.play(4)
    for party in ("client-0", "client-1", "client-2", "client-3", "server", "server-sum", "truth"):
        left, right = (
            {path.name: path.read_bytes() for path in (folder / party).iterdir()}
            for folder in (whole.folder, again.folder)
        )
        assert left.keys() == right.keys()
        assert [name for name in left if left[name] != right[name]] == []


# --- rounds that a client only saw ----------------------------------------------------------------------------------


@LANES
def test_a_client_that_was_sent_a_round_has_it_though_its_update_did_not_count(tmp_path: Path, lanes: int) -> None:
    run = Recording(tmp_path, lanes=lanes)
    recorder = Recorder(tmp_path, EVERYBODY, run.server, run.setting)

    def watch(sent: Mapping[int, Broadcast], answers: Mapping[int, Update | bytes]) -> None:
        kept = {client: each for client, each in answers.items() if client != 2}  # lost on the way, or refused
        recorder({client: broadcast for client, broadcast in sent.items() if client != 3}, kept)
        crossed.append((dbcl.encode(sent[2]), dict(answers)))

    crossed: list[tuple[bytes, dict[int, Update | bytes]]] = []
    run.engine.observer = watch
    run.play(2)
    transcript = run.of("client-2")
    for round, (sent, _) in enumerate(crossed):
        assert raw(transcript, round) == {"broadcast": sent}
        seen = transcript[round]
        assert (seen.round, dict(seen.updates), seen.weights) == (round, {}, None)
        assert dbcl.encode(seen.broadcast) == sent
    assert sorted(run.of("server")[0].updates) == ["0", "1", "3"]
    assert len(run.of("server")[0].broadcasts) == lanes
    assert Truth(tmp_path).cohort(1) == [0, 1, 3]
    with pytest.raises(AuditError, match="client-3 holds no rounds"):  # to which nothing was sent
        run.of("client-3")


def test_a_round_that_is_not_played_is_in_the_transcripts_of_those_who_were_shown_it(tmp_path: Path) -> None:
    run = Recording(tmp_path).play(2)
    before = {path.name: path.read_bytes() for path in (tmp_path / "truth").iterdir()}
    shown = run.server.open_round("client 1")
    Recorder(tmp_path, EVERYBODY, run.server, run.setting)({1: shown}, {})
    assert run.of("client-1").rounds == [0, 1, 2]
    assert raw(run.of("client-1"), 2) == {"broadcast": dbcl.encode(shown)}
    assert [run.of(party).rounds for party in ("client-0", "server", "server-sum")] == [[0, 1]] * 3
    assert {path.name: path.read_bytes() for path in (tmp_path / "truth").iterdir()} == before

    run.record()  # the run goes on after a crash: what was shown is sent again, byte for byte
    assert run.of("client-1").rounds == [0, 1, 2]
    assert run.of("client-0").rounds == [0, 1]
    run.play(1)
    assert list(run.of("client-1")[2].updates) == ["1"]
    assert run.of("server").rounds == [0, 1, 2]


def test_another_run_in_the_same_folder_inherits_nothing_that_was_shown(tmp_path: Path) -> None:
    run = Recording(tmp_path)
    Recorder(tmp_path, EVERYBODY, run.server, run.setting)({1: run.server.open_round("client 1")}, {})
    assert run.of("client-1").rounds == [0]
    Recording(tmp_path)
    with pytest.raises(AuditError, match="client-1 holds no rounds"):
        run.of("client-1")


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parties", "named"), [(["4"], "4"), (["0", "peer", "-1"], "peer, -1"), ([""], ""), ([], "none was named")]
)
def test_unknown_parties_are_refused_before_anything_is_written(tmp_path: Path, parties: list[str], named: str) -> None:
    with pytest.raises(AuditError, match=f"no such party: {named}.*server, server-sum and of clients 0 to 3"):
        Recording(tmp_path / "new", parties=parties)
    assert not (tmp_path / "new").exists()


def test_a_folder_without_a_transcript_says_so(tmp_path: Path) -> None:
    with pytest.raises(AuditError, match=r"holds no transcript: it has no setting\.json"):
        Transcript(tmp_path)
    Recording(tmp_path)
    with pytest.raises(AuditError, match="client-0 holds no rounds"):
        Transcript(tmp_path / "client-0")


@pytest.mark.parametrize("damage", ["cut", "empty", "noise", "gone"])
def test_a_damaged_round_says_which(tmp_path: Path, damage: str) -> None:
    run = Recording(tmp_path, parties=["0"]).play(3)
    for party, read in (("client-0", run.of("client-0").__getitem__), ("truth", Truth(tmp_path).weights)):
        path = tmp_path / party / "000001.safetensors"
        data = path.read_bytes()
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes({"cut": data[: len(data) // 2], "empty": b"", "noise": bytes(range(256)) * 8}[damage])
        with pytest.raises(AuditError, match=f"{party}: round 1 cannot be read"):
            read(1)
        read(0)
        read(2)


COHORTS = {"0": {"0": "ab", "1": "cd"}, "1": {"0": "ab"}}


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({}, "cohorts.json has no round 1"),
        ({"0": {"0": "ab"}}, "cohorts.json has no round 1"),
        (COHORTS, "in cohorts.json client 3 takes no part in round 1"),
        *((other, "cohorts.json cannot be read") for other in (None, 7, "x", [], [1], {"x": {}}, {"1": [0, 1]})),
        *(
            (other, "cohorts.json cannot be read")
            for other in ({"1": {"a": "ab"}}, {"1": {"3": 7}}, {"1": {"3": None}})
        ),
    ],
)
def test_cohorts_that_are_damaged_are_an_audit_error(tmp_path: Path, written: Any, message: str) -> None:
    (tmp_path / "truth").mkdir()
    (tmp_path / "truth" / "cohorts.json").write_text(json.dumps(written))
    with pytest.raises(AuditError, match=message):
        Truth(tmp_path).lane_of(1, 3)
    if written is not COHORTS:
        with pytest.raises(AuditError, match=message):
            Truth(tmp_path).cohort(1)


@pytest.mark.parametrize(
    ("kept", "lacking"), [((), "0, 1, 2"), (("0", "2"), "1"), (("0", "1"), "2"), (("0", "1", "2", "3"), None)]
)
def test_a_recorder_goes_on_only_where_all_rounds_were_noted(
    tmp_path: Path, kept: tuple[str, ...], lacking: str | None
) -> None:
    run = Recording(tmp_path).play(3)
    path = tmp_path / "truth" / "cohorts.json"
    noted = json.loads(path.read_text())
    path.write_text(json.dumps({round: noted.get(round, {}) for round in kept}))
    if lacking is None:  # a round that a crash has noted is played again
        run.record()
        return
    with pytest.raises(AuditError, match=f"cohorts.json has not all 3 rounds: it lacks {lacking};"):
        run.record()


def test_only_a_client_that_saw_three_rounds_estimates(tmp_path: Path) -> None:
    run = Recording(tmp_path).play(2)
    with pytest.raises(AuditError, match="server: updates are estimated by a client"):
        tensor_observations(run.of("server"))
    with pytest.raises(AuditError, match="client-0 saw 2 rounds; estimating takes 3 or more"):
        tensor_observations(run.of("client-0"))
    run.play(1)
    assert set(tensor_observations(run.of("client-0"))) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert list(tensor_observations(run.of("client-0"), [COVERED])) == [COVERED]


# --- secrecy --------------------------------------------------------------------------------------------------------


def secrets(folder: Path, rounds: int) -> dict[str, Tensor]:
    """W before every round, and how it changed in each."""
    truth = Truth(folder)
    found = {f"W before round {t}": truth.weights(t)[COVERED] for t in range(rounds + 1)}
    return found | {f"change in round {t}": truth.change(t, t + 1)[COVERED] for t in range(rounds)}


@pytest.mark.parametrize("veil", [0.0, 0.2])
def test_a_clients_transcript_holds_no_covered_weight(tmp_path: Path, veil: float) -> None:
    run = Recording(tmp_path, StackedEngine, veil=veil).play(4)
    hidden = secrets(tmp_path, 4)
    for client in range(CLIENTS):
        transcript = run.of(f"client-{client}")
        kept = [transcript, list(transcript), tensor_observations(transcript)]
        assert leaks(kept, hidden) == []
        files = [path.read_bytes() for path in transcript.folder.rglob("*") if path.is_file()]
        assert len(files) == 5
        assert leaks(files, hidden) == []
    assert len(leaks(list(run.of("server")), hidden)) >= 4  # the walk finds them where they are
    assert leaks([path.read_bytes() for path in (tmp_path / "truth").iterdir()], hidden) != []


NAMES = list(ESTIMATORS)


@pytest.mark.parametrize("veil", [0.0, 0.2])
def test_estimators_need_a_clients_own_folder_and_nothing_else(tmp_path: Path, veil: float) -> None:
    run = Recording(tmp_path / "run", StackedEngine, veil=veil).play(6)
    found = estimates(run.of("client-0"), NAMES)
    scored = update_findings(run.of("client-0"), Truth(run.folder), found, lambda text: None)
    assert {finding.attack for finding in scored} >= set(NAMES)
    shutil.copytree(run.folder / "client-0", tmp_path / "alone" / "client-0")
    shutil.rmtree(run.folder)
    alone = Transcript(tmp_path / "alone" / "client-0")
    again = estimates(alone, NAMES)
    for name in NAMES:
        for tensor, changes in found[name].items():
            assert len(changes) == 5
            assert all(torch.equal(a, b) for a, b in zip(changes, again[name][tensor], strict=True))
    with pytest.raises(AuditError, match="truth: round 0 cannot be read"):
        update_findings(alone, Truth(tmp_path / "alone"), again, lambda text: None)


def test_a_sum_is_weighted_by_examples_and_reads_bytes() -> None:
    one = Update(0, "ab", {"w": torch.ones(2)}, examples=1)
    two = Update(0, "ab", {"w": torch.full((2,), 5.0)}, examples=3)
    made = sums([dbcl.encode(one), two])
    assert list(made) == ["sum"]
    assert made["sum"].tensors["w"].tolist() == [4.0, 4.0]


def test_the_sums_of_lanes_are_apart_and_know_their_plans() -> None:
    lanes = {plan: [Update(0, plan, {"w": torch.full((2,), v)}, examples=1) for v in (1.0, 3.0)] for plan in "ab"}
    made = sums([lanes["b"][0], lanes["a"][0], lanes["b"][1], lanes["a"][1]])
    assert sorted(made) == ["sum 0", "sum 1"]
    assert {each.plan: each.tensors["w"].tolist() for each in made.values()} == {"a": [2.0, 2.0], "b": [2.0, 2.0]}
    assert [each.examples for each in made.values()] == [2, 2]


# --- the command ----------------------------------------------------------------------------------------------------


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "160"})
    if result.exception:
        raise result.exception
    return result.output


def test_train_records_and_resume_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small_net_to_record.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, 10))\n"
    )
    fresh = [
        "train",
        "--preset",
        "blind",
        "--preset",
        "blind",
        "--clients",
        "20",
        "--fraction",
        "0.5",
        "--model",
        "small_net_to_record:make",
        "--seed",
        "1",
    ]
    invoke(*fresh, "--rounds", "6", "--transcripts", "0,server", "--out", "whole")
    invoke(*fresh, "--rounds", "4", "--transcripts", "0,server", "--out", "parts")
    folder = Path("parts/transcripts")
    assert {path.name for path in folder.iterdir()} == {"client-0", "server", "truth"}
    assert Transcript(folder / "server").rounds == [0, 1, 2, 3]
    invoke("train", "--resume", "parts", "--rounds", "6", "--allow-code")
    transcript = Transcript(folder / "client-0")
    assert transcript.setting.clients == 20
    assert transcript.setting.cohort == 10
    assert (transcript.setting.momentum, transcript.setting.veil) == (preset("blind").server_momentum, 0.2)
    taking_part = json.loads((folder / "truth" / "cohorts.json").read_text())
    assert transcript.rounds == [int(round) for round, plans in taking_part.items() if "0" in plans]
    for path in Path("whole/transcripts").rglob("*.*"):
        assert path.read_bytes() == (folder / path.relative_to("whole/transcripts")).read_bytes()
    with pytest.raises(ConfigError, match="may change, not transcripts"):
        invoke("train", "--resume", "parts", "--transcripts", "1")
    with pytest.raises(AuditError, match=r"no such party: 20; transcripts can be of .* clients 0 to 19"):
        invoke(*fresh, "--rounds", "1", "--transcripts", "20", "--out", "wrong")
