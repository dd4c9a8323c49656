"""Authentication by a real HAProxy that only has hashes of keys, without a control plane."""

import hashlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import pytest_asyncio

from engine_agent.ingress.bad_table import BadTable
from engine_agent.ingress.desired import DesiredHaproxy
from engine_agent.ingress.key_map import CONTENT_ENTRY, NEVER, REQUIRED_ENTRY, key_entries
from engine_agent.protocol.codec import MessageAssembly, decode_down, frames_of
from engine_agent.protocol.ingress_messages import ApiKey, RoutingTable, Split, TablePart
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import HOP_SECRET, RunningIngress, pool
from tests.engine_agent.ingress.keyed import Keyed, keyed
from tests.engine_agent.ingress.marks import marked
from tests.engine_agent.ingress.traffic import BODY, SteadyTraffic

OTHERS = {"Authorization": "Bearer sw_ffffffffffffff_" + "0" * 48}


async def asked(
    ingress: RunningIngress, key: Keyed | None = None, body: bytes = BODY, headers: dict[str, str] | None = None
) -> int:
    answer = await ingress.post(body, **(key.headers if key else {}), **(headers or {}))
    return answer.status_code


async def refusal(ingress: RunningIngress, headers: dict[str, str]) -> tuple[int, str]:
    answer = await ingress.post(BODY, **headers)
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.asyncio
@pytest.mark.processes
async def test_without_keys_everybody_is_served_and_nobody_says_whose_he_is(ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        headers = {"Authorization": "Bearer EMPTY", "X-Switchyard-Tenant": "rufus"}
        assert (await ingress.post(BODY, **headers)).status_code == 200
        assert await refusal(ingress, OTHERS) == (401, "invalid_api_key")
        assert await refusal(ingress, {"x-api-key": f"sw_ffffffffffffff_{'0' * 48}"}) == (401, "invalid_api_key")
        assert (await ingress.post(BODY, **{"x-api-key": "none"})).status_code == 200
        request, other = cell.requests
        assert "x-api-key" not in other.headers
        assert request.headers.keys().isdisjoint({"authorization", "x-switchyard-tenant", "x-switchyard-key"})


@pytest.mark.asyncio
@pytest.mark.processes
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
@pytest.mark.processes
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
@pytest.mark.processes
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
@pytest.mark.processes
async def test_an_expired_key_is_refused_by_the_ingresses_own_clock(ingress: RunningIngress) -> None:
    gone, lasting = keyed("0a0a0a0a", expires_at=time.time() - 1), keyed("0b0b0b0b", expires_at=time.time() + 3600)
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell), keys=(gone.entry, lasting.entry))
        await ingress.sees(**{cell.name: "up"})
        assert await asked(ingress, lasting) == 200
        assert await refusal(ingress, gone.headers) == (401, "expired_api_key")


@pytest.mark.asyncio
@pytest.mark.processes
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
@pytest.mark.processes
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
@pytest.mark.processes
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
@pytest.mark.processes
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


DOUBLED = (
    [("X-Switchyard-Class", "batch"), ("X-Switchyard-Class", "realtime")],
    [("X-Switchyard-Class", "batch, realtime")],
    [("X-Switchyard-Deadline-Ms", "5"), ("x-switchyard-deadline-ms", "6")],
    [("Authorization", "Bearer sw_a"), ("Authorization", "Bearer b")],
    [("X-Switchyard-Hop", "a|1|x"), ("X-Switchyard-Hop", "b|1|y")],
    [("X-Session-Id", "a"), ("X-Session-Id", "b")],
)


@pytest.mark.asyncio
@pytest.mark.processes
async def test_a_header_that_decides_is_there_once(ingress: RunningIngress) -> None:
    key = keyed(serving_class="batch")
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell), keys=(key.entry,))
        await ingress.sees(**{cell.name: "up"})
        for headers in DOUBLED:
            sent = [*key.headers.items(), *headers]
            answer = await ingress.http.post("/v1/chat/completions", content=BODY, headers=sent)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "doubled_header"), headers
        assert cell.requests == []


