"""How many rounds the presets need on MNIST: the figures of the README, within the bounds that we promise."""

import os
from pathlib import Path

import pytest

from dbcl.run import Run
from dbcl.run.config import preset


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rounds"), [("plain", 50), ("paper", 200), ("blind", 200)])
def test_97_percent_on_mnist(name: str, rounds: int, tmp_path: Path) -> None:
    if not (Path(os.environ.get("DBCL_DATA", "/nowhere")) / "MNIST" / "raw").exists():
        pytest.skip("DBCL_DATA has no MNIST/raw")
    config = preset(name, data="mnist", model="mnist-mlp", target=0.97, rounds=rounds, fixed_secrets=True)
    run = Run.start(config, tmp_path / "run")
    for _ in run.play():
        pass
    assert run.history[-1].accuracy >= 0.97
