"""A listener for agents, and one that has enrolled. Models can be imported once Django is set up."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from fleet.agents.consumers.hub import AgentHub
    from tests.controlplane.agent_listener.agents import Agent


@pytest_asyncio.fixture
async def hub() -> AsyncIterator["AgentHub"]:
    from tests.controlplane.agent_listener.agents import running_hub

    async with running_hub() as hub:
        yield hub


@pytest.fixture(autouse=True)
def _of_this_host(tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.SWITCHYARD_HOME = tmp_path / "control-host"
    settings.AGENT_URLS = []
    monkeypatch.setattr("controlplane.agent_listener.LOOK_EVERY_S", 0.05)


@pytest_asyncio.fixture
async def port(hub: "AgentHub") -> AsyncIterator[int]:
    from tests.controlplane.agent_listener.agents import listening_for

    async with listening_for(hub) as port:
        yield port


@pytest_asyncio.fixture
async def agent(port: int, tmp_path: Path) -> "Agent":
    from tests.controlplane.agent_listener.agents import enrolled

    return await enrolled(tmp_path / "n-a", port)
