"""Times and shares as people write them, and tables as they read them."""

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lab.hosts import client
from lab.hosts.places import read_places
from lab.hosts.topology import NoLaboratory

_TIME = re.compile(r"([+-]?)([0-9]{1,9}(?:\.[0-9]{1,6})?)(ms|s|m|h|d)?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)%?")


def seconds(text: str) -> float:
    """`200ms`, `1.5s`, `+1h`, `-10m`, `2d`, in seconds. Without a unit only 0 means anything. Raises NoLaboratory for
    another format."""
    found = _TIME.fullmatch(text)
    if found is None or (found[3] is None and float(found[2])):
        raise NoLaboratory(f"{text!r} is no time: give a number with ms, s, m, h or d, such as 200ms or +1h.")
    return (-1 if found[1] == "-" else 1) * float(found[2]) * _SECONDS[found[3] or "s"]


def share(text: str) -> float:
    found = _SHARE.fullmatch(text)
    if found is None or float(found[1]) > 100:
        raise NoLaboratory(f"{text!r} is no share: give 0% to 100%.")
    return float(found[1]) / 100


def skew_text(ahead_s: float) -> str:
    """A clock's difference, such as `1 h ahead`."""
    if not ahead_s:
        return "right"
    size, unit = next((abs(ahead_s) / _SECONDS[unit], unit) for unit in ("d", "h", "m", "s", "ms")
                      if abs(ahead_s) >= _SECONDS[unit] or unit == "ms")  # fmt: skip
    return f"{size:g} {unit} {'ahead' if ahead_s > 0 else 'behind'}"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


@contextmanager
def stopped_by_signals(wanted: bool) -> Iterator[Callable[[], None]]:
    """Stops the laboratory with this process, from the start, unless it is to be left running."""

    def stop(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    if not wanted:
        yield lambda: None
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        yield signal.pause
    except KeyboardInterrupt:
        print("ending the laboratory", flush=True)
        client.stop(read_places())
