"""The listener of people serves agents nothing, that of agents serves people nothing."""

from typing import Any

import pytest

from controlplane.request_bodies import AGENT_ONLY_PATHS, PathsOf


async def answered(application: PathsOf, kind: str, path: str) -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": f"{kind}.connect"}

    await application({"type": kind, "path": path}, receive, send)
    return sent


async def inner(scope: Any, receive: Any, send: Any) -> None:
    await send(scope["path"])


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(
    ("path", "is_agents"),
    [
        *(("/agents/ws", True), ("/agents/enrol", True), ("/join", True), ("/", False), ("/live", False)),
        *(("//agents/ws", True), ("///agents/enrol", True), ("//join", True), ("agents/ws", True), ("//live", False)),
    ],
)
async def test_each_listener_serves_its_own_paths(kind: str, path: str, is_agents: bool) -> None:
    for of_agents in (True, False):
        application = PathsOf(inner, AGENT_ONLY_PATHS, are_served=of_agents)
        sent = await answered(application, kind, path)
        if of_agents == is_agents:
            assert sent == [path]
        else:
            assert sent[0]["status"] == 404
            assert sent[0]["type"].startswith("http" if kind == "http" else "websocket.http")
