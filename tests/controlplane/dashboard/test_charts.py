"""A chart's figure and its table say the same, and a figure has no more lines than a reader can tell apart."""

import json
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path

import pytest
from django.template.loader import render_to_string
from plotly import graph_objects

from controlplane.dashboard.charts import BY_PLACE, Band, Chart, Marker, Series, with_markers
from kernel.tones import Tone
from tests.controlplane.dashboard.test_stylesheet import GROUND, STATIC, TOKENS, contrast

START = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
CSS = (STATIC / "charts.css").read_text()
LINES = {
    name: (light, dark)
    for name, light, dark in re.findall(r"(--series-\d): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", CSS)
}


def chart(*values: float | None, series: int = 1, **more: object) -> Chart:
    lines = tuple(Series(f"cell {number}", values) for number in range(series))
    return Chart("rate", "Requests", "/s", START, 15.0, lines, **more)  # type: ignore[arg-type]


def test_the_figure_holds_the_numbers_and_their_times() -> None:
    trace = json.loads(chart(1.0, None, 3.5).figure)["data"][0]
    assert (trace["x0"], trace["dx"], trace["y"]) == ("2026-11-21 12:00:00", 15000.0, [1.0, None, 3.5])


def test_a_band_without_an_end_lasts_to_the_end_of_the_chart() -> None:
    layout = json.loads(chart(1.0, 2.0, 3.0, bands=(Band("bake", START, None),)).figure)["layout"]
    assert (layout["shapes"][0]["x1"], layout["annotations"][0]["text"]) == ("2026-11-21 12:00:30", "bake")


def test_a_marker_in_the_period_has_a_line_and_a_flag_without_markup() -> None:
    inside = Marker(START + timedelta(seconds=15), "rollout 7 of <b>x</b> began", "/rollouts/7/", Tone.MOVING)
    outside = Marker(START - timedelta(seconds=15), "rollout 6 began", "/rollouts/6/", Tone.MOVING)
    (marked,) = with_markers([chart(1.0, 2.0, 3.0)], (outside, inside))
    layout = json.loads(marked.figure)["layout"]
    assert [shape["x0"] for shape in layout["shapes"]] == ["2026-11-21 12:00:15"]
    assert [flag["hovertext"] for flag in layout["annotations"]] == ["rollout 7 of &lt;b&gt;x&lt;/b&gt; began"]


@pytest.mark.parametrize(("objective", "drawn"), [(2.0, True), (3.7, True), (4.0, False), (2000.0, False)])
def test_an_objective_off_the_scale_is_a_label_and_flattens_no_line(objective: float, drawn: bool) -> None:
    layout = json.loads(chart(1.0, 3.0, threshold=objective).figure)["layout"]
    assert [shape["y0"] for shape in layout["shapes"]] == ([objective] if drawn else [])
    assert [label["text"] for label in layout["annotations"]] == (
        [] if drawn else [f"objective {objective:,.0f} /s, off the scale"]
    )


def test_every_property_of_a_figure_is_one_that_plotly_knows() -> None:
    """Figures are built without validation; `Colour`s stand for colours of the theme."""
    marker = Marker(START, "began", "/", Tone.BAD)
    full = chart(1.0, None, series=5, bands=(Band("bake", START, None),), threshold=2000.0, markers=(marker,))
    for one in (full, chart(1.0, threshold=1.0, from_zero=False)):
        themed = json.loads(re.sub(r'"--[a-z0-9-]+"', '"#123456"', one.figure))
        graph_objects.Figure(data=[{"type": "scatter", **trace} for trace in themed["data"]], layout=themed["layout"])


def test_starting_a_process_does_not_import_plotly() -> None:
    command = "import sys, controlplane.dashboard.charts; sys.exit('plotly' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0


def test_six_lines_are_refused() -> None:
    with pytest.raises(ValueError, match="rate has 6 series; the limit is 5"):
        chart(1.0, series=6)


def test_a_chart_without_any_number_says_so() -> None:
    assert "No data in this period." in render_to_string("dashboard/charts/chart.html", {"chart": chart(None, None)})


def test_a_name_from_outside_cannot_leave_its_attribute() -> None:
    named = Chart("rate", "<b>", "/s", START, 15.0, (Series("\"'><script>", (1.0,)),))
    html = render_to_string("dashboard/charts/chart.html", {"chart": named})
    assert "<script>" not in html
    assert "<b>" not in html


@pytest.mark.parametrize(("line", "ground", "theme"), list(product(BY_PLACE, GROUND, (0, 1))))
def test_lines_stand_out_from_every_ground(line: str, ground: str, theme: int) -> None:
    assert contrast(LINES[line][theme], TOKENS[ground][theme]) >= 4.5


def test_only_chart_pages_load_what_draws_them() -> None:
    templates = Path(__file__).parents[3] / "templates"
    users = [path for path in templates.rglob("*.html") if "plotly" in path.read_text()]
    assert [path.name for path in users] == ["assets.html"]
