"""Hashed n-grams of texts: features without a learned vocabulary."""

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from dbcl.errors import ConfigError

WORD = re.compile(r"\w+")
SCHEME = "hashed-text-v1"


class HashedText:
    """Bag of n-grams with signed feature hashing, L2-normalised.

    No vocabulary is used, because it would be a statistic of private texts. Words are hashed by
    SHA-256, so every machine computes the same features.

    Args:
        size: Number of features.
        words: Maximum number of words in an n-gram.

    >>> features = HashedText(64)(["The cat sat.", "the CAT sat", "a dog"])
    >>> features.shape, torch.equal(features[0], features[1]), round(float(features[2].norm()), 5)
    (torch.Size([3, 64]), True, 1.0)
    """

    def __init__(self, size: int = 4096, *, words: int = 2) -> None:
        if size < 1 or words < 1:
            raise ConfigError(f"size and words must be 1 or more, got {size} and {words}")
        self.size, self.words = size, words

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return the features of texts, (n, size)."""
        features = torch.zeros(len(texts), self.size)
        for row, text in enumerate(texts):
            own = WORD.findall(text.lower())
            for length in range(1, self.words + 1):
                for start in range(len(own) - length + 1):
                    place, sign = _hashed(" ".join(own[start : start + length]))
                    features[row, place % self.size] += sign
        return torch.nn.functional.normalize(features)


@lru_cache(maxsize=1 << 16)
def _hashed(gram: str) -> tuple[int, float]:
    word = int.from_bytes(hashlib.sha256(f"{SCHEME} {gram}".encode()).digest()[:8], "little")
    return word >> 1, 1.0 if word & 1 else -1.0
