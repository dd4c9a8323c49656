"""From bytes as a process writes them to whole lines, and from lines to what a terminal shows. Pure."""

LONGEST_LINE_CHARS = 4000
"""Longer lines are cut in pieces: a process that writes without a newline must not fill the memory."""

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92)
_RESET = "\x1b[0m"


class LineSplitter:
    """Cuts a stream of bytes into lines; keeps the unfinished last one until the rest arrives."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[str]:
        """The lines that `chunk` completes, without their ends."""
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > LONGEST_LINE_CHARS:
            whole.append(self._rest)
            self._rest = b""
        return [piece for line in whole for piece in _pieces(line)]

    def finish(self) -> list[str]:
        """The unfinished last line, if there is one."""
        rest, self._rest = self._rest, b""
        return _pieces(rest) if rest else []


def _pieces(line: bytes) -> list[str]:
    text = line.rstrip(b"\r").decode(errors="replace")
    return [text[at : at + LONGEST_LINE_CHARS] for at in range(0, len(text), LONGEST_LINE_CHARS)] or [""]


def prefixed(name: str, line: str, *, width: int, colour: bool) -> str:
    """`line` behind its process's name, padded to `width`; a name keeps its colour for ever."""
    label = f"{name:<{width}} |"
    if colour:
        label = f"\x1b[{_COLOURS[sum(name.encode()) % len(_COLOURS)]}m{label}{_RESET}"
    return f"{label} {line}".rstrip()
