"""Output for people: tables, ages, plans. Pure, so every line is compared exactly."""

import io
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from controlplane.api import stress
from controlplane.api.apply import view
from controlplane.cli.commands.act import seconds
from controlplane.cli.commands.observe import fresh_lines, log_lines, summed
from controlplane.cli.commands.rollouts import stated
from controlplane.cli.errors import Failure
from controlplane.cli.main import shared_first
from controlplane.cli.output import Format, Output, as_yaml, described, plain_table
from controlplane.cli.plans import diff_lines, effect_lines, forecast_lines, plan_lines, stress_lines
from controlplane.cli.resources import Resource, age_text, column_of, columns_of, text_of
from controlplane.cli.schema import entries_of, resource_of
from tests.controlplane.api.client import document

NOW = datetime(2026, 11, 21, 12, 1, tzinfo=UTC)
CELL = {"id": "sim-70b-us-east-1-1", "state": "ready", "tone": "ok", "nodes": [{"id": "n-0a1b2c3d"}]}
DEPLOYMENT = {
    "name": "sim-70b",
    "model_version": "sim-70b@1",
    "serving_class": "realtime",
    "instance_types": ["trn1.32xlarge", "inf2.48xlarge"],
    "regions": [{"region": "us-east-1", "cells": 4, "ready": 3}],
    "created_at": "2026-11-21T11:57:00Z",
}


def resource(name: str) -> Resource:
    return next(resource_of(entry) for entry in entries_of(document()) if name in entry["names"])


@pytest.mark.parametrize(
    ("stated", "row", "shown"),
    [
        ("STATE", {"state": "ready"}, "ready"),
        ("IN FORCE", {"in_force": True}, "yes"),
        ("BUSY=load.in_flight", {"load": {"in_flight": 3}}, "3"),
        ("BUSY=load.in_flight", {"load": None}, "-"),
        ("NODES=nodes.id", {"nodes": [{"id": "n-1"}, {"id": "n-2"}]}, "n-1, n-2"),
        ("SINCE=at:age", {"at": "2026-11-21T11:44:00Z"}, "17m"),
        ("RUN BY=agents:count", {"agents": ["a", "b"]}, "2"),
        ("CELLS=cells:counts", {"cells": {"ready": 2, "lost": 0}}, "2 ready"),
        ("FROM=declared_by:or=stack", {"declared_by": ""}, "stack"),
        ("RANGE=:{min}-{max}", {"min": 2, "max": 8}, "2-8"),
        ("READY=regions:{region} {ready}/{cells}", {"regions": [{"region": "r", "ready": 1, "cells": 2}]}, "r 1/2"),
    ],
)
def test_a_column_is_stated_as_a_title_a_path_and_how(stated: str, row: dict[str, Any], shown: str) -> None:
    assert column_of(stated).show(row, NOW) == shown


def test_a_table_is_as_wide_as_it_needs_and_numbers_stand_right() -> None:
    columns = resource("dep").columns
    first, second = plain_table(columns, [DEPLOYMENT], NOW)
    assert first.split() == ["NAME", "VERSION", "CLASS", "TYPES", "READY", "AGE"]
    assert second.startswith("sim-70b  sim-70b@1  ")


def test_a_kind_without_chosen_columns_shows_its_plain_fields() -> None:
    columns = columns_of(resource("grants"), [{"id": 3, "made_at": "x", "more": {}}])
    assert [column.title for column in columns] == ["ID", "MADE AT"]


@pytest.mark.parametrize(
    ("moment", "shown"),
    [
        ("2026-11-21T12:00:18Z", "42s"),
        ("2026-11-21T11:44:00Z", "17m"),
        ("2026-11-21T07:00:00Z", "5h"),
        ("2026-11-01T12:00:00Z", "20d"),
        ("2026-11-21T12:01:05Z", "0s"),
        (None, "-"),
        ("soon", "-"),
    ],
)
def test_ages_are_short(moment: Any, shown: str) -> None:
    assert age_text(moment, NOW) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (True, "yes"),
        (0.5, "0.5"),
        (1234.56, "1235"),
        ([1, 2], "1, 2"),
        ({"a": None}, "a=-"),
        ({"a": {"b": 1}}, "a={b=1}"),
        ([], "-"),
    ],
)
def test_values_are_one_line(value: Any, shown: str) -> None:
    assert text_of(value) == shown


