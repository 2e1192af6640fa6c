import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dbcl
from dbcl.errors import ConfigError, DivergedError, ProtocolError
from dbcl.optim import fedavg
from dbcl.protocol import Reason, Rejection, Update, ValidationResult, encode
from dbcl.simulation import Run, RunConfig
from dbcl.simulation.divergence import divergence

REFUSED = "round 2 has 0 updates and needs 1"


@pytest.mark.parametrize("engine", ["stacked", "local"])
@pytest.mark.parametrize("lr", [1000.0, 10.0])
def test_a_run_that_diverges_says_so_and_what_to_lower(tmp_path: Path, engine: str, lr: float) -> None:
    run = Run.start(RunConfig(clients=10, rounds=4, lr=lr, seed=0, engine=engine), tmp_path / "run")
    with pytest.raises(ConfigError, match=rf"^training diverged in round 1: .*; lower `lr` \(now {lr:g}\)\n") as caught:
        list(run.play())
    assert "client " in str(caught.value)


Change = Callable[[Update], Update | bytes]
"""Makes a bad update of a good one."""


def weights(value: float) -> Change:
    return lambda update: replace(update, tensors={name: V + value for name, V in update.tensors.items()})


def metric(value: float, *, encoded: bool = False) -> Change:
    def changed(update: Update) -> Update | bytes:
        changed = replace(update, metrics={"loss": value})
        return encode(changed) if encoded else changed

    return changed


def stale(update: Update) -> Update:
    return replace(update, round=update.round + 1)


def closed(changes: list[Change], **settings: Any) -> None:
    server = dbcl.Server(nn.Linear(6, 2), **settings)
    broadcast = server.open_round()
    zero = {name: torch.zeros_like(V) for name, V in broadcast.tensors.items()}
    update = Update(broadcast.round, broadcast.plan.digest, zero, examples=1)
    server.close_round([change(update) for change in changes])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([weights(math.nan), metric(math.inf)], True),
        ([weights(math.inf), weights(1e19)], True),
        ([metric(math.nan, encoded=True), metric(-math.inf, encoded=True)], True),
        ([metric(math.nan), stale], False),
        ([metric(math.nan, encoded=True), stale], False),
        ([], False),
    ],
)
def test_only_values_without_bound_are_a_divergence(changes: list[Change], expected: bool) -> None:
    with pytest.raises(ProtocolError, match="has 0 updates and needs 1") as caught:
        closed(changes)
    assert isinstance(caught.value, DivergedError) is expected


def test_a_step_out_of_the_range_of_the_weights_is_a_divergence() -> None:
    with pytest.raises(DivergedError, match="leaves the range of the weights' dtype"):
        closed([weights(1e17)], optimizer=fedavg(lr=1e30))


def test_a_client_without_an_answer_is_no_divergence() -> None:
    silent = Rejection(Reason.NO_ANSWER, "did not answer in time; see round_timeout")
    with pytest.raises(ProtocolError, match="did not answer in time") as caught:
        ValidationResult(2, {}, {"node 7": silent}).require(1)
    assert not isinstance(caught.value, DivergedError)


def test_everything_that_could_be_too_large_is_named() -> None:
    config = RunConfig.from_options(lr=1.0, momentum=0.9, server_lr=2.0, veil=3.0)
    text = str(divergence(config, 3, DivergedError(REFUSED)))
    assert "lower `lr` (now 1) or `momentum` (now 0.9) or `server_lr` (now 2) or `veil` (now 3), or set `upd" in text
    assert text.endswith(REFUSED)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, ""),
        ({"server_momentum": 0.9}, " or `server_momentum` (now 0.9)"),
        ({"server_optimizer": "adam"}, " or `server_lr` (now 0.01)"),
        ({"server_optimizer": "fedavg", "server_momentum": 0.9}, ""),
    ],
)
def test_the_default_of_the_server_is_not_too_large(settings: dict[str, Any], named: str) -> None:
    text = str(divergence(RunConfig.from_options(**settings), 3, DivergedError(REFUSED)))
    assert f"lower `lr` (now 0.05){named}, or set `update_clip`" in text


def test_with_a_guarantee_it_is_the_clip_that_is_too_large() -> None:
    text = str(divergence(RunConfig.from_options(epsilon=8, clip=3.0), 3, DivergedError(REFUSED)))
    assert "lower `lr` (now 0.05) or `clip` (now 3; the noise is in proportion)\n" in text
    assert "`update_clip`" not in text
