"""How many rounds the presets need on MNIST: the figures of the README, within the bounds that we promise."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dbcl.simulation import Run, preset


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rounds"), [("plain", 50), ("paper", 200), ("blind", 200)])
def test_97_percent_on_mnist(name: str, rounds: int, tmp_path: Path, real_data: Callable[[str], Path]) -> None:
    real_data("MNIST/raw")
    config = preset(name, data="mnist", model="mnist-mlp", target=0.97, rounds=rounds, seed=0)
    run = Run.start(config, tmp_path / "run")
    for _ in run.play():
        pass
    assert run.history[-1].score >= 0.97
