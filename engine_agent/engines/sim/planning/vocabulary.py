"""Words of the simulator: the answer to a prompt, tokens with their ids, and log probabilities. Pure.

An answer depends only on prompt and seed. All cells of a version have the same seed, so two healthy cells give the same
answer and any prompt is a golden prompt. A word with the blanks before it is one token. Its id is a hash of its text,
equal in all processes; the text of an id is known for the simulator's own words and for tokens that this process has
named (`TokenTexts`)."""

import functools
import hashlib
import math
import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

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


def answer_words(
    prompt: str, seed: int, tokens_wanted: int | None = None, at_most: int | None = None
) -> tuple[str, ...]:
    """Returns the answer, one word a token: `tokens_wanted` of them, or `at_most` of its natural length."""
    golden = GOLDEN_ANSWERS.get(prompt.strip().lower())
    if golden is not None and tokens_wanted is None:
        return tuple(golden.split())
    digest = hashlib.sha256(f"{seed}\0{prompt}".encode()).digest()
    source = random.Random(digest)
    length = source.randint(_SHORTEST_ANSWER, _LONGEST_ANSWER)
    length = length if at_most is None else min(length, at_most)
    words = _sentences(source)
    return tuple(next(words) for _ in range(length if tokens_wanted is None else tokens_wanted))


def wrong_words(words: tuple[str, ...]) -> tuple[str, ...]:
    """Returns an answer of the same length in which every word is wrong, as from damaged weights."""
    return tuple(f"{word[::-1]}~" for word in words)


def _sentences(source: random.Random) -> Iterator[str]:
    while True:
        words = source.choices(LEXICON, k=source.randint(*_SENTENCE_WORDS))
        yield words[0].capitalize()
        yield from words[1:-1]
        yield f"{words[-1]}."


_REMEMBERED_TOKENS = 65_536
_REMEMBERED_LETTERS = 64
"""Longer tokens have an id but are not stored, to bound the memory."""


def count_tokens(text: str) -> int:
    """Returns the tokens of a text: its words, at least 1 (a real tokenizer has about 1.3 for a word)."""
    return max(1, len(text.split()))


def split_words(text: str) -> tuple[list[str], str]:
    """Returns the words of a text, each with the blanks before it, and the blanks behind the last."""
    words, blanks = list[str](), ""
    for is_blank, letters in groupby(text, str.isspace):
        run = "".join(letters)
        if is_blank:
            blanks = run
        else:
            words.append(blanks + run)
            blanks = ""
    return words, blanks


def split_tokens(text: str) -> tuple[str, ...]:
    """Returns the tokens of a text, `count_tokens` of them; joined they are the text."""
    words, blanks = split_words(text)
    if not words:
        return (text,)
    words[-1] += blanks
    return tuple(words)


@functools.lru_cache(maxsize=_REMEMBERED_TOKENS)
def token_id(text: str) -> int:
    digest = hashlib.blake2s(text.encode(errors="surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


@functools.cache
def _spoken() -> dict[int, str]:
    words = {word for answer in GOLDEN_ANSWERS.values() for word in answer.split()}
    for word in LEXICON:
        words |= {word, word.capitalize(), f"{word}.", f"{word.capitalize()}."}
    return {token_id(text): text for word in words for text in (word, f" {word}")}


def prompt_text(ids: Sequence[int]) -> str:
    """Returns the text of a prompt of token ids: the simulator's words, and digits for all other ids. It depends on
    nothing else, so a prompt has the same answer in every cell."""
    spoken = _spoken()
    text = "".join(spoken.get(one) or f" {one}" for one in ids)
    return text.removeprefix(" ")


class TokenTexts:
    """Texts of ids that this process knows: for `/detokenize`, never for answers."""

    def __init__(self) -> None:
        self._texts: OrderedDict[int, str] = OrderedDict()

    def ids_of(self, tokens: Iterable[str]) -> list[int]:
        ids = []
        for text in tokens:
            one = token_id(text)
            ids.append(one)
            if len(text) <= _REMEMBERED_LETTERS:
                self._texts[one] = text
        while len(self._texts) > _REMEMBERED_TOKENS:
            self._texts.popitem(last=False)
        return ids

    def text_of(self, ids: Iterable[int]) -> str:
        """Returns the text of ids; an unknown id is written as its digits."""
        spoken = _spoken()
        return "".join(self._texts.get(one, spoken.get(one, f" {one}")) for one in ids)


@dataclass(frozen=True, slots=True)
class Ranked:
    """A token and its log probability, in nats."""

    text: str
    logprob: float


def ranked_tokens(text: str, index: int, others: int) -> tuple[Ranked, ...]:
    """Returns the token `text`, the `index`th, and `others` alternatives, most likely first. Made up: the same for the
    same token in the same place, with probabilities that sum up to at most 1. The chosen token is always the most
    likely; each alternative is half as likely as the previous one."""
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
