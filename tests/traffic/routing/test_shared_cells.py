"""The page shows why an ingress has another limit and weight for a cell than its table."""

from traffic.routing.pages import SharedCell, shared_cells

WHY = "2 requests of this ingress and 10 other requests in 16 places"
CELLS = {
    "c-2": {"in_flight": 2, "max_connections": 5, "weight": 38, "why": WHY},
    "c-1": {"in_flight": 3, "max_connections": 16, "weight": 100},
}


def test_only_cells_that_are_steered_are_shown_by_name() -> None:
    assert shared_cells(CELLS) == (SharedCell("c-2", 2, 5, 38, WHY),)
    assert shared_cells(CELLS | {"c-0": CELLS["c-2"]})[0].cell == "c-0"


def test_a_report_of_another_shape_shows_none() -> None:
    odd_ones: list[object] = [None, 7, "c-1", [], {"c-1": 3}, {"c-1": {"why": 7}}, {"c-1": {"why": "x", "weight": -1}}]
    for odd in odd_ones:
        assert shared_cells(odd) == ()
