"""Runs uv with pip's configuration, shows what it downloads, and turns its failure into one sentence.

It decides nothing about what is installed or where.
"""

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Timer

from engine_agent.engines.pip_configuration import uv_environment_here

KEPT_LINES = 40
"""Of uv's output, to find the reason of a failure in; its longest explanations have about 20 lines."""

_DRAWING = "\u00d7\u2570\u2500\u25b6\u251c\u2502 "
"""The characters that uv draws the tree of an error with."""


class UvFailed(Exception):
    """uv is not there, or failed; the text is its reason in one line."""


class UvProgram:
    """The uv that is installed beside this Python."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """Find uv and read pip's configuration; `say` is called with ignored settings and with downloads.

        Raises:
            UvFailed: this Python has no uv.
        """
        self._say = say
        self._program = _find_uv()
        self._environment, warnings = uv_environment_here()
        for warning in warnings:
            say(f"warning: {warning}")

    def run(self, arguments: Sequence[str], limit_s: float) -> None:
        """Run `uv <arguments>` to its end.

        Raises:
            UvFailed: it failed, or took longer than `limit_s`.
        """
        kept: deque[str] = deque(maxlen=KEPT_LINES)
        with subprocess.Popen(
            [self._program, *arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            limit = Timer(limit_s, _end, [process])
            limit.start()
            try:
                for line in process.stderr or ():
                    kept.append(line.strip())
                    if line.startswith("Downloading "):
                        self._say(f"  {line.strip()}")
            except BaseException:
                _end(process)
                raise
            finally:
                limit.cancel()
        if process.returncode < 0:
            raise UvFailed(f"uv was ended by signal {-process.returncode}; it may take {limit_s:.0f} s")
        if process.returncode != 0:
            raise UvFailed(failure_reason(kept))


def failure_reason(lines: Sequence[str]) -> str:
    """uv's error in one line, without the drawing around it and the hints after it."""
    starts = [i for i, line in enumerate(lines) if line.startswith(("error", _DRAWING[0]))]
    output = (line.strip(_DRAWING) for line in list(lines)[starts[0] if starts else 0 :])
    reason = " ".join(line for line in output if line)
    return reason.partition(" hint:")[0].removeprefix("error: ") or "uv gave no reason"


def _end(process: "subprocess.Popen[str]") -> None:
    """End uv and what it started: a child that went on would hold the pipe that we read."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _find_uv() -> str:
    try:
        import uv
    except ModuleNotFoundError:
        raise UvFailed(f"{sys.executable} has no uv: install requirements.txt into it") from None
    return uv.find_uv_bin()