def test_what_is_piped_has_no_colour() -> None:
    out = io.StringIO()
    output = Output(Format.TABLE, out=out, now=NOW)
    output.toned("bad news", "bad")
    output.rows(resource("cells").columns, [CELL], empty="")
    assert "\x1b" not in out.getvalue()


def test_programs_get_only_the_document() -> None:
    out = io.StringIO()
    output = Output(Format.JSON, out=out)
    output.line("for people")
    output.toned("for people", "ok")
    output.document({"a": "ä"})
    assert json.loads(out.getvalue()) == {"a": "ä"}
    assert as_yaml({"b": 1, "a": [1]}) == "b: 1\na:\n- 1\n"


def test_a_thing_in_full_shows_lists_as_tables() -> None:
    lines = described({"id": "c", "load": {"busy": 1}, "nodes": [{"id": "n-1", "rank": 0}], "none": []})
    assert lines == ["id:    c", "load:", "  busy: 1", "nodes:", "  ID   RANK", "  n-1  0", "none:  -"]


def test_a_plan_is_told_with_reasons_effects_and_a_sum() -> None:
    lines = [text for text, _ in plan_lines(view.PLAN)]
    assert lines == [
        "~ scale Deployment sim-70b: sim-70b should have 3 cells in us-west-2, not 2",
        "    regions.us-west-2.cells: 2 -> 3",
        "  predicted for sim-70b: over in 42 s, 2 changes of cells and nodes",
        "    sim-70b in us-west-2: 2 ready now, 2 at minimum, 3 at the end, of 3",
        "    ! 1 machines would be launched",
        "1 step to do, 0 unchanged (revision 5d41402abc4b2a76)",
    ]


def test_a_forecast_says_when_the_fewest_cells_serve() -> None:
    forecast = view.PLAN["effects"][0]["forecast"]
    place = {**forecast["places"][0], "ready_least": 0, "least_at_s": 41.6}
    lines = list(forecast_lines("sim-70b", {**forecast, "places": [place]}))
    assert ("    sim-70b in us-west-2: 2 ready now, 0 at minimum (in 42 s), 3 at the end, of 3", "bad") in lines


def test_what_breaks_first_is_told_with_where_and_when() -> None:
    (row,) = stress.ANSWER["deployments"]
    broken = {**row, "breaks": True, "unplaced": 33.4}
    forecast = view.PLAN["effects"][0]["forecast"]
    lines = [text for text, _ in stress_lines({**stress.ANSWER, "deployments": [broken], "forecast": forecast}, "us-1")]
    assert lines[0].startswith("The fleet without us-east-1 holds until 1.8x the forecast")
    assert lines[1:4] == [
        "  sim-70b: holds until 1.8x (now 1.2x); 33 of 96 concurrent requests without room at 17:15 UTC, first in "
        "us-east-1: TTFT grows",
        "  without a forecast: chat",
        "  predicted for the loss of us-1: over in 42 s, 2 changes of cells and nodes",
    ]
    assert lines[-1].startswith("    T+41.6 s sim-70b-us-west-2-5: ")
    nothing = {**stress.ANSWER, "deployments": [], "unknown": []}
    assert [text.partition(":")[0] for text, _ in stress_lines(nothing, "")] == ["No forecast of the next day yet"]


def test_a_difference_is_two_lines() -> None:
    assert [text for text, _ in diff_lines(view.PLAN)] == [
        "Deployment sim-70b (scale)",
        "  - regions.us-west-2.cells: 2",
        "  + regions.us-west-2.cells: 3",
    ]


