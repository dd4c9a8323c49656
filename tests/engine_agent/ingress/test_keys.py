"""Who is served: by a real HAProxy that knows keys only by their hashes, and no control plane."""

import time

import pytest

from engine_agent.ingress.desired import DesiredHaproxy
from engine_agent.protocol.ingress_messages import Split
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import HOP_SECRET, RunningIngress, pool
from tests.engine_agent.ingress.keyed import Keyed, keyed
from tests.engine_agent.ingress.marks import marked
from tests.engine_agent.ingress.traffic import BODY

pytestmark = pytest.mark.processes

OTHERS = {"Authorization": "Bearer sw_ffffffff_" + "0" * 48}


async def asked(
    ingress: RunningIngress, key: Keyed | None = None, body: bytes = BODY, headers: dict[str, str] | None = None
) -> int:
    answer = await ingress.post(body, **(key.headers if key else {}), **(headers or {}))
    return answer.status_code


async def refusal(ingress: RunningIngress, headers: dict[str, str]) -> tuple[int, str]:
    answer = await ingress.post(BODY, **headers)
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.asyncio
async def test_without_keys_everybody_is_served_and_nobody_says_whose_he_is(ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        headers = {"Authorization": "Bearer EMPTY", "X-Switchyard-Tenant": "rufus"}
        assert (await ingress.post(BODY, **headers)).status_code == 200
        assert await refusal(ingress, OTHERS) == (401, "invalid_api_key")
        assert await refusal(ingress, {"x-api-key": f"sw_ffffffff_{'0' * 48}"}) == (401, "invalid_api_key")
        assert (await ingress.post(BODY, **{"x-api-key": "none"})).status_code == 200
        request, other = cell.requests
        assert "x-api-key" not in other.headers
        assert request.headers.keys().isdisjoint({"authorization", "x-switchyard-tenant", "x-switchyard-key"})


@pytest.mark.asyncio
async def test_a_key_opens_and_its_tenant_goes_with_the_request_and_its_text_does_not(ingress: RunningIngress) -> None:
    key = keyed(tenant="rufus")
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell), keys=(key.entry,), keys_required=True)
        await ingress.sees(**{cell.name: "up"})
        assert (
            await asked(ingress, key, headers={"X-Switchyard-Tenant": "somebody-else", "X-Switchyard-Key": "ffffffff"})
            == 200
        )
        assert await refusal(ingress, {}) == (401, "missing_api_key")
        assert await refusal(ingress, {"Authorization": "Bearer none"}) == (401, "missing_api_key")
        assert await refusal(ingress, OTHERS) == (401, "invalid_api_key")
        (request,) = cell.requests
        assert request.headers["x-switchyard-tenant"] == "rufus"
        assert request.headers["x-switchyard-key"] == key.entry.prefix
        assert not any(key.text in text for text in request.headers.values())


@pytest.mark.asyncio
async def test_keys_of_a_tenant_over_its_quota_are_refused_as_openai_does_until_the_table_says_otherwise(
    ingress: RunningIngress,
) -> None:
    ours, theirs = keyed("0a0a0a0a", tenant="rufus"), keyed("0b0b0b0b", tenant="ada")
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell), keys=(ours.entry, theirs.entry), tenants_over_quota=("rufus",))
        await ingress.sees(**{cell.name: "up"})
        worker = ingress.worker_pid
        answer = await ingress.post(BODY, **ours.headers)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (429, "insufficient_quota", "insufficient_quota")
        assert "retry-after" not in answer.headers
        assert [await asked(ingress, key) for key in (theirs, None)] == [200, 200]
        await ingress.route(pool(cell), keys=(ours.entry, theirs.entry))
        assert await asked(ingress, ours) == 200
        assert ingress.worker_pid == worker


@pytest.mark.asyncio
async def test_keys_come_and_go_without_a_reload_and_a_revoked_one_is_refused_even_where_none_is_needed(
    ingress: RunningIngress,
) -> None:
    first, second = keyed("0a0a0a0a"), keyed("0b0b0b0b")
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell), keys=(first.entry,))
        await ingress.sees(**{cell.name: "up"})
        worker = ingress.worker_pid
        assert [await asked(ingress, key) for key in (first, second, None)] == [200, 401, 200]
        await ingress.route(pool(cell), keys=(second.entry,))
        assert [await asked(ingress, key) for key in (first, second, None)] == [401, 200, 200]
        await ingress.route(pool(cell), keys=(second.entry,), keys_required=True)
        assert [await asked(ingress, key) for key in (first, second, None)] == [401, 200, 401]
        assert (await ingress.http.get("/v1/models")).status_code == 401
        assert (await ingress.http.get("/v1/models", headers=second.headers)).status_code == 200
        assert (await ingress.http.get("/healthz")).status_code == 200
        assert ingress.worker_pid == worker


@pytest.mark.asyncio
async def test_an_expired_key_is_refused_by_the_ingresses_own_clock(ingress: RunningIngress) -> None:
    gone, lasting = keyed("0a0a0a0a", expires_at=time.time() - 1), keyed("0b0b0b0b", expires_at=time.time() + 3600)
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell), keys=(gone.entry, lasting.entry))
        await ingress.sees(**{cell.name: "up"})
        assert await asked(ingress, lasting) == 200
        assert await refusal(ingress, gone.headers) == (401, "expired_api_key")


