"""Only cells with equal KV layouts pair."""

from hypothesis import given
from hypothesis import strategies as st

from engine_agent.protocol.messages import PREFILL_CELLS_MAX
from engine_agent.protocol.states import CellRole
from fleet.rollouts.planning.versions import PairingCell, decode_nodes_of, prefill_cells_of

OLD, NEW = "old", "new"


def cell(name: str, role: CellRole, layout: str = OLD, *, serves: bool = True) -> PairingCell:
    return PairingCell(name, role, layout, f"n-{name}", serves)


def test_a_decode_cell_calls_the_prefill_cells_of_its_layout_that_serve() -> None:
    there = [
        cell("p2", CellRole.PREFILL),
        cell("p1", CellRole.PREFILL),
        cell("p3", CellRole.PREFILL, serves=False),
        cell("p4", CellRole.PREFILL, NEW),
        cell("d2", CellRole.DECODE),
    ]

    assert [one.id for one in prefill_cells_of(cell("d1", CellRole.DECODE), there)] == ["p1", "p2"]
    assert [one.id for one in prefill_cells_of(cell("d1", CellRole.DECODE, NEW), there)] == ["p4"]


def test_a_prefill_cell_is_called_by_the_decode_cells_of_its_layout_even_while_they_drain() -> None:
    there = [cell("d1", CellRole.DECODE, serves=False), cell("d2", CellRole.DECODE, NEW), cell("p1", CellRole.PREFILL)]

    assert decode_nodes_of(cell("p1", CellRole.PREFILL), there) == ("n-d1",)


def test_cells_whose_layout_nobody_knows_pair_with_none() -> None:
    there = [cell("p1", CellRole.PREFILL, "")]

    assert prefill_cells_of(cell("d1", CellRole.DECODE, ""), there) == ()
    assert decode_nodes_of(cell("p1", CellRole.PREFILL, ""), [cell("d1", CellRole.DECODE, "")]) == ()


def test_an_order_names_no_more_cells_than_it_may() -> None:
    there = [cell(f"p{number:03}", CellRole.PREFILL) for number in range(PREFILL_CELLS_MAX + 10)]

    assert len(prefill_cells_of(cell("d1", CellRole.DECODE), there)) == PREFILL_CELLS_MAX


cells = st.builds(
    PairingCell,
    st.uuids().map(str),
    st.sampled_from(CellRole),
    st.sampled_from(["", OLD, NEW]),
    st.uuids().map(str),
    st.booleans(),
)


@given(own=cells, there=st.lists(cells))
def test_layouts_are_never_mixed_and_who_may_call_is_known_to_who_is_called(
    own: PairingCell, there: list[PairingCell]
) -> None:
    decode = PairingCell(own.id, CellRole.DECODE, own.layout, own.node, own.serves)
    for called in prefill_cells_of(decode, there):
        assert called.layout == decode.layout != ""
        assert decode.node in decode_nodes_of(called, [*there, decode])
