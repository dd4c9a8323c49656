"""Ends the HAProxies of a test session when that ends, however it ends: `python ender.py FOLDER`.

A HAProxy outlives its agent, which is its purpose, and so a session that is killed. So this process waits for the end
of a pipe whose other end only the session holds, and then kills each HAProxy whose configuration lies below FOLDER.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path


def main(folder: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"-f" in arguments and arguments[arguments.index(b"-f") + 1].startswith(os.fsencode(f"{folder}/")):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