@pytest.mark.asyncio
async def test_a_key_opens_only_its_deployments_with_short_and_with_long_requests(ingress: RunningIngress) -> None:
    key = keyed(pools=("demo",))
    long = b'{"messages": "%s", "model": "%s"}'
    async with FakeCell().running() as cell, FakeCell().running() as other:
        await ingress.route(pool(cell), pool(other, name="other", models=("other",)), keys=(key.entry,))
        await ingress.sees(**{cell.name: "up", other.name: "up"})
        for size in (10, 500_000):
            assert await asked(ingress, key, long % (b"x" * size, b"demo")) == 200
            refused = await ingress.post(long % (b"x" * size, b"other"), **key.headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
            assert await asked(ingress, None, long % (b"x" * size, b"other"), {"X-Switchyard-Key": "0a1b2c3d"}) == 200
        assert [request.headers["x-switchyard-tenant"] for request in cell.requests] == ["rufus", "rufus"]
        assert [request.headers["x-switchyard-key"] for request in cell.requests] == [key.entry.prefix] * 2
        assert all("x-switchyard-key" not in request.headers for request in other.requests)


@pytest.mark.asyncio
async def test_a_request_more_urgent_than_its_key_allows_is_made_less_urgent(ingress: RunningIngress) -> None:
    batch, near = keyed("0a0a0a0a", serving_class="batch"), keyed("0b0b0b0b", serving_class="near_realtime")
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell), keys=(batch.entry, near.entry))
        await ingress.sees(**{cell.name: "up"})
        for key, said in ((batch, "realtime"), (batch, ""), (near, "realtime"), (near, "batch")):
            assert await asked(ingress, key, headers={"X-Switchyard-Class": said} if said else {}) == 200
        classes = [request.headers["x-switchyard-class"] for request in cell.requests]
        assert classes == ["batch", "batch", "near_realtime", "batch"]


@pytest.mark.asyncio
async def test_a_request_from_another_region_was_asked_there_and_keeps_its_tenant_and_key(
    ingress: RunningIngress,
) -> None:
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell), keys_required=True)
        await ingress.sees(**{cell.name: "up"})
        tenant = {"X-Switchyard-Tenant": "rufus"}
        said = {**tenant, "X-Switchyard-Hop": "us-west-2", "X-Switchyard-Key": "ffffffff"}
        assert await asked(ingress, headers=said) == 401, "anybody can say that"
        proven = marked(HOP_SECRET, "us-west-2~0a0b0c0d", tenant="rufus", body=BODY)
        assert await asked(ingress, headers=proven) == 401, "not where applications come in"
        for mark in (proven, {**marked(HOP_SECRET, tenant="rufus", body=BODY), "X-Switchyard-Key": "ffffffff"}):
            assert (await ingress.post_hop(BODY, **mark)).status_code == 200
        assert [request.headers["x-switchyard-tenant"] for request in cell.requests] == ["rufus", "rufus"]
        assert [request.headers.get("x-switchyard-key") for request in cell.requests] == ["0a0b0c0d", None]


@pytest.mark.asyncio
async def test_a_key_for_some_pools_is_shown_the_models_that_it_opens_and_no_others(ingress: RunningIngress) -> None:
    scoped, free = keyed("0a0a0a0a", pools=("demo",)), keyed("0b0b0b0b")
    splits = (Split("both", {"demo": 1, "other": 1}), Split("theirs", {"other": 1}))
    async with FakeCell().running() as cell:
        await ingress.route(
            pool(cell), pool(name="other", models=("org/o",)), splits=splits, keys=(scoped.entry, free.entry)
        )

        async def shown(key: Keyed) -> list[str]:
            listing = (await ingress.http.get("/v1/models", headers=key.headers)).json()
            assert listing["object"] == "list"
            return [model["id"] for model in listing["data"]]

        assert await shown(scoped) == ["both", "demo"]
        assert await shown(free) == ["both", "demo", "org/o", "theirs"]
        one = {
            model: (await ingress.http.get(f"/v1/models/{model}", headers=scoped.headers)).status_code
            for model in ("demo", "both", "org/o", "theirs", "none")
        }
        assert one == {"demo": 200, "both": 200, "org/o": 404, "theirs": 404, "none": 404}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "headers",
    [
        [("X-Switchyard-Class", "batch"), ("X-Switchyard-Class", "realtime")],
        [("X-Switchyard-Class", "batch, realtime")],
        [("X-Switchyard-Deadline-Ms", "5"), ("x-switchyard-deadline-ms", "6")],
        [("Authorization", "Bearer sw_a"), ("Authorization", "Bearer b")],
        [("X-Switchyard-Hop", "a|1|x"), ("X-Switchyard-Hop", "b|1|y")],
        [("X-Session-Id", "a"), ("X-Session-Id", "b")],
    ],
)
async def test_a_header_that_decides_is_there_once(ingress: RunningIngress, headers: list[tuple[str, str]]) -> None:
    key = keyed(serving_class="batch")
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell), keys=(key.entry,))
        await ingress.sees(**{cell.name: "up"})
        answer = await ingress.http.post("/v1/chat/completions", content=BODY, headers=[*key.headers.items(), *headers])
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "doubled_header")
        assert cell.requests == []


@pytest.mark.asyncio
async def test_a_table_that_differs_in_keys_alone_starts_no_process(
    ingress: RunningIngress, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int] = []
    original = ingress.haproxy.check

    async def check(desired: DesiredHaproxy) -> None:
        checked.append(desired.revision)
        await original(desired)

    one, another = keyed("0a0a0a0a"), keyed("0b0b0b0b")
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell), keys=(one.entry,))
        await ingress.sees(**{cell.name: "up"})
        monkeypatch.setattr(ingress.haproxy, "check", check)
        await ingress.route(pool(cell), keys=(one.entry, another.entry))
        assert (await ingress.post(BODY, **another.headers)).status_code == 200
        await ingress.route(pool(cell), keys=(one.entry,))
        assert (await ingress.post(BODY, **another.headers)).status_code == 401
        assert not checked
        await ingress.route(pool(cell, models=("demo", "other")), keys=(one.entry,))
        assert checked == [ingress.revision]
