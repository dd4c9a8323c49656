"""A slow cell beside its siblings: which figures stand out, and how the page shows it."""

from datetime import timedelta

import pytest

from fleet.cells.models import Cell
from fleet.cells.planner import FIGURES, Figures, compare_with_siblings
from fleet.load.models import LoadSubject, LoadWindow, NodeWindow
from kernel import clock
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.fleet import rows


def standing_out(own: Figures, *siblings: Figures) -> list[str]:
    return [one.figure.name for one in compare_with_siblings(own, siblings) if one.stands_out]


def test_a_figure_stands_out_if_it_is_worse_than_every_sibling_by_a_quarter() -> None:
    siblings = ({"itl_p50_ms": 20.0}, {"itl_p50_ms": 24.0}, {"itl_p50_ms": 22.0})
    assert standing_out({"itl_p50_ms": 28.0}, *siblings) == ["itl_p50_ms"]
    assert standing_out({"itl_p50_ms": 27.0}, *siblings) == []
    assert standing_out({"itl_p50_ms": 28.0}, *siblings, {"itl_p50_ms": 40.0}) == []


def test_of_clocks_and_cache_hits_less_is_worse() -> None:
    siblings = ({"clock_percent": 98.0, "cache_hit_percent": 60.0}, {"clock_percent": 97.0, "cache_hit_percent": 50.0})
    assert standing_out({"clock_percent": 60.0, "cache_hit_percent": 55.0}, *siblings) == ["clock_percent"]


def test_work_explains_and_never_stands_out() -> None:
    assert (
        standing_out({"prompt_per_request": 9000.0, "running": 64.0}, {"prompt_per_request": 100.0, "running": 1.0})
        == []
    )


def test_only_figures_that_both_sides_have_are_compared() -> None:
    compared = compare_with_siblings({"step_ms": 1.0, "kv_percent": None}, [{"step_ms": 0.0, "kv_percent": 3.0}, {}])
    assert [(one.figure.name, one.ratio) for one in compared] == [("step_ms", None)]
    assert compare_with_siblings({name.name: 1.0 for name in FIGURES}, []) == ()


@pytest.mark.django_db
@pytest.mark.slow
def test_the_page_of_a_cell_names_what_is_slower_there() -> None:
    rows.deployment(cells=3)
    now = clock.now()
    for name, itl_ms, clock_percent in (("a", 60.0, 55.0), ("b", 20.0, 99.0), ("c", 22.0, 98.0)):
        cell = rows.cell(name, rows.node(f"n-{name}"))
        load = LoadSubject.objects.create(name=f"cell:{name}", seen_at=now)
        use = LoadSubject.objects.create(name=f"node:n-{name}", seen_at=now)
        for minute in range(2, 8):
            at = (now - timedelta(minutes=minute)).replace(second=0, microsecond=0)
            LoadWindow.objects.create(
                subject=load, step_s=15, at=at, covered_s=15, requests=30, errors=0, slow=0, cells=1, in_flight=2,
                queued=0, tokens_per_s=100, itl_p50_ms=itl_ms, prompt_tokens=3000,
            )  # fmt: skip
            NodeWindow.objects.create(subject=use, step_s=60, at=at, clock_percent=clock_percent)
        assert cell.pk == name
    shown = " ".join(fragment(signed_in(), "/cells/a/", "cell-siblings").split())
    assert "Worse than every sibling in decode and host: time between tokens, median 60 ms (siblings 21)" in shown
    assert "slowest clock of its devices 55 % (siblings 98.5)" in shown
    assert "against 2 of 2 siblings" in shown
    assert "No figure is worse" in fragment(signed_in(), "/cells/b/", "cell-siblings")
    Cell.objects.exclude(pk="a").update(state="draining")
    assert "No other ready cell" in fragment(signed_in(), "/cells/a/", "cell-siblings")
