"""A request for an adapter reaches the engine under the adapter's name, or it does not reach it."""

import json

import pytest

from tests.engine_agent.cell_proxy.http_stream import ask, request
from tests.engine_agent.cell_proxy.local_proxy import proxy_of

pytestmark = pytest.mark.asyncio
PATH = "/v1/completions"


def routed(model: str, **more: str) -> bytes:
    """A request as an ingress sends it that has found this model's name in the body."""
    body = json.dumps({"model": model, "prompt": "x" * int(more.pop("letters", "1"))}).encode()
    headers = {"x_switchyard_deployment": "chat", "x_switchyard_model": model.replace("/", "%2F"), **more}
    return request(PATH, body, **headers)


@pytest.mark.parametrize("letters", ["1", str(2 * 1024 * 1024)])
async def test_the_engine_is_asked_for_the_adapter_and_for_its_own_model_by_other_names(letters: str) -> None:
    async with proxy_of() as proxy:
        for model, adapter, wanted in (("acme/tuned", "acme%2Ftuned", "acme/tuned"), ("alias", "", "tiny")):
            more = {"x_switchyard_adapter": adapter} if adapter else {}
            answer = await ask(proxy.port, routed(model, letters=letters, **more))
            assert answer.status == 200
            at_engine = proxy.engine.requests[-1]
            assert json.loads(at_engine.body)["model"] == wanted
            assert "x-switchyard-adapter" not in at_engine.headers


async def test_a_cell_without_the_adapter_refuses_and_another_may_be_tried() -> None:
    async with proxy_of() as proxy:
        refused = await ask(proxy.port, routed("acme/other", x_switchyard_adapter="acme%2Fother"))
        assert (refused.status, refused.headers["x-switchyard-retry"]) == (503, "1")
        assert refused.json()["error"]["code"] == "adapter_not_here"
        assert not proxy.engine.requests


async def test_what_an_adapter_used_is_counted_apart() -> None:
    async with proxy_of() as proxy:
        for adapter in ({"x_switchyard_adapter": "acme%2Ftuned"}, {}):
            model = "acme/tuned" if adapter else "alias"
            await ask(proxy.port, routed(model, x_switchyard_key="0a1b2c3d", **adapter))
        rows = proxy.cell.meter.usage.rows()
        assert [(row.key, row.adapter, row.requests_total) for row in rows] == [
            ("0a1b2c3d", "acme/tuned", 1),
            ("0a1b2c3d", "", 1),
        ]
