"""Pages of other origins: a key lists those that may use it, and everybody else's browser keeps the answer."""

import httpx
import pytest

from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, pool
from tests.engine_agent.ingress.keyed import keyed
from tests.engine_agent.ingress.traffic import BODY

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]

APP, OTHER = "https://app.example", "http://localhost:3000"
KEY = keyed("0a0a0a0a", origins=(APP,))
SECOND = keyed("0b0b0b0b", origins=(OTHER,))
ALLOWED = "access-control-allow-origin"


async def preflight(ingress: RunningIngress, origin: str, path: str = "/v1/chat/completions") -> httpx.Response:
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    headers["Access-Control-Request-Headers"] = "authorization,content-type,x-stainless-lang"
    return await ingress.http.options(path, headers=headers)


async def test_a_preflight_is_answered_for_origins_of_any_key_on_paths_of_the_table(ingress: RunningIngress) -> None:
    await ingress.route(pool(), keys=(KEY.entry, SECOND.entry), keys_required=True)
    for origin in (APP, OTHER):
        for path in ("/v1/chat/completions", "/v1/models", "/v1/models/demo", "/health", "/v1/messages"):
            answer = await preflight(ingress, origin, path)
            assert (answer.status_code, answer.headers[ALLOWED]) == (204, origin), path
            assert answer.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-lang"
            assert "POST" in answer.headers["access-control-allow-methods"]
            assert answer.headers["vary"] == "Origin"
    for origin, path in (("https://evil.example", "/v1/models"), (APP, "/v1/load_lora_adapter"), ("null", "/health")):
        answer = await preflight(ingress, origin, path)
        assert answer.status_code in {401, 404, 405}
        assert ALLOWED not in answer.headers


async def test_an_answer_is_for_pages_that_its_own_key_lists(ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell), keys=(KEY.entry, SECOND.entry, keyed().entry))
        await ingress.sees(**{cell.name: "up"})
        for key, origin, is_allowed in ((KEY, APP, True), (KEY, OTHER, False), (keyed(), APP, False)):
            for body, status in ((BODY, 200), (b'{"model":"none"}', 404), (b"{}", 400)):
                answer = await ingress.post(body, Origin=origin, **key.headers)
                assert answer.status_code == status
                assert (answer.headers.get(ALLOWED) == origin) == is_allowed
                assert answer.headers["vary"] == "Origin"
        answer = await ingress.post(BODY, Origin=APP)
        assert (answer.status_code, ALLOWED in answer.headers) == (200, False), "there is no key that lists it"
        listing = await ingress.http.get("/v1/models", headers={"Origin": APP, **KEY.headers})
        assert listing.headers[ALLOWED] == APP
        assert "x-request-id" in listing.headers["access-control-expose-headers"].lower()


async def test_an_origin_is_taken_off_a_key_without_a_reload(ingress: RunningIngress) -> None:
    await ingress.route(pool(), keys=(KEY.entry, SECOND.entry))
    worker = ingress.worker_pid
    await ingress.route(pool(), keys=(keyed("0a0a0a0a").entry, SECOND.entry))
    assert (await preflight(ingress, APP)).status_code == 405
    assert ingress.worker_pid == worker


async def test_without_such_keys_no_answer_speaks_of_origins(ingress: RunningIngress) -> None:
    await ingress.route(pool(), keys=(keyed().entry,))
    answer = await preflight(ingress, APP)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert ALLOWED not in answer.headers
    assert "vary" not in answer.headers
