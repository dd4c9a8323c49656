"""Log probabilities of tokens: made up, the same for the same token at the same place, and sums of at most 1.

The token that was taken is always the likeliest. Others are words of the lexicon, each half as likely
as the one before.
"""

import hashlib
import math
from dataclasses import dataclass

from engine_agent.engines.sim.text.answers import LEXICON


@dataclass(frozen=True, slots=True)
class Ranked:
    """A token and how likely it was, in nats."""

    text: str
    logprob: float


def ranked_tokens(text: str, index: int, others: int) -> tuple[Ranked, ...]:
    """The token `text`, the `index`th, and the `others` that were likeliest beside it, likeliest first."""
    digest = hashlib.blake2s(f"{index}\0{text}".encode(errors="surrogatepass"), digest_size=4).digest()
    probability = 0.5 + 0.49 * digest[0] / 255
    ranked = [Ranked(text, math.log(probability))]
    left = 1 - probability
    start = int.from_bytes(digest)
    for number in range(others):
        left /= 2
        word = f" {LEXICON[(start + number) % len(LEXICON)]}"
        ranked.append(Ranked(f"{word}'" if word == text else word, math.log(left)))
    return tuple(ranked)