@pytest.mark.asyncio
@pytest.mark.processes
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


DIGEST = "ab" * 32
KEY = ApiKey("0a1b2c3d", DIGEST, "rufus", "near_realtime", ("chat", "gone"), 1795000000.5, 60, 9000, 4)
BACKENDS = {"chat": "pool.chat", "other": "pool.other"}


def entries(*keys: ApiKey, required: bool = False) -> dict[str, str]:
    return key_entries(RoutingTable(1, "east", (), keys=keys, keys_required=required), BACKENDS)


def test_a_key_is_found_by_its_digest_and_opens_the_pools_that_are_here() -> None:
    there = entries(KEY)
    assert there[DIGEST] == "0a1b2c3d|rufus|1|1795000000|60|9000|4|1|1|0|0"
    assert there["0a1b2c3d/pool.chat"] == "1"
    assert len(there) == 4
    assert KEY.prefix not in there


def test_a_key_without_limits_pools_and_expiry_says_so() -> None:
    open_key = ApiKey("0a1b2c3d", DIGEST, "rufus", "realtime")
    assert entries(open_key)[DIGEST] == f"0a1b2c3d|rufus|0|{NEVER}|0|0|0|0|0|0|0"


def test_what_the_sender_shows_is_the_same_key_but_never_realtime() -> None:
    sender, there = "cd" * 32, {}
    for serving_class, urgency in (("realtime", 1), ("near_realtime", 1), ("batch", 2)):
        there = entries(msgspec.structs.replace(KEY, serving_class=serving_class, sender_digest=sender))
        assert there[sender] == f"0a1b2c3d|rufus|{urgency}|1795000000|60|9000|4|1|1|1|0"
        assert there[DIGEST].endswith(f"|{sender}|0")
    assert len(there) == 5


def test_every_key_of_a_tenant_over_its_quota_says_so_the_senders_text_too() -> None:
    key, other = msgspec.structs.replace(KEY, sender_digest="cd" * 32), ApiKey("0d0d0d0d", "ef" * 32, "ada", "realtime")
    table = RoutingTable(1, "east", (), keys=(key, other), tenants_over_quota=("rufus", "nobody"))
    there = key_entries(table, BACKENDS)
    assert [there[digest].rpartition("|")[2] for digest in (DIGEST, "cd" * 32, "ef" * 32)] == ["1", "1", "0"]


def test_a_key_over_its_own_quota_says_so_and_others_of_its_tenant_do_not() -> None:
    key, other = (
        msgspec.structs.replace(KEY, sender_digest="cd" * 32),
        ApiKey("0d0d0d0d", "ef" * 32, "rufus", "realtime"),
    )
    table = RoutingTable(1, "east", (), keys=(key, other), keys_over_quota=(KEY.prefix, "unknown"))
    there = key_entries(table, BACKENDS)
    assert [there[digest].rpartition("|")[2] for digest in (DIGEST, "cd" * 32, "ef" * 32)] == ["1", "1", "0"]


def test_equal_keys_give_one_mark_and_any_change_another() -> None:
    changes: list[dict[str, Any]] = [{"tenant": "other"}, {"requests_per_min": 61}, {"pools": ()}, {"expires_at": None}]
    marks = {entries(msgspec.structs.replace(KEY, **change))[CONTENT_ENTRY] for change in changes}
    marks |= {entries()[CONTENT_ENTRY], entries(required=True)[CONTENT_ENTRY]}
    assert len(marks) == len(changes) + 2
    assert entries(KEY)[CONTENT_ENTRY] == entries(KEY)[CONTENT_ENTRY]
    assert entries(KEY)[CONTENT_ENTRY] not in marks


def test_origins_are_entries_of_their_key_and_of_all() -> None:
    there = entries(msgspec.structs.replace(KEY, origins=("https://app.example", "http://[::1]:3000")))
    assert there["0a1b2c3d@https://app.example"] == there[".any@http://[::1]:3000"] == "1"
    assert len(there) == len(entries(KEY)) + 4


