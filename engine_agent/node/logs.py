"""Log files of a node's processes: appended by them, kept short and quoted here.

Their writers open them for appending, so that cutting one to nothing loses no later line. It never writes lines.
"""

import contextlib
import os
import shutil
from pathlib import Path

MAX_LOG_BYTES = 16 * 1024 * 1024
"""A log that is longer becomes the one earlier log that is kept: at most twice this per kind of process."""
TAIL_BYTES = 16 * 1024
"""How far back the last lines are looked for."""
MAX_LINE_CHARS = 500


def set_aside(path: Path) -> None:
    """Make the log the earlier log, so that its next writer begins a new one.

    Raises:
        OSError: the disk refused.
    """
    with contextlib.suppress(FileNotFoundError):
        path.replace(_earlier(path))


def bound(path: Path, max_bytes: int = MAX_LOG_BYTES) -> bool:
    """Move what the log holds to `<path>.1` if it is longer than `max_bytes`; say whether that was done.

    Raises:
        OSError: the disk refused.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return False
    if size <= max_bytes:
        return False
    shutil.copyfile(path, _earlier(path))
    os.truncate(path, 0)
    return True


def last_lines(path: Path, count: int = 20) -> list[str]:
    """The last lines that say something, oldest first; none if there is no log."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            tail = log.read(TAIL_BYTES)
    except OSError:
        return []
    lines = [line.strip()[:MAX_LINE_CHARS] for line in tail.decode(errors="replace").splitlines()]
    return [line for line in lines if line][-count:]


def _earlier(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")
