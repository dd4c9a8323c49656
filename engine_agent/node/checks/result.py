"""Results of deep checks. Only the standard library, because some checks run in an engine's own Python."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from time import monotonic

from engine_agent.protocol.strict_json import strict_loads

TEXT_CHARS_MAX = 400
NUMBERS_MAX = 16


@dataclass(frozen=True)
class Result:
    """One check. `found`: what it found, as a sentence; `wanted`: what would be right, if it is wrong. `ok` None: it
    could not run here, and `found` says why. `numbers` are figures by name, with the unit in the name."""

    check: str
    ok: bool | None
    found: str
    wanted: str = ""
    seconds: float = 0.0
    numbers: Mapping[str, float] = field(default_factory=dict)

    def bounded(self) -> "Result":
        """The result with shortened texts and few numbers, for a report."""
        numbers = {name: round(value, 3) for name, value in list(self.numbers.items())[:NUMBERS_MAX]}
        texts = (self.found[:TEXT_CHARS_MAX], self.wanted[:TEXT_CHARS_MAX])
        return Result(self.check, self.ok, *texts, seconds=round(self.seconds, 3), numbers=numbers)

    def as_line(self) -> str:
        return json.dumps(asdict(self.bounded()))


def result_from(line: str | bytes) -> Result:
    """Parses the output of `as_line`. Raises ValueError if it is invalid."""
    try:
        return Result(**strict_loads(line if isinstance(line, str) else line.decode())).bounded()
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"not the result of a check: {str(line)[:80]!r}") from error


def timed(check: str, make: Callable[[], Result]) -> Result:
    """The result of a check with its duration. An exception means that the check could not run."""
    began_s = monotonic()
    try:
        result = make()
    except (OSError, MemoryError, RuntimeError, ValueError, ImportError) as error:
        result = Result(check, None, f"it could not run: {type(error).__name__}: {error}")
    return Result(check, result.ok, result.found, result.wanted, monotonic() - began_s, result.numbers)


def printed(results: Iterable[Result]) -> int:
    """Prints each result as soon as it is known; returns the exit status, 1 if a check failed."""
    failed = False
    for result in results:
        sys.stdout.write(result.as_line() + "\n")
        sys.stdout.flush()
        failed |= result.ok is False
    return int(failed)
