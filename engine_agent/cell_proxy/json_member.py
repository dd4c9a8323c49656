"""Finds one member of a JSON object that passes in pieces, without keeping it: the object may have many megabytes, in
an order that only its engine knows. Pure.

Only a member at its place counts: a text that looks like one is inside a string, and an object that looks like one is
deeper. The text is taken for valid JSON, which engines write; of any other it finds something or nothing, and never
keeps more than `MAX_VALUE_BYTES`.
"""

import re

MAX_VALUE_BYTES = 64 * 1024
"""Longest value that is kept; of usage some hundred are to be expected."""
_MAX_KEY_BYTES = 64
_OUTSIDE = re.compile(rb'[^{}\[\]":,]*+')
_INSIDE = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_FLAT = rb'[^{}\[\]"]++|"(?:[^"\\]++|\\.)*+"'
_NESTED = rb"(?:" + _FLAT + rb"|\{(?:" + _FLAT + rb")*+\}|\[(?:" + _FLAT + rb")*+\])"
_WHOLE_VALUES = re.compile(rb"(?:" + _NESTED + rb")*+", re.DOTALL)
"""All that can be passed over at once: scalars, strings, and whole objects and lists of those."""


class JsonMember:
    """The value at `path` (names from the outermost object inwards), as it stands in the text.

    `value` is None while it is not whole, and where it is no object or list.
    """

    __slots__ = (
        "_depth",
        "_escaped",
        "_found",
        "_in_string",
        "_kept",
        "_key",
        "_matched",
        "_path",
        "_wants_key",
        "value",
    )

    def __init__(self, *path: bytes) -> None:
        self._path = path
        self._depth = 0
        self._matched = 0
        """Of the path, so many names are around here."""
        self._wants_key = False
        self._key: bytes | None = None
        """Of the member that we are in, or whose name passes, if it may be the next of the path."""
        self._in_string = self._escaped = False
        self._found = False
        self._kept = bytearray()
        self.value: bytes | None = None

    def add(self, piece: bytes) -> None:
        at, end = 0, len(piece)
        while at < end:
            began, found = at, self._found
            at = self._string(piece, at) if self._in_string else self._next(piece, at)
            if found:
                self._keep(piece[began:at])
            if found and not self._found:
                self.value = bytes(self._kept) if len(self._kept) <= MAX_VALUE_BYTES else None

    @property
    def _is_here(self) -> bool:
        """Members of this object are those of the path."""
        return not self._found and self._depth == self._matched + 1

    def _string(self, piece: bytes, at: int) -> int:
        began = at
        if self._escaped:
            self._escaped = False
            at += 1
        at = _INSIDE.match(piece, at).end()  # type: ignore[union-attr] # it matches anything
        self._note_key(piece[began:at])
        if at < len(piece):
            self._in_string = piece[at : at + 1] == b"\\"
            self._escaped = self._in_string  # a lone one at the end of the piece
            self._note_key(b"\\" if self._escaped else b"")
            at += 1
        return at

    def _note_key(self, text: bytes) -> None:
        if self._is_here and self._wants_key and self._key is not None and len(self._key) < _MAX_KEY_BYTES:
            self._key += text

    def _next(self, piece: bytes, at: int) -> int:
        """Go on between strings: up to and with the next sign that means something here."""
        if self._depth and not self._is_here:
            at = _WHOLE_VALUES.match(piece, at).end()  # type: ignore[union-attr]
        else:
            at = _OUTSIDE.match(piece, at).end()  # type: ignore[union-attr]
        if at < len(piece):
            self._sign(piece[at : at + 1])
            at += 1
        return at

    def _sign(self, sign: bytes) -> None:
        if sign == b'"':
            self._in_string = True
            if self._is_here and self._wants_key:
                self._key = b""
        elif sign in b"{[":
            self._enter(sign)
        elif sign in b"}]":
            self._leave()
        elif self._is_here and sign == b":":
            self._wants_key = False
        elif self._is_here and sign == b",":
            self._wants_key, self._key = True, None

    def _enter(self, sign: bytes) -> None:
        if self._is_here and self._key == self._path[self._matched]:
            if self._matched + 1 == len(self._path):
                self._found = True
                self._kept = bytearray(sign)
            elif sign == b"{":
                self._matched += 1
        self._depth += 1
        self._wants_key, self._key = sign == b"{", None

    def _leave(self) -> None:
        self._depth -= 1
        if self._found and self._depth == self._matched + 1:
            self._found = False
        elif self._matched and self._depth == self._matched:
            self._matched -= 1
        self._wants_key, self._key = False, None

    def _keep(self, text: bytes) -> None:
        if len(self._kept) <= MAX_VALUE_BYTES:
            self._kept += text
