"""A request counts as another region's only with a proven mark."""

from typing import Any

import pytest

from engine_agent.ingress.bad_table import BadTable
from engine_agent.ingress.routing_maps import hop_entries
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import HOP_SECRET, RunningIngress, pool
from tests.engine_agent.ingress.marks import REQUEST_ID, marked

pytestmark = pytest.mark.processes

BODY = b'{"model": "demo"}'
NEW_SECRET = "e" * 40


async def is_believed(ingress: RunningIngress, cell: FakeCell, headers: dict[str, str], body: bytes = BODY) -> bool:
    answer = await ingress.post_hop(body, **headers)
    assert answer.status_code == 200
    return "x-switchyard-hop" in cell.requests[-1].headers


def of_size(size: int, letter: bytes = b"x") -> bytes:
    return b'{"model": "demo", "prompt": "' + letter * size + b'"}'


@pytest.mark.asyncio
async def test_only_a_fresh_mark_of_a_known_secret_for_this_request_counts(ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell:
        ingress.hop_secrets = (NEW_SECRET, HOP_SECRET)
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        assert await is_believed(ingress, cell, marked(NEW_SECRET))
        assert await is_believed(ingress, cell, marked(HOP_SECRET)), "the secret before is still believed"
        of_another = marked(HOP_SECRET, request_id="request-2") | {"X-Request-Id": "request-1"}
        mark = marked(HOP_SECRET)["X-Switchyard-Hop"]
        changed = {"X-Switchyard-Hop": mark.replace("us-west-2", "us-east-1")}
        acme: dict[str, Any] = {"tenant": "a|b", "priority": "batch", "pool": "pool.demo"}
        assert await is_believed(ingress, cell, marked(HOP_SECRET, **acme))
        outsiders = [
            {"X-Switchyard-Hop": "us-west-2"},
            {"X-Switchyard-Hop": ""},
            {"X-Switchyard-Hop": "||"},
            marked("d" * 40),
            marked(HOP_SECRET, age_s=120),
            marked(HOP_SECRET, age_s=-120),
            of_another,
            marked(HOP_SECRET) | changed,
            marked(HOP_SECRET, method="PUT"),
            marked(HOP_SECRET, path="/v1/completions"),
            marked(HOP_SECRET, path="/v1/chat/completions?a"),
            marked(HOP_SECRET) | {"X-Switchyard-Tenant": "globex"},
            marked(HOP_SECRET, **acme) | {"X-Switchyard-Tenant": "globex"},
            marked(HOP_SECRET, **acme) | {"X-Switchyard-Class": "realtime"},
            marked(HOP_SECRET, **acme) | {"X-Switchyard-Pool": "pool.other"},
            {"X-Request-Id": REQUEST_ID, "X-Switchyard-Hop": "|".join(mark.split("|")[:2] + mark.split("|")[3:])},
        ]
        assert [await is_believed(ingress, cell, headers) for headers in outsiders] == [False] * len(outsiders)
        worker = ingress.worker_pid
        ingress.hop_secrets = (NEW_SECRET,)
        await ingress.route(pool(cell))
        assert not await is_believed(ingress, cell, marked(HOP_SECRET))
        assert await is_believed(ingress, cell, marked(NEW_SECRET))
        assert ingress.worker_pid == worker, "a secret changes without a reload"


@pytest.mark.asyncio
async def test_a_mark_opens_one_body_and_no_other_of_any_size(ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell), keys_required=True)
        await ingress.sees(**{cell.name: "up"})
        for size in (0, 1, 30_000, 300 * 1024, 2 * 1024 * 1024):
            body = of_size(size)
            captured = marked(HOP_SECRET, body=body)
            assert await is_believed(ingress, cell, captured, body)
            seen = len(cell.requests)
            for other in (of_size(size, b"y"), body + b" ", of_size(size + 1), of_size(3), of_size(200_000, b"z")):
                if other == body:
                    continue
                refused = await ingress.post_hop(other, **captured)
                assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forged_mark"), size
            stated = {"X-Switchyard-Body": captured["X-Switchyard-Hop"].split("|")[2]}
            assert (await ingress.post_hop(of_size(size + 2), **captured, **stated)).status_code == 403
            assert len(cell.requests) == seen


@pytest.mark.parametrize(
    ("secrets", "said"),
    [(("a" * 40,) * 3, "at most 2"), (("short",), "32 or more"), (("a b" * 20,), "letters and digits")],
)
def test_secrets_that_prove_little_are_refused(secrets: tuple[str, ...], said: str) -> None:
    with pytest.raises(BadTable, match=said):
        hop_entries(secrets)
