"""The post-mortem of an incident: its parts, its open points, and no markup from names."""

import re
from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from fleet.faults.planning.report import (
    Healing,
    Impact,
    NoteView,
    Postmortem,
    TenantImpact,
    Work,
    escape_markdown,
    median_s,
    report_markdown,
)
from fleet.faults.planning.severity import RUNBOOK_OF_KIND, Severity, severity_of
from fleet.faults.planning.story import Fault, Happening, evidence_in_units, tell_story
from fleet.faults.planning.views import IncidentKind
from tests.docs.pages import ROOT
from tests.fleet.fleets import NOW

FAULT = Fault("node-lost", "Node n-a lost: <b>gone</b>", NOW, None, {"reason": "[x](http://evil)", "silent_s": 31})
STORY = tell_story(
    FAULT,
    [
        Happening(NOW, "incident.opened", "Incident opened"),
        Happening(NOW + timedelta(seconds=3), "node.cordoned", "n-a cordoned | *now*", actor="ada"),
    ],
    now=NOW + timedelta(seconds=9),
)


def postmortem(**changes: object) -> Postmortem:
    usual = {
        "number": 12,
        "summary": FAULT.summary,
        "kind": FAULT.kind,
        "severity": "major",
        "state": "open",
        "opened_at": NOW,
        "closed_at": None,
        "resolution": "",
        "owner": "ada",
        "acknowledged_by": "",
        "runbook": "node-lost",
        "story": STORY,
        "evidence": evidence_in_units(FAULT.evidence),
        "impact": Impact(("sim in east",), 15, 200, 3, 7, 4, (TenantImpact("acme", 2, 50), TenantImpact("", 1, 9))),
        "healing": Healing(5.0, 40),
        "work": (Work("Replacement of n-a (silence): gone", NOW, "switchyard"),),
        "notes": (NoteView(NOW, "ada", "# not a title\n- not a list"),),
        "down": ("cell c1",),
    }
    return Postmortem(**{**usual, **changes})  # type: ignore[arg-type]


def test_a_report_has_all_parts() -> None:
    text = report_markdown(postmortem())
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [
        "Timeline", "Impact", "Evidence", "Actions", "Notes", "Open",
    ]  # fmt: skip
    for line in (
        "# Incident 12: Node n-a lost: &lt;b&gt;gone&lt;/b&gt;",
        "| Incidents of this kind | usually heals in 5.0 s (median of 40) |",
        "| 2026-11-21 12:00:03 UTC | T+3.0 s | protection | n-a cordoned \\| \\*now\\* | ada |",
        "- Failed: 3 (1.50 %). Slowed: 4.",
        "- acme: 2 of 50 requests failed in the hours of the incident.",
        "- Requests without a key: 1 of 9 requests failed in the hours of the incident.",
        "- Silent for: 31 s",
        "- Reason: \\[x\\](http\\://evil)",
        "- 2026-11-21 12:00:03 UTC ada: n-a cordoned \\| \\*now\\*",
        "- 2026-11-21 12:00:00 UTC ada: \\# not a title - not a list",
        "- cell c1 has not recovered.",
        "- The incident is open.",
    ):
        assert line in text.splitlines(), line


def test_a_finished_incident_leaves_nothing_open_but_what_was_not_seen() -> None:
    closed = postmortem(
        state="closed", closed_at=NOW, acknowledged_by="ada", work=(), down=(), impact=Impact(), notes=()
    )
    assert closed.open_points == ["Nothing is recorded of: action, recovery."]
    assert "No counts of requests are kept for this time and place." in report_markdown(closed)


@given(st.text(alphabet=st.sampled_from("ab *_`<>[]()#|\\!~-+1.&\n\r\u2028:/w")))
def test_no_text_leaves_its_line_or_brings_markup(text: str) -> None:
    shown = escape_markdown(text)
    assert len(shown.splitlines()) <= 1
    assert not re.search(r"(?<!\\)(?:\\\\)*[*_`\[\]|#~!]", shown)
    assert "<" not in shown
    assert "://" not in shown
    assert not re.match(r"([-+]|\d+[.)])\s", shown)


def test_the_usual_duration_is_a_median_of_at_least_three() -> None:
    assert [median_s(times) for times in ([], [1, 2], [9, 1, 5], [4, 1, 2, 100])] == [None, None, 5, 3.0]


def test_severity_follows_from_the_kind_and_shadow_only_informs() -> None:
    kinds = ("no-usable-cell", "node-lost", IncidentKind.SLOW, "something-new")
    assert [severity_of(kind, shadow=False) for kind in kinds] == ["critical", "major", "minor", "major"]
    assert severity_of("no-usable-cell", shadow=True) is Severity.INFO


def test_every_runbook_exists_and_every_kind_of_the_planner_has_one() -> None:
    assert not [name for name in RUNBOOK_OF_KIND.values() if not (ROOT / f"docs/runbooks/{name}.md").is_file()]
    assert set(IncidentKind) <= RUNBOOK_OF_KIND.keys()
