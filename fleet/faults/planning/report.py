"""Writes the post-mortem of an incident as Markdown: summary, timeline, impact, evidence, actions, what is open. Pure.
Names and reasons come from users and machines, so all of their markup is escaped."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from fleet.faults.planning.story import SWITCHYARD, Evidence, Story, elapsed_text

_MARKUP = re.compile(r"([\\`*_\[\]|#~!])")
_LIST_MARK = re.compile(r"^([-+]|\d+[.)])(?=\s)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\u2028\u2029]+")


@dataclass(frozen=True, slots=True)
class TenantImpact:
    """Failed requests of a tenant in the hours of the incident; "" is requests without a key."""

    tenant: str
    failed: int
    requests: int


@dataclass(frozen=True, slots=True)
class Impact:
    """Requests at the places of an incident while it lasted. `step_s`: the length of the windows that were counted;
    None if none is kept. `retried`: answered by another cell; `slowed`: first token later than the objective."""

    places: tuple[str, ...] = ()
    step_s: int | None = None
    requests: int = 0
    failed: int = 0
    retried: int = 0
    slowed: int = 0
    tenants: tuple[TenantImpact, ...] = ()

    @property
    def failed_percent(self) -> float | None:
        return 100.0 * self.failed / self.requests if self.requests else None


@dataclass(frozen=True, slots=True)
class Work:
    """A replacement for the incident. `result`: "" while it lasts."""

    text: str
    at: datetime
    actor: str
    result: str = ""


@dataclass(frozen=True, slots=True)
class NoteView:
    at: datetime
    actor: str
    text: str


@dataclass(frozen=True, slots=True)
class Healing:
    """How long recent incidents of a kind lasted. `usual_s`: their median, None if there were too few."""

    usual_s: float | None = None
    of: int = 0

    @property
    def text(self) -> str:
        return "" if self.usual_s is None else f"usually heals in {elapsed_text(self.usual_s)} (median of {self.of})"


@dataclass(frozen=True, slots=True)
class Postmortem:
    """Everything that a report shows. `down`: nodes and cells that have not recovered."""

    number: int
    summary: str
    kind: str
    severity: str
    state: str
    opened_at: datetime
    closed_at: datetime | None
    resolution: str
    owner: str
    acknowledged_by: str
    runbook: str
    story: Story
    evidence: Evidence
    impact: Impact
    healing: Healing = Healing()
    work: tuple[Work, ...] = ()
    notes: tuple[NoteView, ...] = ()
    down: tuple[str, ...] = ()

    @property
    def file_name(self) -> str:
        return f"incident-{self.number}.md"

    @property
    def open_points(self) -> list[str]:
        points = [f"{name} has not recovered." for name in self.down]
        points += [f"{work.text} has not ended." for work in self.work if not work.result]
        if self.closed_at is None:
            points.append("The incident is open.")
        if not self.acknowledged_by:
            points.append("Nobody acknowledged it.")
        if self.story.missing:
            points.append(f"Nothing is recorded of: {', '.join(self.story.missing)}.")
        return points


def median_s(durations_s: Sequence[float], least: int = 3) -> float | None:
    """The median, or None of fewer than `least` values."""
    ordered, middle = sorted(durations_s), len(durations_s) // 2
    if len(ordered) < least:
        return None
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def escape_markdown(text: str) -> str:
    """The text on one line, without any markup, HTML or automatic link."""
    plain = _CONTROL.sub(" ", text).strip().replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    plain = _MARKUP.sub(r"\\\1", plain).replace("://", "\\://").replace("www.", "www\\.")
    return _LIST_MARK.sub(lambda mark: f"{mark[1][:-1]}\\{mark[1][-1]}", plain)


def report_markdown(pm: Postmortem) -> str:
    lines = [f"# Incident {pm.number}: {escape_markdown(pm.summary)}", "", *_summary_lines(pm)]
    for title, part in (
        ("Timeline", _timeline_lines(pm.story)),
        ("Impact", _impact_lines(pm.impact)),
        ("Evidence", _evidence_lines(pm.evidence)),
        ("Actions", _action_lines(pm)),
        (
            "Notes",
            [f"- {_clock(note.at)} {escape_markdown(note.actor)}: {escape_markdown(note.text)}" for note in pm.notes],
        ),
        ("Open", [f"- {escape_markdown(point)}" for point in pm.open_points]),
    ):
        lines += ["", f"## {title}", "", *(list(part) or ["None."])]
    return "\n".join(lines) + "\n"


def _summary_lines(pm: Postmortem) -> Iterator[str]:
    rows = {
        "State": pm.state,
        "Severity": pm.severity,
        "Kind": pm.kind,
        "Began": _clock(pm.story.start),
        "Opened": _clock(pm.opened_at),
        "Closed": _clock(pm.closed_at) if pm.closed_at else "still open",
        "Lasted": pm.story.lasted,
        "Phases": ", ".join(f"{span.phase} {span.lasted}" for span in pm.story.phases),
        "Resolution": pm.resolution,
        "Incidents of this kind": pm.healing.text,
        "Owner": pm.owner or "nobody",
        "Acknowledged by": pm.acknowledged_by or "nobody",
        "Runbook": f"docs/runbooks/{pm.runbook}.md" if pm.runbook else "",
    }
    return _table(("", ""), ((name, value) for name, value in rows.items() if value))


def _timeline_lines(story: Story) -> Iterator[str]:
    rows = ((_clock(one.at), one.offset, one.phase, one.text, _who(one.actor)) for one in story.steps)
    yield from _table(("Time", "After", "Phase", "What happened", "Who"), rows)
    if story.left_out:
        yield from ("", f"{story.left_out} steps in the middle are left out.")


def _impact_lines(impact: Impact) -> Iterator[str]:
    if impact.step_s is None:
        yield "No counts of requests are kept for this time and place."
        return
    share = "" if impact.failed_percent is None else f" ({impact.failed_percent:.2f} %)"
    places = escape_markdown(", ".join(impact.places))
    yield f"- Counted in windows of {elapsed_text(impact.step_s)} at {places}: {impact.requests} requests."
    yield f"- Failed: {impact.failed}{share}. Slowed: {impact.slowed}."
    yield f"- Retried on another cell: at least {impact.retried}."
    for one in impact.tenants:
        name = escape_markdown(one.tenant) or "Requests without a key"
        yield f"- {name}: {one.failed} of {one.requests} requests failed in the hours of the incident."


def _evidence_lines(evidence: Evidence) -> Iterator[str]:
    for line in evidence.lines:
        yield f"- {escape_markdown(line.label)}: {escape_markdown(line.value)}"
    for table in evidence.tables:
        yield from ("", f"{escape_markdown(table.name)}:", "", *_table(table.columns, table.rows))


def _action_lines(pm: Postmortem) -> Iterator[str]:
    for work in pm.work:
        result = escape_markdown(work.result) or "in progress"
        yield f"- {_clock(work.at)} {escape_markdown(_who(work.actor))}: {escape_markdown(work.text)}. Result: {result}"
    for step in pm.story.steps:
        if step.actor != SWITCHYARD and not step.kind.startswith("incident.noted"):
            yield f"- {_clock(step.at)} {escape_markdown(step.actor)}: {escape_markdown(step.text)}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(escape_markdown(name) for name in columns)} |"
    yield f"|{' --- |' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(escape_markdown(str(value)) for value in row)} |"


def _who(actor: str) -> str:
    return "Switchyard" if actor == SWITCHYARD else actor


def _clock(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"
