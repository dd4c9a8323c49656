"""Fixtures: one ingress around the real HAProxy, in a folder of its own."""

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.engine_agent.ingress.ingresses import RunningIngress

ENDER = Path(__file__).with_name("ender.py")


@pytest.fixture(scope="session", autouse=True)
def haproxies_end_with_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Also when it is killed. Fixtures end their own before that."""
    ender = subprocess.Popen(
        [sys.executable, "-S", ENDER, tmp_path_factory.getbasetemp()],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    yield
    ender.communicate()


@pytest_asyncio.fixture
async def ingress(tmp_path: Path) -> AsyncIterator[RunningIngress]:
    async with RunningIngress(tmp_path / "home").running() as running:
        yield running
