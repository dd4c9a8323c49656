"""Starts short-lived real processes for these tests, and waits for what they become."""

import asyncio
import io
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from controlplane.embedded.console import Console
from controlplane.embedded.processes import HOME_MARK, Program
from controlplane.embedded.state_directory import StateDirectory

ROOT = Path(__file__).resolve().parents[3]

_DEADLINE_S = 60.0
_POLL_S = 0.02


def python_program(
    code: str, home: StateDirectory, *arguments: str, environment: Mapping[str, str] | None = None
) -> Program:
    """`code` as a program of `home`."""
    return Program(
        arguments=(sys.executable, "-c", code, *arguments),
        environment={**os.environ, HOME_MARK: str(home.path), **(environment or {})},
        folder=ROOT,
    )


def prepared_home(folder: Path) -> StateDirectory:
    home = StateDirectory(folder.resolve())
    home.prepare()
    return home


def silent_console() -> Console:
    return Console(io.StringIO())


def eventually(is_so: Callable[[], bool], *, within_s: float = _DEADLINE_S) -> bool:
    """Whether it becomes so before the deadline."""
    deadline = time.monotonic() + within_s
    while not (now := is_so()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return now


async def eventually_async(is_so: Callable[[], bool], *, within_s: float = _DEADLINE_S) -> bool:
    """As `eventually`, leaving the event loop to the processes under test."""
    deadline = time.monotonic() + within_s
    while not (now := is_so()) and time.monotonic() < deadline:  # noqa: ASYNC110 - the state is in another process
        await asyncio.sleep(_POLL_S)
    return now
