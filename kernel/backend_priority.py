"""PostgreSQL's backends get the place in the queue for the processor that their client has.

Each backend is a session of its own. Where the kernel shares processors by session, one that answers a control loop
waits behind everything else of its host, whatever priority the loop has, and a pass makes a hundred queries. Only for a
client that goes before others, and a backend of the same host; only root may do it.
"""

import contextlib
import re
from functools import cache
from pathlib import Path

_KNOWN_MAX = 1000
_placed: set[int] = set()


def backend_place(pid: int, host: str) -> None:
    """To be called for each new connection: `pid` of its backend, `host` as libpq has it."""
    nice = own_session_nice()
    if nice >= 0 or pid in _placed or not (host.startswith("/") or host in {"127.0.0.1", "::1", "localhost"}):
        return
    if len(_placed) >= _KNOWN_MAX:
        _placed.clear()
    with contextlib.suppress(OSError):
        process = Path(f"/proc/{pid}")
        # In a container of its own, PostgreSQL numbers its processes otherwise: the number may be somebody else's here.
        if (process / "cmdline").read_bytes().startswith(b"postgres: "):
            (process / "autogroup").write_text(str(nice), encoding="ascii")
            _placed.add(pid)


@cache
def own_session_nice() -> int:
    """Of this process's session: below 0 goes before others; 0 also where the kernel shares otherwise."""
    with contextlib.suppress(OSError):
        stated = Path("/proc/self/autogroup").read_text(encoding="ascii")
        if found := re.search(r"nice (-?\d+)\s*$", stated):
            return int(found[1])
    return 0
