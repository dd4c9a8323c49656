"""Kills the HAProxies of a test session when the session ends or is killed: `python ender.py FOLDER`. A HAProxy is made
to outlive its agent, so this process waits for the end of a pipe that only the session holds open, and then kills each
HAProxy whose configuration is below FOLDER."""

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
