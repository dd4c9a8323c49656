"""The bell that HAProxy rings for the first held request."""

import asyncio
import gc
import socket
from pathlib import Path

import pytest

from engine_agent.ingress.held_bell import HeldBell
from engine_agent.ingress.hold import BELL_SOCKET
from engine_agent.ingress.settings import IngressSettings
from tests.engine_agent.fake_control_plane import eventually


@pytest.mark.asyncio
async def test_rings_are_heard_and_one_at_the_end_leaves_nothing_open(tmp_path: Path) -> None:
    heard: list[None] = []
    bell = HeldBell(IngressSettings("i-1", "us-east-1", tmp_path, port=1), lambda: heard.append(None))
    path = tmp_path / BELL_SOCKET
    for turns in range(8):
        heard.clear()
        listening = asyncio.create_task(bell.listen())
        await eventually(lambda: path.exists() and path.stat().st_mode & 0o777 == 0o600)
        await asyncio.sleep(0)
        with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as last:
            first.connect(str(path))
            await eventually(lambda: heard)
            last.connect(str(path))
            for _ in range(turns):
                await asyncio.sleep(0)
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            assert first.recv(1) == b""
            path.unlink()
    gc.collect()  # what is open is warned of, which fails
