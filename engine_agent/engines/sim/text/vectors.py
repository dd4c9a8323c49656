"""Embeddings: unit vectors in which each word of a text adds to a few dimensions.

Equal texts have equal vectors, texts that share words are near each other, and nothing else is meant by them. How near
two texts are is also what the simulator scores and ranks by.
"""

import functools
import hashlib
import math
from collections.abc import Sequence

DIMENSIONS = 384
_FEATURES = 8


@functools.lru_cache(maxsize=65_536)
def _features(word: str) -> tuple[tuple[int, float], ...]:
    digest = hashlib.blake2s(word.encode(errors="surrogatepass"), digest_size=3 * _FEATURES).digest()
    return tuple(
        (int.from_bytes(digest[at : at + 2]), 1.0 if digest[at + 2] & 1 else -1.0) for at in range(0, len(digest), 3)
    )


def embedding(text: str, dimensions: int = DIMENSIONS) -> tuple[float, ...]:
    """The unit vector of a text in so many dimensions. Case and full stops do not count."""
    vector = [0.0] * dimensions
    for word in text.split() or [text]:
        for place, sign in _features(word.lower().strip(".,;:!?\"'()") or word):
            vector[place % dimensions] += sign
    length = math.sqrt(sum(value * value for value in vector))
    if length == 0.0:
        # Its words cancel each other, as they do in very few dimensions.
        return (1.0, *[0.0] * (dimensions - 1))
    return tuple(value / length for value in vector)


def similarity(one: Sequence[float], other: Sequence[float]) -> float:
    """How near two embeddings are: 1 for the same words, 0 where their texts share none."""
    return min(1.0, max(0.0, math.fsum(a * b for a, b in zip(one, other, strict=True))))
