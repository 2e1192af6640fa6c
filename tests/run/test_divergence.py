from pathlib import Path

import pytest

from dbcl.errors import ConfigError, ProtocolError
from dbcl.protocol.admission import diverged
from dbcl.run import Run, RunConfig
from dbcl.run.divergence import divergence

REFUSED = "round 2 has 0 updates and needs 1"


@pytest.mark.parametrize("engine", ["stacked", "local"])
@pytest.mark.parametrize("lr", [1000.0, 10.0])
def test_a_run_that_diverges_says_so_and_what_to_lower(tmp_path: Path, engine: str, lr: float) -> None:
    run = Run.start(RunConfig(clients=10, rounds=4, lr=lr, seed=0, engine=engine), tmp_path / "run")
    with pytest.raises(ConfigError, match=rf"^training diverged in round 1: .*; lower --lr \(now {lr:g}\)\n") as caught:
        list(run.play())
    assert "client " in str(caught.value)


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        (["update 0: 1.weight holds NaN", "update 1: metric loss is inf"], True),
        (["update 0: 1.weight holds infinity", "update 1: its length 7.18e+19 is absurd (above 1e+18)"], True),
        (["update 0: update: 'metrics' cannot be \"{'loss': nan}\""], True),
        (["1.weight leaves the range of the weights' dtype"], True),
        (["update 0: metric loss is nan", "update 1: answers round 1, and round 2 is open"], False),
        (["node 7: did not answer in time; see round_timeout"], False),
        ([], False),
    ],
)
def test_only_numbers_without_bound_are_a_divergence(reasons: list[str], expected: bool) -> None:
    assert diverged(ProtocolError("\n  - ".join([REFUSED, *reasons]))) is expected


def test_everything_that_could_be_too_large_is_named() -> None:
    config = RunConfig(lr=1.0, momentum=0.9, server_lr=2.0, veil=3.0)
    text = str(divergence(config, 3, ProtocolError(REFUSED)))
    assert "lower --lr (now 1) or --momentum (now 0.9) or --server-lr (now 2) or --veil (now 3), or set --upd" in text
    assert text.endswith(REFUSED)


def test_with_a_guarantee_it_is_the_clip_that_is_too_large() -> None:
    text = str(divergence(RunConfig(epsilon=8, clip=3.0), 3, ProtocolError(REFUSED)))
    assert "lower --lr (now 0.05) or --clip (now 3; the noise is in proportion)\n" in text
    assert "--update-clip" not in text
