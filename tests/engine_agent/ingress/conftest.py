"""Fixtures: an ingress around the real HAProxy, per test or per file."""

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
    """Even if the session is killed. Fixtures stop their own before."""
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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_ingress(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningIngress]:
    """One ingress for all tests of a file, in the loop of the module. Each test has its own cells, table and keys."""
    async with RunningIngress(tmp_path_factory.mktemp("home")).running() as running:
        yield running
