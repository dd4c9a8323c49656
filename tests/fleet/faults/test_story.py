"""An incident as one story, oldest first, in phases with their durations; its evidence in units."""

from datetime import timedelta
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fleet.faults.planning.story import (
    Fault,
    Happening,
    StoryPhase,
    elapsed_text,
    evidence_in_units,
    tell_story,
)
from tests.fleet.fleets import NOW


def at(second: float, kind: str, text: str = "", **names: Any) -> Happening:
    return Happening(NOW + timedelta(seconds=second), kind, text or kind, **names)


def after(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


LOST = Fault(
    "node-lost",
    "Node n-a lost: its machine is gone",
    NOW + after(2),
    NOW + after(9),
    {"reason": "its machine is gone", "last_report_at": NOW.isoformat()},
)
DEATH = (
    at(-60, "cell.ready", "c1 is ready"),
    at(2, "node.lost", node="n-a"),
    at(2, "incident.opened"),
    at(2.4, "cell.lost", cell="c1"),
    at(2.5, "traffic.table", "east revision 7: -c1"),
    at(3, "cell.starting", cell="c1"),
    at(9, "cell.ready", cell="c1"),
    at(9, "incident.closed"),
    at(9.1, "traffic.table", "east revision 8: +c1"),
    at(12, "cell.failed", "c1 is failed for another reason", cell="c1"),
)


def test_a_death_is_told_from_its_cause_to_its_recovery() -> None:
    story = tell_story(LOST, DEATH, now=NOW + after(100))
    assert [(step.phase, step.kind, step.offset) for step in story.steps] == [
        ("cause", "", "T+0.0 s"),
        ("detection", "node.lost", "T+2.0 s"),
        ("detection", "incident.opened", "T+2.0 s"),
        ("detection", "cell.lost", "T+2.4 s"),
        ("protection", "traffic.table", "T+2.5 s"),
        ("action", "cell.starting", "T+3.0 s"),
        ("recovery", "cell.ready", "T+9.0 s"),
        ("recovery", "incident.closed", "T+9.0 s"),
        ("recovery", "traffic.table", "T+9.1 s"),
    ]
    assert story.steps[0].text == "last report of the node; later found: its machine is gone"
    assert [(span.phase, span.lasted_s) for span in story.phases] == [
        ("cause", 2.0), ("detection", 0.5), ("protection", 0.5), ("action", 6.0), ("recovery", 0.0),
    ]  # fmt: skip
    assert (story.lasted, story.missing) == ("9.0 s", ())


def test_a_fault_event_is_the_cause_and_an_operator_is_named() -> None:
    fault = Fault("cell-failed", "Cell c1 failed: engine killed", NOW)
    happenings = (
        at(0, "incident.opened"),
        at(-1, "fault.engine_exit", "n-a: exit 137", node="n-a"),
        at(4, "node.cordoned", actor="ada"),
    )
    story = tell_story(fault, happenings, now=NOW + after(60))
    assert [(step.phase, step.text, step.actor) for step in story.steps] == [
        ("cause", "n-a: exit 137", "switchyard"),
        ("detection", "incident.opened", "switchyard"),
        ("protection", "node.cordoned", "ada"),
    ]
    assert story.missing == (StoryPhase.ACTION, StoryPhase.RECOVERY)


def test_without_any_event_the_reason_of_the_row_is_the_cause() -> None:
    story = tell_story(Fault("budget", "acme used 80 % of its budget", NOW), (), now=NOW + after(1))
    assert [(step.phase, step.text) for step in story.steps] == [("cause", "acme used 80 % of its budget")]


def test_a_date_long_ago_in_the_evidence_is_not_the_begin() -> None:
    old = {"since": (NOW - timedelta(days=3)).isoformat(), "at": "soon"}
    assert tell_story(Fault("cloud-notice", "m: impaired", NOW, evidence=old), (), now=NOW).start == NOW


def test_of_a_long_story_the_begin_and_the_end_are_kept() -> None:
    flaps = [at(each, "cell.starting", str(each)) for each in range(500)]
    story = tell_story(Fault("cell-failed", "c", NOW), flaps, now=NOW + after(600), limit=10)
    assert [step.text for step in story.steps] == ["c", "0", "1", "2", "3", "495", "496", "497", "498", "499"]
    assert story.left_out == 491


kinds = st.sampled_from([one.kind for one in DEATH] + ["fault.xid", "node.cordoned", "rollout.paused", "other"])


@given(st.lists(st.tuples(st.floats(-100, 100), kinds)), st.booleans())
def test_every_story_is_in_order_and_its_phases_fill_it(found: list[tuple[float, str]], closed: bool) -> None:
    fault = Fault(
        "node-lost", "lost", NOW, NOW + after(50) if closed else None, {"since": (NOW - after(3)).isoformat()}
    )
    story = tell_story(fault, [at(*each) for each in found], now=NOW + after(200))
    assert all(one.at <= two.at for one, two in pairwise(story.steps))
    assert story.steps[0].after_s == 0
    assert all(span.lasted_s >= 0 and span.after_s >= 0 for span in story.phases)
    assert {step.phase for step in story.steps} == {span.phase for span in story.phases} >= {StoryPhase.CAUSE}


def test_durations_are_as_exact_as_a_story_needs() -> None:
    seconds = (0.04, 9.96, 42, 60, 200, 7200, 7500, 90_000)
    assert [elapsed_text(each) for each in seconds] == [
        "0.0 s", "10.0 s", "42 s", "1 min", "3 min 20 s", "2 h", "2 h 5 min", "1 d 1 h",
    ]  # fmt: skip


def test_evidence_has_labels_units_and_clock_times_and_no_json() -> None:
    shown = evidence_in_units(
        {
            "silent_s": 31,
            "last_report_at": "2026-11-21T12:00:00+00:00",
            "free_bytes": 3 * 2**30,
            "connected": False,
            "nodes": ["n-a", "n-b"],
            "refused": {"503": 7},
            "waits": "frozen",
            "windows": [{"window": 7, "z": 9.1234}, {"window": 8, "step_ms": 12}],
            "<b>": {"deep": [1, {"x": None}]},
        }
    )
    assert [(line.label, line.value) for line in shown.lines] == [
        ("Silent for", "31 s"),
        ("Last report", "2026-11-21 12:00:00 UTC"),
        ("Free", "3.00 GiB"),
        ("Connected", "no"),
        ("Nodes", "n-a, n-b"),
        ("Refused requests by status", "503 7"),
        ("<b>", "deep 1, x none"),
    ]
    (table,) = shown.tables
    assert (table.name, table.columns) == ("Windows", ("Window", "Robust z-score", "Step"))
    assert table.rows == (("7", "9.123", "none"), ("8", "none", "12 ms"))
