"""Shared fixtures for tests of the node agent."""

from collections.abc import AsyncIterator
from contextlib import closing

import pytest_asyncio

from engine_agent.node.http import HttpClient


@pytest_asyncio.fixture
async def http() -> AsyncIterator[HttpClient]:
    with closing(HttpClient()) as client:
        yield client
