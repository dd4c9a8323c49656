"""A cell serves what is for its own start only: an ingress that was cut off may still believe in an earlier one."""

import pytest

from tests.engine_agent.cell_proxy.http_stream import ask, request
from tests.engine_agent.cell_proxy.local_proxy import proxy_of

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("server", ["c-1-g2", "c-1-g10", "c-2-g1", "c-1", "x" * 5000])
async def test_a_request_for_another_start_is_refused_and_may_be_tried_elsewhere(server: str) -> None:
    async with proxy_of() as proxy:
        refused = await ask(proxy.port, request("/v1/completions", b"{}", x_switchyard_server=server))
        assert (refused.status, refused.headers["x-switchyard-retry"]) == (503, "1")
        error = refused.json()["error"]
        assert error["code"] == "other_generation"
        assert error["message"] == f"the request is for {server[:80]}, this is c-1-g1"
        health = await ask(proxy.port, request("/healthz", x_switchyard_server=server))
        assert (health.status, health.json()["error"]["code"]) == (503, "other_generation")
        assert not proxy.engine.requests


async def test_a_request_for_this_start_is_served_and_the_engine_is_not_told() -> None:
    async with proxy_of() as proxy:
        served = await ask(proxy.port, request("/v1/completions", b"{}", x_switchyard_server="c-1-g1"))
        assert served.status == 200
        (at_engine,) = proxy.engine.requests
        assert "x-switchyard-server" not in at_engine.headers
        assert (await ask(proxy.port, request("/healthz", x_switchyard_server="c-1-g1"))).status == 200
