"""Noise-free baseline of a run, which shows the accuracy cost of a guarantee."""

from dataclasses import replace

from dbcl.engines import evaluate
from dbcl.errors import ConfigError
from dbcl.simulation.build import build_engine, build_run_server
from dbcl.simulation.run import Run

NO_NOISE = 1e6
"""Epsilon with a practically negligible amount of noise."""


def score_without_noise(run: Run) -> float:
    """Repeat a run's training with negligible noise and return the score.

    Learning rates, rounds and clipping are the same as in the run. Nothing is written to its
    folder.

    Args:
        run: A run whose privacy unit is one example.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from dbcl.simulation import preset
    >>> run = Run.start(preset("private-example", rounds=2, seed=0), Path(tempfile.mkdtemp()) / "run")
    >>> score_without_noise(run) > 0.5
    True
    """
    config = run.config
    if config.privacy is None or config.privacy.unit != "example":
        raise ConfigError("the training without noise is for runs that guarantee privacy for one example")
    privacy = replace(config.privacy, epsilon=NO_NOISE, noise_by="server", colluders=None, fewest=0)
    config = replace(config, privacy=privacy, secure_aggregation=False, transcripts=(), track=())
    server = build_run_server(config, run.task, seed=run.seed)
    engine = build_engine(config, run.task, server, seed=run.seed)
    for _ in range(run.server.round or config.rounds):
        engine.play_round()
    return evaluate(server.released, run.task.held_out.to(config.device)).score
