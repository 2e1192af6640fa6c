"""Error message for a diverged run, with the settings to reduce."""

from dbcl.errors import ConfigError, DivergedError
from dbcl.protocol.keeper import MOMENTUM
from dbcl.simulation.build import server_rate
from dbcl.simulation.config import RunConfig


def divergence(config: RunConfig, round: int, error: DivergedError) -> ConfigError:
    """Return an error that names the settings to reduce and quotes the server's reasons.

    Args:
        config: Settings of the run.
        round: Number of the failed round, starting at 1.
        error: Error of the server.

    >>> diverged = DivergedError("round 0 has 0 updates and needs 1\\n  - update 0: metric loss is nan")
    >>> print(divergence(RunConfig(lr=1000.0), 1, diverged))
    training diverged in round 1: losses or updates grew beyond all bounds; lower `lr` (now 1000)
    round 0 has 0 updates and needs 1
      - update 0: metric loss is nan
    """
    lower = [f"`lr` (now {config.lr:g})"]
    if config.momentum:
        lower.append(f"`momentum` (now {config.momentum:g})")
    if round > 1 and (config.server_lr is not None or config.server_optimizer == "adam"):
        lower.append(f"`server_lr` (now {server_rate(config):g})")
    if round > 1 and config.server_optimizer == "momentum" and config.server_momentum > MOMENTUM:
        lower.append(f"`server_momentum` (now {config.server_momentum:g})")
    if config.privacy is not None:
        lower.append(f"`clip` (now {config.privacy.clip:g}; the noise is in proportion)")
    elif config.sketch.veil > 1:
        lower.append(f"`veil` (now {config.sketch.veil:g})")
    unclipped = config.privacy is None and config.update_clip is None
    clip = ", or set `update_clip`, which bounds every client's update" if round > 1 and unclipped else ""
    return ConfigError(
        f"training diverged in round {round}: losses or updates grew beyond all bounds; "
        f"lower {' or '.join(lower)}{clip}\n{error}"
    )
