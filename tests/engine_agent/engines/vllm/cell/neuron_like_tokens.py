"""The expected answers of `neuron_like`; needs no vLLM."""

from collections.abc import Sequence

RANKS = 2
VOCABULARY = 997
MAX_NUM_SEQS = 4
MAX_MODEL_LEN = 64
STORE_VARIABLE = "NEURON_LIKE_STORE"


def part_of(tokens: Sequence[int]) -> int:
    """A rank's part of the next token: it depends on every token and on its position."""
    return sum(place * token for place, token in enumerate(tokens, start=1)) % VOCABULARY


def continuation(prompt: Sequence[int], length: int) -> list[int]:
    """The next tokens if all ranks mean the same request."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(RANKS * part_of(tokens) % VOCABULARY)
    return tokens[len(prompt) :]
