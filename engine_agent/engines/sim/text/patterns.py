"""Texts that match a regular expression: of JSON schema's `pattern`, and of `structured_outputs.regex`.

It reads the part of the syntax that says what comes after what: literals, classes, groups, alternatives, repetitions,
anchors at both ends. What looks around or back is refused by name. Nothing is ever matched against a client's
expression, so none can hold the process up.
"""

import random
from dataclasses import dataclass
from string import ascii_letters, ascii_lowercase, digits

_MOST_STEPS = 20_000
"""Repetitions within repetitions are read again each time."""
_MOST_REPEATED = 64
"""How often `{n}` may say that a thing comes."""
_OPEN_REPEATS = 3
"""`*` and `+` add at most so many."""
_DEEPEST = 20
_PRINTABLE = "".join(map(chr, range(32, 127)))
_CLASSES = {
    "d": digits,
    "w": f"{ascii_letters}{digits}_",
    "s": " ",
    "D": ascii_letters,
    "W": " -.,",
    "S": f"{ascii_letters}{digits}",
}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}


class BadPattern(ValueError):
    """An expression that is wrong, or has what the simulator does not do; the text names it."""


def matching_text(pattern: str, source: random.Random) -> str:
    """A text that matches `pattern` as a whole.

    Raises:
        BadPattern: see there.
    """
    reader = _Reader(pattern, source)
    text = reader.alternatives(0)
    if reader.at < len(pattern):
        raise BadPattern(f"the expression has an unmatched {pattern[reader.at]!r}")
    return text


@dataclass
class _Reader:
    """Reads the expression once from left to right and writes a text meanwhile."""

    pattern: str
    source: random.Random
    at: int = 0
    steps: int = 0

    def alternatives(self, depth: int) -> str:
        if depth > _DEEPEST:
            raise BadPattern("the expression has groups within groups, too many of them")
        options = [self._sequence(depth)]
        while self._peek() == "|":
            self.at += 1
            options.append(self._sequence(depth))
        return self.source.choice(options)

    def _sequence(self, depth: int) -> str:
        written: list[str] = []
        while self.at < len(self.pattern) and self._peek() not in {"|", ")"}:
            start = self.at
            piece = self._atom(depth)
            written.append(self._repeated(piece, start, depth))
        return "".join(written)

    def _repeated(self, piece: str, start: int, depth: int) -> str:
        fewest, most = self._repetition()
        after = self.at
        count = self.source.randint(fewest, most)
        pieces = [piece] if count else []
        for _ in range(count - 1):
            # Once more from its beginning, so that each time it is another one.
            self.at = start
            pieces.append(self._atom(depth))
        self.at = after
        return "".join(pieces)

    def _atom(self, depth: int) -> str:
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise BadPattern("the expression matches only very long texts, which sim does not write")
        letter = self._next()
        if letter == "(":
            return self._group(depth)
        if letter == "[":
            return self.source.choice(self._class())
        if letter == "\\":
            return self.source.choice(self._escaped())
        if letter == ".":
            return self.source.choice(f"{ascii_lowercase}{digits}")
        if letter == "^" and self.at == 1:
            return ""
        if letter == "$" and self.at == len(self.pattern):
            return ""
        if letter in "^$":
            raise BadPattern(f"an anchor {letter!r} inside an expression is not supported by sim")
        if letter in "*+?{":
            raise BadPattern(f"the expression repeats nothing by {letter!r}")
        return letter

    def _group(self, depth: int) -> str:
        if self._peek() == "?":
            if not self.pattern.startswith("?:", self.at):
                raise BadPattern(f"{self.pattern[self.at - 1 : self.at + 3]!r} is not supported by sim")
            self.at += 2
        text = self.alternatives(depth + 1)
        if self._peek() != ")":
            raise BadPattern("the expression has a group without an end")
        self.at += 1
        return text

    def _escaped(self) -> str:
        letter = self._next()
        if letter in _CLASSES:
            return _CLASSES[letter]
        if letter in _CONTROLS:
            return _CONTROLS[letter]
        if letter.isalnum():
            raise BadPattern(f"the escape {letter!r} is not supported by sim")
        return letter

    def _class(self) -> str:
        excluded = self._peek() == "^"
        self.at += excluded
        letters: list[str] = []
        while (letter := self._next()) != "]" or not letters:
            members = self._escaped() if letter == "\\" else letter
            if excluded and letter == "\\" and self.pattern[self.at - 1].isupper():
                raise BadPattern("a class that excludes an excluding class is not supported by sim")
            is_range = self._peek() == "-" and self.pattern[self.at + 1 : self.at + 2] not in {"]", ""}
            if is_range and len(members) == 1:
                self.at += 1
                last = self._next()
                last = self._escaped() if last == "\\" else last
                if len(last) != 1 or ord(last) < ord(members):
                    raise BadPattern(f"the expression has a range {members}-{last} that is none")
                # The first of a wide range are enough.
                members = "".join(map(chr, range(ord(members), min(ord(last), ord(members) + 200) + 1)))
            letters.append(members)
        named = "".join(letters)
        if not excluded:
            return named
        rest = "".join(letter for letter in _PRINTABLE if letter not in named)
        if not rest:
            raise BadPattern("the expression has a class that excludes every letter")
        return rest

    def _repetition(self) -> tuple[int, int]:
        letter = self._peek()
        if letter == "{":
            return self._counted()
        if letter not in {"*", "+", "?"}:
            return 1, 1
        self.at += 1
        self._skip_laziness()
        return {"*": (0, _OPEN_REPEATS), "+": (1, 1 + _OPEN_REPEATS), "?": (0, 1)}[letter]

    def _counted(self) -> tuple[int, int]:
        end = self.pattern.find("}", self.at)
        fewest, comma, most = self.pattern[self.at + 1 : end].partition(",")
        if end < 0 or not fewest.isdecimal() or (most and not most.isdecimal()) or len(fewest + most) > 8:
            raise BadPattern("the expression has a repetition that is not {n}, {n,} or {n,m}")
        self.at = end + 1
        self._skip_laziness()
        low = int(fewest)
        high = low + _OPEN_REPEATS if comma and not most else int(most or fewest)
        if high < low or low > _MOST_REPEATED:
            raise BadPattern(f"sim repeats at most {_MOST_REPEATED} times, not {{{fewest}{comma}{most}}}")
        return low, min(high, max(low, _MOST_REPEATED))

    def _skip_laziness(self) -> None:
        self.at += self._peek() == "?"

    def _peek(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def _next(self) -> str:
        if self.at >= len(self.pattern):
            raise BadPattern("the expression ends before it is complete")
        self.at += 1
        return self.pattern[self.at - 1]
