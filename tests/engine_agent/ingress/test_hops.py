"""A request counts as another region's only if it proves that; whoever says so without proof is an application."""

import pytest

from engine_agent.ingress.bad_table import BadTable
from engine_agent.ingress.hops import hop_entries
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import HOP_SECRET, RunningIngress, pool
from tests.engine_agent.ingress.marks import marked

pytestmark = pytest.mark.processes

BODY = b'{"model": "demo"}'
NEW_SECRET = "e" * 40


async def is_believed(ingress: RunningIngress, cell: FakeCell, headers: dict[str, str]) -> bool:
    answer = await ingress.post(BODY, **headers)
    assert answer.status_code == 200
    return "x-switchyard-hop" in cell.requests[-1].headers


@pytest.mark.asyncio
async def test_only_a_fresh_mark_of_a_known_secret_for_this_request_counts(ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell:
        ingress.hop_secrets = (NEW_SECRET, HOP_SECRET)
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        assert await is_believed(ingress, cell, marked(NEW_SECRET))
        assert await is_believed(ingress, cell, marked(HOP_SECRET)), "the secret before is still believed"
        of_another = marked(HOP_SECRET, request_id="request-2") | {"X-Request-Id": "request-1"}
        changed = {"X-Switchyard-Hop": marked(HOP_SECRET)["X-Switchyard-Hop"].replace("us-west-2", "us-east-1")}
        outsiders = [
            {"X-Switchyard-Hop": "us-west-2"},
            {"X-Switchyard-Hop": ""},
            {"X-Switchyard-Hop": "||"},
            marked("d" * 40),
            marked(HOP_SECRET, age_s=120),
            marked(HOP_SECRET, age_s=-120),
            of_another,
            marked(HOP_SECRET) | changed,
        ]
        assert [await is_believed(ingress, cell, headers) for headers in outsiders] == [False] * len(outsiders)
        worker = ingress.worker_pid
        ingress.hop_secrets = (NEW_SECRET,)
        await ingress.route(pool(cell))
        assert not await is_believed(ingress, cell, marked(HOP_SECRET))
        assert await is_believed(ingress, cell, marked(NEW_SECRET))
        assert ingress.worker_pid == worker, "a secret changes without a reload"


@pytest.mark.parametrize(
    ("secrets", "said"),
    [(("a" * 40,) * 3, "at most 2"), (("short",), "32 or more"), (("a b" * 20,), "letters and digits")],
)
def test_secrets_that_prove_little_are_refused(secrets: tuple[str, ...], said: str) -> None:
    with pytest.raises(BadTable, match=said):
        hop_entries(secrets)
