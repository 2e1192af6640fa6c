"""Initial weights from a secret random seed."""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from dbcl import seeds
from dbcl.errors import ConfigError

WORDS = 624
"""Number of 32-bit words in the state of PyTorch's CPU generator, a Mersenne Twister."""

HEADER = 24
"""Number of bytes before the state words in `torch.get_rng_state`. Each word takes 8 bytes."""


@contextlib.contextmanager
def secret_weights(insecure_seed: int | None = None) -> Iterator[None]:
    """Context manager that initialises a network's weights from a secret 256-bit seed.

    `torch.manual_seed` uses only 32 bits on the CPU, so an adversary can try all seeds. An
    adversary with the initial weights learns more about the updates. The context manager does not
    protect a network that initialises weights on another device, seeds the generator itself or
    loads weights from a file. On exit, the previous state of the generator is restored.

    Args:
        insecure_seed: Fixes the weights, for reproducible experiments.

    >>> def first():
    ...     with secret_weights():
    ...         return torch.nn.Linear(3, 1).weight
    >>> bool((first() == first()).any())
    False
    """
    with torch.random.fork_rng(devices=[]):
        if insecure_seed is None:
            _seed(seeds.fresh())
        else:
            torch.manual_seed(insecure_seed)
        yield


def _seed(seed: bytes) -> None:
    """Set the complete state of PyTorch's CPU generator from a seed."""
    torch.manual_seed(0)  # so that no number of before waits in it
    state = torch.get_rng_state()
    before = _words(state).copy()
    # PyTorch documents no layout, so make sure that these are the words: of a seed of 0 the first is 0, the others not.
    if len(before) != WORDS or before[0] != 0 or not (before[1:].min() > 0 and before.max() < 2**32):
        raise ConfigError(
            f"PyTorch {torch.__version__} keeps its generator in another form than dbcl knows; make the network "
            "without secret_weights, from weights that the parties do not know"
        )
    _words(state)[:] = seeds.words(seed, "weights", n=WORDS) >> np.uint64(32)
    torch.set_rng_state(state)


def _words(state: torch.Tensor) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    return state.numpy()[HEADER : HEADER + 8 * WORDS].view("<u8")