def test_the_effect_of_an_evacuation_names_who_is_over_its_cap() -> None:
    region = {"region": "us-west-2", "load_before": 2.0, "load_after": 9.0, "utilisation_after": 0.9}
    effect = {"deployment": "sim-70b", "regions": [region], "over_cap": ["us-west-2"], "unplaced": {"us-east-1": 1.0}}
    assert [text for text, _ in effect_lines({"effects": [effect]})] == [
        "sim-70b:",
        "  us-west-2: 2.0 -> 9.0 concurrent requests, 90 % full, over its limit",
        "  ! 1.0 concurrent requests from us-east-1 fit in no region",
    ]


@pytest.mark.parametrize(("text", "expected"), [("90", 90), ("90s", 90), ("15m", 900), ("2h", 7200), ("1d", 86400)])
def test_durations_have_units(text: str, expected: int) -> None:
    assert seconds(text) == expected


def test_what_is_no_duration_is_refused() -> None:
    with pytest.raises(Failure, match="'soon' is not a duration"):
        seconds("soon")


def test_a_policy_is_stated_by_name_and_value() -> None:
    assert stated(["bake_s=60", "strategy=surge", "gate.min_samples=9", "waves_percent=[50,100]"]) == {
        "bake_s": 60,
        "strategy": "surge",
        "gate": {"min_samples": 9},
        "waves_percent": [50, 100],
    }


@pytest.mark.parametrize(
    ("before", "now", "fresh"),
    [
        ([], ["a", "b"], ["a", "b"]),
        (["a", "b"], ["a", "b"], []),
        (["a", "b"], ["b", "c"], ["c"]),
        (["a", "b"], ["x", "y"], ["x", "y"]),
        (["a", "a"], ["a", "a", "a"], ["a"]),
    ],
)
def test_only_new_lines_of_a_log_are_shown(before: list[str], now: list[str], fresh: list[str]) -> None:
    assert fresh_lines(before, now) == fresh


def test_options_of_the_whole_command_may_stand_anywhere() -> None:
    given = ["get", "cells", "--server", "http://a", "-o", "json", "--timeout=3", "--no-color", "--", "-o", "x"]
    assert shared_first(given) == [
        "--server", "http://a", "-o", "json", "--timeout=3", "--no-color", "get", "cells", "--", "-o", "x",
    ]  # fmt: skip


def test_loads_add_up_and_of_latencies_the_worst_counts() -> None:
    def cell(name: str, state: str, rate: float, ttft: float | None) -> dict[str, Any]:
        load = {"in_flight": 1, "queued": 0, "tokens_per_s": rate, "ttft_p50_ms": ttft, "ttft_p99_ms": None}
        return {"id": name, "deployment": "d", "region": "r", "state": state, "load": {**load, "itl_p50_ms": None}}

    cells = [cell("a", "ready", 1.0, 5.0), cell("b", "starting", 3.0, None)]
    assert [row["id"] for row in summed(cells, "cells")] == ["b", "a"]
    (row,) = summed(cells, "deployments")
    assert (row["name"], row["cells"], row["ready"]) == ("d", 2, 1)
    assert (row["load"]["tokens_per_s"], row["load"]["ttft_p50_ms"], row["load"]["ttft_p99_ms"]) == (4.0, 5.0, None)


def test_of_a_nodes_log_only_its_own_lines_are_shown() -> None:
    def node(name: str, *lines: str) -> dict[str, Any]:
        return {"node": name, "logs": [{"name": "engine", "lines": list(lines)}, {"name": "proxy", "lines": ["p"]}]}

    found = {"lines": ["leads"], "nodes": [node("n-1", "leads"), node("n-2", "follows")]}
    assert log_lines(found, "", "engine") == ["leads"]
    assert log_lines(found, "n-2", "engine") == ["follows"]
    assert log_lines(found, "n-2", "agent") == []
