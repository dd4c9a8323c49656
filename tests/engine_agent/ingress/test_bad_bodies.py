"""Bodies that name no model cost the ingress little, whoever sends them, and nobody else anything."""

import asyncio

import pytest

from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, pool
from tests.engine_agent.ingress.traffic import BODY

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]
LONG = b'{"a":[' + b"1," * 14_000 + b"1]}"
LARGE = b'{"a":"' + b"x" * 60_000 + b'"}'


async def statuses(ingress: RunningIngress, body: bytes, count: int) -> list[int]:
    return [(await ingress.post(body)).status_code for _ in range(count)]


@pytest.mark.parametrize(("body", "read"), [(LONG, 5), (LARGE, 9)])
async def test_a_source_that_sends_many_is_answered_unread_and_its_good_requests_go_on(
    ingress: RunningIngress, body: bytes, read: int
) -> None:
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        answers = await statuses(ingress, body, 12)
        assert answers[0] == 400
        assert 400 not in answers[read:], answers
        assert await statuses(ingress, b"{}", 1) == [429]
        refused = await ingress.post(body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
        assert await statuses(ingress, BODY, 3) == [200] * 3, "what names its model where it is found is not asked"
        assert await statuses(ingress, b'{"model":"nobody"}', 1) == [404]


async def test_a_client_with_a_mistake_is_told_what_is_wrong_many_times(ingress: RunningIngress) -> None:
    await ingress.route()
    assert await statuses(ingress, b'{"modell":"demo"}', 60) == [400] * 60


async def test_many_sources_together_have_one_budget(ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        deep = b'{"a":' + b"[" * 30 + b"]" * 30 + b',"b":"' + b"x" * 30_000 + b'","model":"demo"}'
        answers = await asyncio.gather(*(ingress.post(deep) for _ in range(80)))
        assert {answer.status_code for answer in answers} == {200, 429}, "good ones are read within the same budget"
        assert await statuses(ingress, BODY, 3) == [200] * 3
