"""One run of a stream as it arrives from a cell: whole events without marks for the client, and the tokens that they
were made of. Pure.

While nothing is wrong no event is parsed: events are counted by their ends, and marks are cut off and kept as text. A
run that continues another one first repeats the events that the client has. They are dropped, and their marks have to
be those of the first run (`Diverged`)."""

from collections.abc import Mapping

from engine_agent.protocol.continuation import BROKEN_MARK, LEAVING_MARK, PROMPT_MARK, TOKENS_MARK
from engine_agent.relay.dialects import Dialect

_END = b"\n\n"
_LEAVING = LEAVING_MARK.strip()
GROUP_END = b";"
MOST_EVENT_BYTES = 1024 * 1024
"""A longer event passes in pieces, and its stream can no longer continue."""
MOST_MARKS_BYTES = 256 * 1024
"""Of the tokens of one stream, some 40,000 tokens as text."""
MOST_FAREWELL_BYTES = 64 * 1024


class Diverged(ValueError):
    """A cell repeats a stream with other tokens or other events, or sends marks that are none."""


class MarkedStream:
    """`skips`: how many events the client has, made of the tokens `expected`. `replaced`: texts that this run has in
    place of those that the client got, such as ids and times; it is filled while events are skipped."""

    __slots__ = (
        *("_dialect", "_expected", "_is_inside", "_rest", "_seen", "_shown", "_skips"),
        *("broken", "events", "farewell", "is_whole", "last", "leaving", "leaving_at", "marks", "prompt", "replaced"),
    )

    def __init__(
        self, dialect: Dialect, skips: int = 0, expected: bytes = b"", shown: Mapping[int, tuple[bytes, ...]] = {}
    ) -> None:
        self._dialect = dialect
        self._skips = skips
        self._expected = expected
        self._rest = b""
        self._is_inside = False
        """The client has the beginning of an event that is too long to be kept until its end."""
        self._shown = dict(shown)
        """Generated texts that the client got, by the number of their event."""
        self._seen: set[bytes] = {text for texts in shown.values() for text in texts}
        self.replaced: list[tuple[bytes, bytes]] = []
        self.events = 0
        """Whole events of this run, with those that were skipped."""
        self.last = b""
        """The last event that the client got, with or without its end."""
        self.marks = bytearray()
        """The groups of all whole events: ids separated by commas, each group with its end."""
        self.prompt = b""
        self.broken = b""
        """The code by which the cell says that it failed."""
        self.farewell = b""
        """The events after that code, for a client whose stream cannot continue."""
        self.leaving = b""
        """Why the cell says that the stream may continue elsewhere."""
        self.leaving_at = 0
        """Tokens before the last such mark."""
        self.is_whole = True
        """Whether marks and events were kept completely, so that the stream can continue."""

    @property
    def is_ahead(self) -> bool:
        """Whether the client gets what arrives now."""
        return self.events >= self._skips

    @property
    def tokens(self) -> int:
        """Of all whole events, for marks that are lists of ids."""
        return self.marks.count(b",") + self.marks.count(GROUP_END)

    @property
    def at_boundary(self) -> bool:
        """Whether the client has whole events, so that another one can follow."""
        return not self._is_inside

    @property
    def shown(self) -> Mapping[int, tuple[bytes, ...]]:
        return self._shown

    def add(self, piece: bytes) -> bytes:
        """Takes the next bytes. Returns those for the client. Raises Diverged."""
        text = self._rest + piece if self._rest else piece
        if self._is_inside:
            passed, text = self._pass_on(text)
            return passed + self.add(text) if text else passed
        if text.endswith(_END):
            self._rest = b""
        else:
            cut = text.rfind(_END) + len(_END) if _END in text else 0
            self._rest = text[cut:]
            text = text[:cut]
            if len(self._rest) > MOST_EVENT_BYTES:
                return self._events(text) + self._begin_long()
        return self._events(text)

    def _events(self, text: bytes) -> bytes:
        if self.is_ahead and not self.replaced and text.count(_END) == 1 and text.startswith(TOKENS_MARK):
            return self._one(text)
        return b"".join([self._block(block) for block in text.split(_END)[:-1]])

    def _one(self, text: bytes) -> bytes:
        """The usual piece: one event with one mark."""
        mark, _, event = text.partition(b"\n")
        if event.startswith((b":", b"\n")):
            return self._block(text[: -len(_END)])
        self._keep(mark)
        self._note(event)
        self.events += 1
        self.last = event
        return event

    def _block(self, block: bytes) -> bytes:
        comments = b""
        while block.startswith(b":"):
            line, _, block = block.partition(b"\n")
            comments += self._comment(line)
        if self.broken:
            self.farewell = (self.farewell + block + _END if block else self.farewell)[:MOST_FAREWELL_BYTES]
            return b""
        if not block:
            return comments + b"\n" if comments and self.is_ahead else b""
        number, self.events = self.events, self.events + 1
        if number < self._skips:
            self._skip(number, block)
            return b""
        for now, before in self.replaced:
            block = block.replace(now, before)
        self._note(block, number)
        self.last = block
        return comments + block + _END

    def _comment(self, line: bytes) -> bytes:
        if line.startswith(TOKENS_MARK):
            self._keep(line)
        elif line.startswith(PROMPT_MARK):
            self.prompt = line[len(PROMPT_MARK) :].replace(b" ", b":")
        elif line.startswith(BROKEN_MARK):
            self.broken = line[len(BROKEN_MARK) :][:64]
        elif line.startswith(_LEAVING):
            self.leaving, self.leaving_at = line[len(_LEAVING) :].strip()[:40] or b"leaving", self.tokens
        else:
            return line + b"\n"
        return b""

    def _keep(self, mark: bytes) -> None:
        if not self.is_whole:
            return
        self.marks += mark[len(TOKENS_MARK) :] + GROUP_END
        if len(self.marks) > MOST_MARKS_BYTES:
            self.marks.clear()
            self.is_whole = False

    def _skip(self, number: int, event: bytes) -> None:
        if (shown := self._shown.get(number)) is not None:
            now = self._dialect.generated(event, is_first=number == 0)
            if len(now) != len(shown):
                raise Diverged("it generates other items")
            self.replaced += [(new, old) for new, old in zip(now, shown, strict=True) if new != old]
        if self.events == self._skips and self.marks != self._expected:
            raise Diverged("it repeats other tokens")

    def _note(self, event: bytes, number: int | None = None) -> None:
        """Keeps what this engine made up, which another engine makes up differently."""
        number = self.events if number is None else number
        if number and not self._dialect.may_generate(event):
            return
        texts = self._dialect.generated(event, is_first=number == 0)
        if any(text not in self._seen for text in texts):
            self._shown[number] = texts
            self._seen.update(texts)

    def _begin_long(self) -> bytes:
        """An event that is too long passes in pieces, without the marks before it. Its stream cannot continue."""
        if not self.is_ahead:
            raise Diverged("it repeats an event that is too long")
        rest, self._rest = self._rest, b""
        self.is_whole, self._is_inside = False, True
        self.marks.clear()
        while rest.startswith(b":"):
            _, _, rest = rest.partition(b"\n")
        passed, _ = self._pass_on(rest)
        return passed

    def _pass_on(self, text: bytes) -> tuple[bytes, bytes]:
        """The part of the bytes that belongs to a long event, and those after its end."""
        at = text.find(_END)
        if at >= 0:
            self._is_inside, self._rest = False, b""
            self.events += 1
            return text[: at + len(_END)], text[at + len(_END) :]
        kept = len(_END) - 1 if text.endswith(b"\n") else 0
        self._rest = text[len(text) - kept :]
        return text[: len(text) - kept], b""


def groups_of(marks: bytes) -> list[list[int]]:
    """The groups of ids in kept marks. Raises Diverged if they are none."""
    try:
        return [list(map(int, group.split(b","))) for group in marks.split(GROUP_END)[:-1]]
    except ValueError:
        raise Diverged("its marks are not lists of ids") from None
