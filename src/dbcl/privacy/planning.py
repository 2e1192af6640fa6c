"""Parameters of a BLT, found ahead of a run by jax-privacy; a run needs only the numbers."""

from importlib import import_module

from dbcl.errors import ConfigError


def plan_blt(
    *, rounds: int, separation: int, participations: int, buffers: int = 1
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The `decay` and `scale` with the least noise on W (its mean square, for plain addition) at equal mu.

    It takes seconds and needs jax-privacy, from the extra `privacy-planning`. With server momentum they are good and
    not the best; the guarantee holds for any.

    >>> decay, scale = plan_blt(rounds=150, separation=10, participations=15)  # doctest: +SKIP
    >>> decay, scale  # doctest: +SKIP
    ((0.8475249927053976,), (0.6241470110358486,))
    """
    try:
        jax = import_module("jax")
        buffered_toeplitz = import_module("jax_privacy.matrix_factorization.buffered_toeplitz")
    except ImportError as error:
        raise ConfigError(
            "the parameters of a BLT are planned by jax-privacy, which is not installed; the remedy: "
            "pip install '.[privacy-planning]' in a clone of dbcl, or kind banded, which needs none"
        ) from error
    with jax.enable_x64():
        found = buffered_toeplitz.optimize(
            n=rounds,
            min_sep=separation,
            max_participations=participations,
            error="mean",
            min_buffers=buffers,
            max_buffers=buffers,
        )
    return tuple(map(float, found.buf_decay)), tuple(map(float, found.output_scale))
