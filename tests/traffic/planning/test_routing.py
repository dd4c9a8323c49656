"""Routing tables: home first, elsewhere when home cannot, and equal states give equal tables."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.protocol.ingress_messages import Pool
from traffic.planning.routing import IngressAddress, RoutableCell, ServedDeployment, describe_change, plan_pools

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


def test_a_region_never_spills_to_one_without_ready_cells() -> None:
    found = pool("east", cell("c1"), cell("c2", "west", state="draining"))
    assert found.spill == ()


@pytest.mark.parametrize("state", ["starting", "failed", "lost", "pending", "stopped"])
def test_cells_that_cannot_serve_are_left_out_and_nobody_serves(state: str) -> None:
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


def test_what_applications_read_of_a_model_goes_into_the_table_and_its_change_is_told() -> None:
    (known,), (unknown,) = plan_pools("east", [KNOWN], [], GATES), plan_pools("east", [LLAMA], [], GATES)
    assert (known.max_model_len, known.created_at) == (8192, 1790000000)
    assert (unknown.max_model_len, unknown.created_at) == (0, 0)
    assert describe_change((unknown,), (known,)) == "llama is listed with 8192 tokens"
