"""What a round that the door refused says about the training: did it diverge, and what is there to lower?"""

from dbcl.errors import ConfigError, ProtocolError
from dbcl.run.config import RunConfig


def divergence(config: RunConfig, round: int, error: ProtocolError) -> ConfigError:
    """The error that says so, with what to lower and the door's own reasons.

    >>> refused = ProtocolError("round 0 has 0 updates and needs 1\\n  - update 0: metric loss is nan")
    >>> print(divergence(RunConfig(lr=1000.0), 1, refused))
    training diverged in round 1: losses or updates grew beyond all bounds; lower --lr (now 1000)
    round 0 has 0 updates and needs 1
      - update 0: metric loss is nan
    """
    lower = [f"--lr (now {config.lr:g})"]
    if config.momentum:
        lower.append(f"--momentum (now {config.momentum:g})")
    if round > 1 and (config.server_lr is not None or config.server_optimizer != "fedavg"):
        lower.append(f"--server-lr (now {config.server_rate:g})")
    if config.clip is not None:
        lower.append(f"--clip (now {config.clip:g}; the noise is in proportion)")
    elif config.veil > 1:
        lower.append(f"--veil (now {config.veil:g})")
    unclipped = config.clip is None and config.update_clip is None
    clip = ", or set --update-clip, which bounds every client's update" if round > 1 and unclipped else ""
    return ConfigError(
        f"training diverged in round {round}: losses or updates grew beyond all bounds; "
        f"lower {' or '.join(lower)}{clip}\n{error}"
    )
