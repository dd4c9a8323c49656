"""Commands that start a laboratory and run until Ctrl-C."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lab.hosts import client
from lab.hosts.places import read_places


@contextmanager
def stopped_by_signals(wanted: bool) -> Iterator[Callable[[], None]]:
    """What this process started ends with it, from its first moment, unless it is to be left running."""

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
