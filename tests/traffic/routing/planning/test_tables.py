"""Routing tables: home region first, spill, adapters during rollouts, splits, affinity and model names."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.ingress.desired import desired_from
from engine_agent.protocol.ingress_messages import Affinity, Pool, PoolAdapter, RoutingTable, Split
from traffic.region_shares.planning.policy import TrafficPolicy
from traffic.routing.planning.tables import (
    IngressAddress,
    RoutableCell,
    ServedDeployment,
    Steering,
    describe_change,
    describe_ingresses,
    describe_splits,
    plan_pools,
    plan_splits,
    sharing_ingresses,
)

GATES = [IngressAddress("i-east", "east", "127.0.0.1", 8080), IngressAddress("i-west", "west", "127.0.0.1", 8081)]
KNOWN = ServedDeployment("llama", ("llama",), "realtime", max_model_len=8192, created_at=1790000000)
LLAMA = ServedDeployment("llama", ("llama",), "realtime")


def cell(name: str, region: str = "east", state: str = "ready", generation: int = 1) -> RoutableCell:
    return RoutableCell(name, "llama", region, state, generation, "n-a", "10.0.0.1", 21000, 16)


def pool(region: str, *cells: RoutableCell) -> Pool:
    (found,) = plan_pools(region, [LLAMA], cells, GATES)
    return found


def test_a_region_with_ready_cells_serves_itself() -> None:
    found = pool("east", cell("c1"), cell("c2", "west"))
    assert [c.cell for c in found.cells] == ["c1"]
    assert found.fractions == {"east": 1.0}
    assert [target.region for target in found.spill] == ["west"]


def test_a_region_without_cells_sends_everything_to_one_that_has_them() -> None:
    found = pool("west", cell("c1"))
    assert found.cells == ()
    assert found.fractions == {"east": 1.0}
    assert [(t.region, t.port) for t in found.spill] == [("east", 8080)]


def test_a_pool_that_continues_its_streams_names_the_version_of_each_cell() -> None:
    cells = [replace(cell("c1"), version="7"), replace(cell("c2"), version="8")]
    (found,) = plan_pools("east", [LLAMA], cells, GATES, {"llama": Steering(policy=TrafficPolicy(continuation=True))})
    assert (found.continues, [each.version for each in found.cells]) == (True, ["7", "8"])
    before = pool("east", *cells)
    assert not before.continues
    assert "llama: streams continue at other cells" in describe_change((before,), (found,))
    assert "llama: streams end with their cell" in describe_change((found,), (before,))


def test_a_region_never_spills_to_one_without_ready_cells() -> None:
    found = pool("east", cell("c1"), cell("c2", "west", state="draining"))
    assert found.spill == ()


@pytest.mark.parametrize("state", ["starting", "failed", "lost", "pending", "stopped"])
def test_cells_that_cannot_serve_are_left_out(state: str) -> None:
    found = pool("east", cell("c1", state=state))
    assert (found.cells, found.spill, found.fractions) == ((), (), {})


def test_a_draining_cell_stays_in_the_table_marked_and_counts_for_nothing() -> None:
    found = pool("east", cell("c1", state="draining"), cell("c2", "west"))
    assert [(c.cell, c.drain) for c in found.cells] == [("c1", True)]
    assert found.fractions == {"west": 1.0}


def test_a_deployment_without_any_cell_still_has_a_pool() -> None:
    assert pool("east").models == ("llama",)


@given(
    cells=st.lists(
        st.builds(
            cell,
            st.sampled_from([f"c{i}" for i in range(9)]),
            st.sampled_from(["east", "west"]),
            st.sampled_from(["ready", "draining", "failed"]),
        ),
        unique_by=lambda c: c.id,
    ),
    seed=st.integers(),
)
def test_tables_do_not_depend_on_the_order_of_rows_and_fractions_sum_to_one(
    cells: list[RoutableCell], seed: int
) -> None:
    shuffled = random.Random(seed).sample(cells, len(cells))
    for region in ("east", "west"):
        found = pool(region, *cells)
        assert found == pool(region, *shuffled)
        assert sum(found.fractions.values()) in (0, 1)
        assert set(found.fractions) <= {region, *(t.region for t in found.spill)}


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ([], [cell("c1")], "+c1; llama -> east 100%"),
        ([cell("c1")], [], "-c1; llama -> no region can serve"),
        ([cell("c1"), cell("c2")], [cell("c1")], "-c2"),
        ([cell("c1")], [cell("c1", generation=2)], "c1 restarted"),
        ([cell("c1"), cell("c2")], [cell("c1", state="draining"), cell("c2")], "c1 drains"),
    ],
)
def test_a_change_of_tables_is_said_in_one_sentence(
    before: list[RoutableCell], after: list[RoutableCell], sentence: str
) -> None:
    assert describe_change((pool("east", *before),), (pool("east", *after),)) == sentence


def test_a_pool_that_goes_is_named() -> None:
    assert describe_change((pool("east"),), ()) == "llama is no longer served"


def test_listed_facts_of_a_model_are_in_the_table_and_their_change_is_described() -> None:
    (known,), (unknown,) = plan_pools("east", [KNOWN], [], GATES), plan_pools("east", [LLAMA], [], GATES)
    assert (known.max_model_len, known.created_at) == (8192, 1790000000)
    assert (unknown.max_model_len, unknown.created_at) == (0, 0)
    assert describe_change((unknown,), (known,)) == "llama is listed with 8192 tokens"


CHAT = ServedDeployment("chat", ("chat", "llama"), "realtime")


def cell_with_adapters(
    name: str, *adapters: str, region: str = "east", state: str = "ready", generation: int = 1, of: str = "chat"
) -> RoutableCell:
    return RoutableCell(name, of, region, state, generation, "n-a", "10.0.0.1", 21000, 16, adapters)


def adapters(*cells: RoutableCell, region: str = "east", chat: ServedDeployment = CHAT) -> tuple[PoolAdapter, ...]:
    (found,) = plan_pools(region, [chat], cells, GATES)
    return found.adapters


def test_what_every_cell_has_is_served_by_all_under_the_model_s_name() -> None:
    assert adapters(cell_with_adapters("c1", "tuned"), cell_with_adapters("c2", "tuned", region="west")) == (
        PoolAdapter("tuned", "llama"),
    )
    assert adapters(cell_with_adapters("c1")) == ()


def test_before_its_first_cell_a_deployment_has_the_adapters_of_its_version() -> None:
    assert adapters(chat=replace(CHAT, adapters=("tuned",))) == (PoolAdapter("tuned", "llama"),)


def test_during_a_rollout_the_starts_that_have_it_are_named_in_each_region() -> None:
    cells = (
        cell_with_adapters("c1", "tuned", generation=2),
        cell_with_adapters("c2"),
        cell_with_adapters("c3", region="west"),
    )
    assert adapters(*cells) == (PoolAdapter("tuned", "llama", ("c1-g2",)),)
    assert adapters(*cells, region="west") == (PoolAdapter("tuned", "llama", ()),)


def test_a_region_that_is_done_still_names_its_cells_while_another_is_not() -> None:
    cells = (cell_with_adapters("c1", "tuned"), cell_with_adapters("c3", region="west"))
    assert adapters(*cells) == (PoolAdapter("tuned", "llama", ("c1-g1",)),)


def test_a_draining_cell_that_lacks_it_is_asked_for_nothing_and_holds_nothing_up() -> None:
    assert adapters(cell_with_adapters("c1", "tuned"), cell_with_adapters("c2", state="draining")) == (
        PoolAdapter("tuned", "llama"),
    )


def test_an_adapter_that_both_versions_have_is_never_narrowed() -> None:
    cells = (cell_with_adapters("c1", "tuned", "new"), cell_with_adapters("c2", "tuned"))
    assert adapters(*cells) == (PoolAdapter("new", "llama", ("c1-g1",)), PoolAdapter("tuned", "llama"))


def test_a_name_that_two_have_got_all_the_same_leads_to_one_and_never_to_an_adapter_of_a_model_s_name() -> None:
    other = ServedDeployment("other", ("other",), "realtime", adapters=("tuned", "chat"))
    pools = plan_pools(
        "east",
        [other, CHAT],
        [cell_with_adapters("c1", "tuned", "other"), cell_with_adapters("c2", "tuned", of="other")],
        GATES,
    )
    assert {pool.name: [adapter.name for adapter in pool.adapters] for pool in pools} == {
        "chat": ["tuned"],
        "other": [],
    }


def test_a_change_says_which_cells_have_it() -> None:
    def pools(*cells: RoutableCell) -> tuple[Pool, ...]:
        return plan_pools("east", [CHAT], cells, GATES)

    without, some, every = (
        pools(cell_with_adapters("c1"), cell_with_adapters("c2")),
        pools(cell_with_adapters("c1", "a"), cell_with_adapters("c2")),
        pools(cell_with_adapters("c1", "a")),
    )
    assert describe_change(without, some) == "adapter a: c1-g1"
    assert describe_change(some, every) == "-c2; adapter a: every cell"
    assert describe_change(every, pools(cell_with_adapters("c1"))) == "adapter a is no longer served"


GATE_OF_EAST = [IngressAddress("i-east", "east", "127.0.0.1", 8080)]
OLD = ServedDeployment("chat", ("chat", "org/llama"), "realtime")
NEW = ServedDeployment("chat-v2", ("chat-v2", "org/llama"), "realtime")


def pools(**steerings: Steering) -> tuple[Pool, ...]:
    return plan_pools("east", [NEW, OLD], [], GATE_OF_EAST, steerings)


def test_two_versions_of_one_model_make_a_table_that_an_ingress_takes() -> None:
    found = pools()
    assert [pool.models for pool in found] == [("chat", "org/llama"), ("chat-v2",)]
    assert desired_from(RoutingTable(1, "east", found)).pools


def test_a_policy_splits_every_name_of_its_deployment() -> None:
    policy = TrafficPolicy(split={"chat": 95, "chat-v2": 5, "gone": 3, "idle": 0})
    splits = plan_splits([OLD, NEW], {"chat": Steering(policy=policy)})
    shares = {"chat": 95, "chat-v2": 5}
    assert splits == (Split("chat", shares), Split("org/llama", shares))
    assert desired_from(RoutingTable(1, "east", pools(), splits=splits)).pools
    assert plan_splits([OLD], {"chat": Steering(policy=TrafficPolicy(split={"gone": 1}))}) == ()
    assert plan_splits([OLD, NEW], {}) == ()


def test_a_policy_keeps_prefixes_together() -> None:
    kept = pools(chat=Steering(policy=TrafficPolicy(load_bound=1.5)))
    assert [pool.affinity for pool in kept] == [Affinity(1.5), None]
    assert "chat keeps prefixes together" in describe_change(pools(), kept)
    assert "chat routes by fewest requests" in describe_change(kept, pools())


def test_what_changed_about_splits_is_said() -> None:
    before, after = (Split("chat", {"a": 1}),), (Split("chat", {"a": 9, "b": 1}), Split("x", {"b": 1}, sticky=False))
    assert describe_splits(before, after) == ["model chat: a 90.0%, b 10.0%", "model x: b 100.0%, chosen per request"]
    assert describe_splits(after, before)[-1] == "model x is no longer split"
    assert describe_splits(after, after) == []


def test_ingresses_share_cells_when_there_are_several() -> None:
    assert sharing_ingresses(["i-a"]) == sharing_ingresses([]) == ()
    assert sharing_ingresses(["i-b", "i-a"]) == ("i-a", "i-b")
    assert describe_ingresses(("i-a", "i-b"), ("i-a", "i-b")) == []
    assert describe_ingresses((), ("i-a", "i-b")) == ["2 ingresses share its cells: i-a, i-b"]
    assert describe_ingresses(("i-a", "i-b"), ()) == ["one ingress has its cells"]
