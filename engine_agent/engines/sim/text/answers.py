"""What the simulator says: plausible words that depend on nothing but the prompt and the seeds.

Every cell of a version has the same seed, so any prompt is a golden prompt: two healthy cells give the same answer. One
word is one token. It depends on neither time nor earlier requests.
"""

import hashlib
import random
from collections.abc import Iterator, Sequence

GOLDEN_ANSWERS = {
    "ping": "pong",
    "what is the capital of france?": "The capital of France is Paris.",
    "what is 2+2?": "2+2 is 4.",
}
"""Prompts (lower case) with a fixed answer, whatever the seed."""

_WORDS = """
a able about across again all along also always answer are around as at balance because become before begin between
both bring build by careful change clear close come common complete consider could day deep depend do each early easy
end enough even every example fact far feel few find first follow for form found from full general give good great
ground grow half hand hard have help here high hold how idea if important in into is it just keep kind know large last
later learn least leave less let level light like line little long look made main make many matter may mean measure
might more most move much must name near need never new next no not now number of often on once one only open or order
other our out over own part people place plain plan point possible present problem public question quite rather reach
read real reason right rise rule same see seem set short should show side simple since small so some soon state still
strong such sure take tell than that the their then there these they thing think this those through time to together
true turn two under up use usual very view way well what when where which while who whole why will with word work
world would year yet you
"""
LEXICON: Sequence[str] = _WORDS.split()

_SHORTEST_ANSWER = 16
_LONGEST_ANSWER = 128
_SENTENCE_WORDS = (6, 14)


def answer_words(prompt: str, seed: int, tokens_wanted: int | None = None) -> tuple[str, ...]:
    """The whole answer, one word a token. `tokens_wanted` makes it exactly that long instead of its natural length."""
    golden = GOLDEN_ANSWERS.get(prompt.strip().lower())
    if golden is not None and tokens_wanted is None:
        return tuple(golden.split())
    digest = hashlib.sha256(f"{seed}\0{prompt}".encode()).digest()
    source = random.Random(digest)
    length = source.randint(_SHORTEST_ANSWER, _LONGEST_ANSWER)
    words = _sentences(source)
    return tuple(next(words) for _ in range(length if tokens_wanted is None else tokens_wanted))


def wrong_words(words: tuple[str, ...]) -> tuple[str, ...]:
    """An answer of the same length in which every word is wrong, as from weights that were damaged."""
    return tuple(f"{word[::-1]}~" for word in words)


def _sentences(source: random.Random) -> Iterator[str]:
    while True:
        words = source.choices(LEXICON, k=source.randint(*_SENTENCE_WORDS))
        yield words[0].capitalize()
        yield from words[1:-1]
        yield f"{words[-1]}."