def test_whether_keys_are_required_is_an_entry() -> None:
    assert (entries()[REQUIRED_ENTRY], entries(required=True)[REQUIRED_ENTRY]) == ("0", "1")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prefix": "Xy"}, "prefix and digest must be lower-case hexadecimal"),
        ({"digest": "ab"}, "prefix and digest must be lower-case hexadecimal"),
        ({"origins": ("https://app.example/path",)}, "it must be like https://app.example:8443"),
        ({"origins": ("*",)}, "it must be like https://app.example:8443"),
        ({"origins": ("https://a b",)}, "it must be like https://app.example:8443"),
        ({"sender_digest": "ab"}, "prefix and digest must be lower-case hexadecimal"),
        ({"sender_digest": DIGEST}, "digest abab.* belongs to two keys"),
        ({"tenant": "a b"}, "tenant 'a b' of key 0a1b2c3d"),
        ({"tenant": "~others"}, "tenant '~others' of key 0a1b2c3d"),
        ({"serving_class": "soon"}, "serving class 'soon' of key 0a1b2c3d is none of realtime, near_realtime, batch"),
        ({"tokens_per_min": -1}, "limits of key 0a1b2c3d must be between 0"),
        ({"max_concurrent": 2**31}, "limits of key 0a1b2c3d must be between 0"),
    ],
)
def test_a_key_that_cannot_be_meant_refuses_the_table(change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadTable, match=said):
        entries(msgspec.structs.replace(KEY, **change))


def test_two_keys_of_one_prefix_or_digest_refuse_the_table() -> None:
    with pytest.raises(BadTable, match="prefix 0a1b2c3d belongs to two keys"):
        entries(KEY, msgspec.structs.replace(KEY, digest="cd" * 32))
    with pytest.raises(BadTable, match=r"digest (ab){32} belongs to two keys"):
        entries(KEY, msgspec.structs.replace(KEY, prefix="0a0a0a0a"))


KEYS = 20_000


def many(count: int) -> tuple[ApiKey, ...]:
    digests = (hashlib.sha256(b"%d" % number).hexdigest() for number in range(count))
    return tuple(
        ApiKey(f"{number:08x}", digest, f"tenant-{number % 100}", "realtime", ("demo",), None, 600, 0, 32)
        for number, digest in enumerate(digests)
    )


def sent(table: RoutingTable) -> RoutingTable:
    """A table after its way over the wire."""
    assembly = MessageAssembly()
    frames = [decode_down(frame) for frame in frames_of(table)]
    assert len(frames) > 10
    (whole,) = [whole for part in frames if (whole := assembly.take(cast(TablePart, part))) is not None]
    assert isinstance(whole, RoutingTable)
    return whole


@pytest_asyncio.fixture
async def ingress(tmp_path: Path) -> AsyncIterator[RunningIngress]:
    """The cell shares its loop with the parsing of long tables: a late check means nothing."""
    async with RunningIngress(tmp_path / "home", check_interval_ms=20_000).running() as running:
        yield running


@pytest.mark.asyncio
@pytest.mark.processes
async def test_20000_keys_are_in_force_and_one_of_them_goes_without_a_reload(ingress: RunningIngress) -> None:
    key = keyed("ffffffff", requests_per_min=100_000)
    others = many(KEYS)
    async with FakeCell().running() as cell:
        ingress.hop_secrets = ()
        await ingress.route(pool(cell), retry_after_s=5, keys=(keyed("eeeeeeee").entry,))
        await ingress.sees(**{cell.name: "up"})
        worker = ingress.worker_pid
        async with SteadyTraffic(ingress.url, per_s=50).flowing() as traffic:
            for keys, status in (((*others, key.entry), 200), (others, 401)):
                ingress.revision += 1
                table = RoutingTable(ingress.revision, ingress.settings.region, (pool(cell),), keys=keys)
                ingress.ingress.receive(sent(table))
                await eventually(lambda: ingress.revision_in_force == ingress.revision, within_s=60)
                assert (await ingress.post(BODY, **key.headers)).status_code == status
        assert ingress.worker_pid == worker
    assert traffic.failures == []
