"""Fixtures: one ingress around the real HAProxy, in a folder of its own."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.engine_agent.ingress.ingresses import RunningIngress


@pytest_asyncio.fixture
async def ingress(tmp_path: Path) -> AsyncIterator[RunningIngress]:
    async with RunningIngress(tmp_path / "home").running() as running:
        yield running
