"""Tokens: one word with the blanks before it is one token, and its id is a hash of its text.

Ids are the same in every cell and every process. A hash has no way back, so the text of an id is known for the words
that the simulator itself says, and for what this process has named before (`TokenTexts`).
"""

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import groupby

from engine_agent.engines.sim.text.answers import GOLDEN_ANSWERS, LEXICON

_REMEMBERED_TOKENS = 65_536
_REMEMBERED_LETTERS = 64
"""Longer tokens have an id and are not remembered: what clients send must not fill the memory."""


def count_tokens(text: str) -> int:
    """Tokens of a text: its words, at least 1 (a real tokenizer makes about 1.3 of a word)."""
    return max(1, len(text.split()))


def split_words(text: str) -> tuple[list[str], str]:
    """The words of a text, each with the blanks before it, and the blanks behind the last."""
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
    """The tokens of a text, `count_tokens` of them; joined they are the text."""
    words, blanks = split_words(text)
    if not words:
        return (text,)
    words[-1] += blanks
    return tuple(words)


@functools.lru_cache(maxsize=_REMEMBERED_TOKENS)
def token_id(text: str) -> int:
    """The id of a token, 0 to 2^31 - 1."""
    digest = hashlib.blake2s(text.encode(errors="surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


@functools.cache
def _spoken() -> dict[int, str]:
    words = {word for answer in GOLDEN_ANSWERS.values() for word in answer.split()}
    for word in LEXICON:
        words |= {word, word.capitalize(), f"{word}.", f"{word.capitalize()}."}
    return {token_id(text): text for word in words for text in (word, f" {word}")}


def prompt_text(ids: Sequence[int]) -> str:
    """The text that a prompt of token ids stands for: words that the simulator says, and the digits of all others.

    It depends on nothing else, so that a prompt has the same answer in every cell.
    """
    spoken = _spoken()
    text = "".join(spoken.get(one) or f" {one}" for one in ids)
    return text.removeprefix(" ")


class TokenTexts:
    """Texts of ids, as far as this process can know them: for `/detokenize`, never for answers."""

    def __init__(self) -> None:
        self._texts: OrderedDict[int, str] = OrderedDict()

    def ids_of(self, tokens: Iterable[str]) -> list[int]:
        """The ids of tokens, whose texts are remembered from now on."""
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
        """The text of ids; an id that nobody named is written as its digits."""
        spoken = _spoken()
        return "".join(self._texts.get(one, spoken.get(one, f" {one}")) for one in ids)
