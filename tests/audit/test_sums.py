"""Audits of runs with secure aggregation: the server receives sums, and no single update."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dbcl.protocol.secagg.quantizer import Quantizer
from dbcl.simulation import RunConfig, task_of
from dbcl.simulation.build import build_plan
from dbcl_audit.attacks.images import image_findings
from dbcl_audit.attacks.matching import Matching
from dbcl_audit.attacks.sources import sources
from dbcl_audit.audit import adversaries
from dbcl_audit.findings import Audit, Finding
from dbcl_audit.report.wording import advice, simulation_text, verdicts
from dbcl_audit.simulated_run import VICTIM, SimulatedRun, draw_batches, simulate_batches

CONFIG = RunConfig.from_options(model="dlg-lenet", veil=0.2, lr=0.1, seed=0, secure_aggregation=True, fraction=0.2)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> SimulatedRun:
    script = draw_batches(np.arange(100), (4, 6, 1), seed=3)
    return simulate_batches(CONFIG, task_of(CONFIG), script, tmp_path_factory.mktemp("simulated"))


def test_the_server_has_the_mean_of_the_victims_lane(played: SimulatedRun) -> None:
    saw = played.server_observation(1)
    assert saw.clients[0] == VICTIM
    assert len(saw.clients) == 3  # of 6 in two lanes
    updates = [saw.seen.updates[str(client)].tensors for client in saw.clients]
    step = Quantizer(CONFIG.secagg.clip, 3).step
    for name, mean in saw.tensors.items():
        clear = torch.stack([each[name] for each in updates]).mean(0)
        torch.testing.assert_close(mean, clear, rtol=0, atol=step)
        steps = 3 * mean.double() / step
        assert float((steps - steps.round()).abs().max()) < 1e-3  # rounded
    alone = replace(played, bound=None).server_observation(1)
    assert alone.clients == (VICTIM,)
    for name, tensor in alone.tensors.items():
        assert torch.equal(tensor, saw.seen.updates[str(VICTIM)].tensors[name])


def test_attacks_know_that_it_is_a_sum(played: SimulatedRun) -> None:
    (server, *_) = sources(played, {}, tested=[0, 1])
    (alone, *_) = sources(replace(played, bound=None), {}, tested=[0, 1])
    assert (server.name, alone.name) == ("the sum of 3 updates", "the update itself")
    assert [victim.crowd(name) for victim in server.victims for name in server.gradients[0]] == [3] * 2 * len(
        server.gradients[0]
    )
    lr = played.server.setting.local.lr
    saw = played.server_observation(0)
    for name, gradient in server.gradients[0].items():
        torch.testing.assert_close(gradient.flatten(), -3 * saw.tensors[name].flatten() / lr, rtol=1e-5, atol=1e-9)


def test_images_are_matched_as_many_as_are_in_the_sum(played: SimulatedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    from dbcl_audit.attacks import images

    counts = []
    recover = images.recover

    def watched(model, gradient, shape, labels, count, *more, **named):  # type: ignore[no-untyped-def]
        counts.append(count)
        return recover(model, gradient, shape, labels, count, *more, **named)

    monkeypatch.setattr(images, "recover", watched)
    images = task_of(CONFIG).pictures
    assert images is not None
    findings = image_findings(played, images, {}, [0], Matching(steps=1, restarts=1), tell=str)
    assert set(counts) == {3}
    assert {finding.adversary for finding in findings} == {"server"}
    assert {finding.target for finding in findings} == {"image"}  # whose label is whose, a sum does not say


def test_the_page_speaks_of_sums() -> None:
    settings = {"clients": 100, "fraction": 0.2, "veil": 0.2, "seed": None}
    found = Finding("matching", "server", "adaptive", "image", "psnr", 9.0, chance=13.0)
    pages = [
        " ".join(
            [*simulation_text(audit), *advice(audit), *(part for line in verdicts(audit) for part in map(str, line))]
        )
        for audit in (
            Audit("a", {**settings, "secure_aggregation": secure}, {}, (), (found,), 1.0, parties=16)
            for secure in (True, False)
        )
    ]
    assert "The server gets less from larger sums" in pages[0]
    assert "It has sums alone here" in pages[0]
    assert "The server is trusted" not in pages[0]
    assert "each client's update by itself" not in pages[0]
    assert "each client's update by itself" in pages[1]


def test_the_seats_say_so() -> None:
    plan = build_plan(CONFIG, task_of(CONFIG).make_model(0))
    told = {adversary: has for adversary, has, _ in adversaries(plan, CONFIG)}
    assert "the sum of the updates in each lane, of 8 clients or more" in told["server"]
    assert "each client's update" in {adversary: has for adversary, has, _ in adversaries(plan, RunConfig())}["server"]
