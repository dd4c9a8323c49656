"""Two requests that once took every cell of a model out of service in both regions, through real parts of both: their
clients get 400, and no cell and no other client notices."""

import asyncio
from pathlib import Path

import pytest

from tests.engine_agent.attacks.judge import changes
from tests.engine_agent.engines.sim.cells import MODEL
from tests.engine_agent.fuzzing import good_requests, servers
from tests.engine_agent.ingress.ingresses import RunningIngress
from tests.engine_agent.two_regions import two_regions

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
ASKED = b'"model":"%b","max_tokens":4,"messages":[{"role":"user","content":"Say hi."}]' % MODEL.encode()
DEADLY: dict[str, bytes] = {
    "invalid_json": b"{%b,%b}" % (ASKED, b'"metadata":' + b'{"a":' * 1000 + b"1" + b"}" * 1000),
    "integer_above_max_value": b'{%b,"n":10000}' % ASKED,
}
TIMES = 8
"""As often as it took to mark each cell of both regions down."""


async def refuses(ingress: RunningIngress, code: str, body: bytes) -> None:
    openai, anthropic = await asyncio.gather(*(ingress.http.post(path, content=body) for path in (CHAT, MESSAGES)))
    assert (openai.status_code, anthropic.status_code) == (400, 400)
    error = openai.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert (anthropic.json()["type"], anthropic.json()["error"]["type"]) == ("error", "invalid_request_error")


async def test_a_request_of_death_is_its_clients_400_in_both_regions(tmp_path: Path) -> None:
    async with two_regions(tmp_path) as ingresses:
        before = [await servers(ingress) for ingress in ingresses]
        failed: list[str] = []
        async with good_requests(ingresses, MODEL, failed):
            for code, body in DEADLY.items():
                for ingress in ingresses:
                    await asyncio.gather(*(refuses(ingress, code, body) for _ in range(TIMES)))
        assert not failed
        for ingress, servers_before in zip(ingresses, before, strict=True):
            assert changes(servers_before, await servers(ingress)) == []
