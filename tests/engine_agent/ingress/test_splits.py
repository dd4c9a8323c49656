"""One name, several pools: shares of the table, one pool per key, and no error while any pool can serve."""

import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from engine_agent.ingress.bad_table import BadTable
from engine_agent.ingress.routing_maps import split_fallbacks, split_models, split_ranges
from engine_agent.protocol.ingress_messages import Split
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import AWAY, HOP_SECRET, RunningIngress, pool
from tests.engine_agent.ingress.keyed import keyed
from tests.engine_agent.ingress.marks import marked

pytestmark = pytest.mark.processes

BACKENDS = {"a": "pool.a", "b": "pool.b", "c": "pool.c"}


def test_shares_become_ranges_one_split_after_another() -> None:
    splits = (Split("y", {"a": 95, "b": 5}), Split("x", {"b": 1, "c": 2, "a": 0}, sticky=False))
    assert split_models(splits) == {"x": "split.random.0", "y": "split.sticky.10000"}
    assert split_ranges(splits, BACKENDS) == {
        "0:3332": "pool.b",
        "3333:9999": "pool.c",
        "10000:19499": "pool.a",
        "19500:19999": "pool.b",
    }
    turns = split_fallbacks(splits, BACKENDS)
    assert (turns["0/pool.b"], turns["0/pool.c"], turns["10000/pool.a"]) == ("pool.c", "pool.b", "pool.b")


@pytest.mark.parametrize(
    ("shares", "said"),
    [({"nowhere": 1}, "there is no pool nowhere"), ({"a": 0}, "no pool has a share"), ({"a": -1, "b": 2}, "is -1")],
)
def test_a_split_that_cannot_be_meant_is_refused(shares: dict[str, int], said: str) -> None:
    with pytest.raises(BadTable, match=said):
        split_ranges((Split("x", shares),), BACKENDS)


@contextlib.asynccontextmanager
async def two_variants(ingress: RunningIngress, split: Split) -> AsyncIterator[tuple[FakeCell, FakeCell]]:
    async with FakeCell("one").running() as one, FakeCell("two").running() as two:
        await route(ingress, one, two, split)
        await ingress.sees(one="up", two="up")
        yield one, two


async def route(ingress: RunningIngress, one: FakeCell, two: FakeCell, split: Split) -> None:
    pools = (pool(one, name="a", models=("a",)), pool(two, name="b", models=("b",)))
    await ingress.route(*pools, splits=(split,))


async def ask(ingress: RunningIngress, body: bytes, **headers: str) -> str:
    """The deployment that answered, or the error's code."""
    answer = await ingress.post(body, **headers)
    return answer.headers["x-switchyard-deployment"] if answer.is_success else answer.json()["error"]["code"]


def request_body(number: int) -> bytes:
    return b'{"model": "ab", "prompt_cache_key": "session %d"}' % number


@pytest.mark.asyncio
async def test_the_same_key_keeps_its_pool_and_few_keys_move_with_the_shares(ingress: RunningIngress) -> None:
    async with two_variants(ingress, Split("ab", {"a": 50, "b": 50})) as (one, two):
        before = [await ask(ingress, request_body(number)) for number in range(80)]
        assert [await ask(ingress, request_body(number)) for number in range(80)] == before
        assert 20 < Counter(before)["a"] < 60
        worker = ingress.worker_pid
        await route(ingress, one, two, Split("ab", {"a": 80, "b": 20}))
        after = [await ask(ingress, request_body(number)) for number in range(80)]
        assert all(later == "a" for earlier, later in zip(before, after, strict=True) if earlier == "a")
        assert Counter(after)["a"] > Counter(before)["a"]
        assert ingress.worker_pid == worker, "shares change without a reload"
        assert two.requests[0].json["model"] == "ab", "the body stays as it is"


@pytest.mark.asyncio
async def test_a_split_that_is_not_sticky_draws_anew_each_time(ingress: RunningIngress) -> None:
    async with two_variants(ingress, Split("ab", {"a": 50, "b": 50}, sticky=False)):
        assert {await ask(ingress, request_body(1)) for _ in range(40)} == {"a", "b"}


@pytest.mark.asyncio
async def test_a_pool_that_cannot_serve_hands_over_and_a_long_request_is_split_alike(ingress: RunningIngress) -> None:
    async with two_variants(ingress, Split("ab", {"a": 1, "b": 99})) as (_, two):
        long = request_body(1).replace(b"}", b', "prompt": "%s"}' % (b"x" * 300_000))
        assert await ask(ingress, long) == await ask(ingress, request_body(1))
        await two.die()
        await ingress.sees(two="down")
        assert {await ask(ingress, request_body(number)) for number in range(20)} == {"a"}
        health = await ingress.http.get("/healthz", params={"model": "ab"})
        assert health.status_code == 200


@pytest.mark.asyncio
async def test_what_another_region_drew_is_kept(ingress: RunningIngress) -> None:
    async with two_variants(ingress, Split("ab", {"a": 99, "b": 1})):
        for number in range(10):
            body = request_body(number)
            answer = await ingress.post_hop(body, **marked(HOP_SECRET, AWAY, body=body, pool="pool.b"))
            assert answer.headers["x-switchyard-deployment"] == "b"
        outsider = {"X-Switchyard-Pool": "pool.b"}
        assert "a" in {await ask(ingress, request_body(number), **outsider) for number in range(10)}


@pytest.mark.asyncio
async def test_a_key_for_one_pool_does_not_follow_to_another(ingress: RunningIngress) -> None:
    async with FakeCell("one").running() as one, FakeCell("two").running() as two:
        key = keyed(pools=("a",))
        pools = (pool(one, name="a", models=("a",)), pool(two, name="b", models=("b",)))
        await ingress.route(*pools, splits=(Split("ab", {"a": 99_999, "b": 1}),), keys=(key.entry,))
        await ingress.sees(one="up", two="up")
        assert await ask(ingress, request_body(1), **key.headers) == "a"
        await one.die()
        await ingress.sees(one="down")
        assert await ask(ingress, request_body(1), **key.headers) == "model_not_allowed"
