"""Tells an incident as one story: cause, detection, protection, action and recovery, oldest first, with the time of
each step, the duration of each phase, and the actor. Also shows evidence in units. Pure: from loaded rows."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from kernel.tones import Tone

SWITCHYARD = "switchyard"


class StoryPhase(StrEnum):
    """The phases of a story, in their usual order."""

    CAUSE = "cause"
    DETECTION = "detection"
    PROTECTION = "protection"
    ACTION = "action"
    RECOVERY = "recovery"


@dataclass(frozen=True, slots=True)
class Happening:
    """An event or another stored moment. `actor`: the user, or `switchyard`. Of the objects, "" if it names none."""

    at: datetime
    kind: str
    text: str
    tone: Tone = Tone.IDLE
    actor: str = SWITCHYARD
    cell: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """What the incident's row states."""

    kind: str
    summary: str
    opened_at: datetime
    closed_at: datetime | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """One line of a story. `after_s`: seconds since its start."""

    phase: StoryPhase
    at: datetime
    after_s: float
    text: str
    tone: Tone
    actor: str
    kind: str = ""
    cell: str = ""
    node: str = ""
    is_first: bool = False

    @property
    def offset(self) -> str:
        return f"T+{elapsed_text(self.after_s)}"


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """A phase with steps. `lasted_s`: until the next phase began, or until the end."""

    phase: StoryPhase
    at: datetime
    after_s: float
    lasted_s: float

    @property
    def offset(self) -> str:
        return f"T+{elapsed_text(self.after_s)}"

    @property
    def lasted(self) -> str:
        return elapsed_text(self.lasted_s)


@dataclass(frozen=True, slots=True)
class Story:
    """`steps` oldest first. `missing`: phases of which nothing is recorded. `left_out`: steps beyond the limit."""

    start: datetime
    end: datetime
    steps: tuple[Step, ...]
    phases: tuple[PhaseSpan, ...]
    left_out: int = 0

    @property
    def missing(self) -> tuple[StoryPhase, ...]:
        told = {span.phase for span in self.phases}
        return tuple(phase for phase in StoryPhase if phase not in told)

    @property
    def lasted(self) -> str:
        return elapsed_text((self.end - self.start).total_seconds())


def tell_story(
    fault: Fault, happenings: Iterable[Happening], *, now: datetime, limit: int = 200, left_out: int = 0
) -> Story:
    """The story of a fault. `left_out`: happenings that were not loaded."""
    found = _of_this_fault(fault, sorted(happenings, key=lambda one: one.at))
    phases = _phases_of(found)
    if StoryPhase.CAUSE not in phases:
        cause = _cause_from_evidence(fault, found)
        place = sum(1 for one in found if one.at < cause.at)
        found.insert(place, cause)
        phases.insert(place, StoryPhase.CAUSE)
    start, end = found[0].at, fault.closed_at or now
    shown = list(zip(phases, found, strict=True))
    if len(shown) > limit:
        # The beginning and the end explain a fault; a cell that flaps fills the middle.
        kept = limit // 2
        left_out += len(shown) - 2 * kept
        shown = [*shown[:kept], *shown[-kept:]]
    steps, previous = [], None
    for phase, one in shown:
        after_s = (one.at - start).total_seconds()
        steps.append(
            Step(phase, one.at, after_s, one.text, one.tone, one.actor, one.kind, one.cell, one.node, phase != previous)
        )
        previous = phase
    return Story(start, max(start, end), tuple(steps), _spans(steps, start, end), left_out)


_PHASE_OF_KIND = {
    "node.notice": StoryPhase.CAUSE,
    "node.suspect": StoryPhase.DETECTION,
    "node.lost": StoryPhase.DETECTION,
    "cell.failed": StoryPhase.DETECTION,
    "cell.lost": StoryPhase.DETECTION,
    "incident.opened": StoryPhase.DETECTION,
    "incident.explained": StoryPhase.DETECTION,
    "entry.published": StoryPhase.PROTECTION,
    "entry.in_force": StoryPhase.PROTECTION,
    "rollout.paused": StoryPhase.PROTECTION,
    "node.cordoned": StoryPhase.PROTECTION,
    "cell.draining": StoryPhase.PROTECTION,
    "cell.ready": StoryPhase.RECOVERY,
    "cell.stopped": StoryPhase.RECOVERY,
    "node.ready": StoryPhase.RECOVERY,
    "node.retired": StoryPhase.RECOVERY,
    "node.replaced": StoryPhase.RECOVERY,
    "node.repaired": StoryPhase.RECOVERY,
    "node.uncordoned": StoryPhase.RECOVERY,
    "incident.closed": StoryPhase.RECOVERY,
}
TABLE = "traffic.table"


def _of_this_fault(fault: Fault, found: list[Happening]) -> list[Happening]:
    """Leaves out what the same nodes and cells did before this fault and after it."""
    phases = _phases_of(found)
    first = 0
    for place, one in enumerate(found):
        if one.at >= fault.opened_at:
            break
        if phases[place] in {StoryPhase.RECOVERY, StoryPhase.ACTION}:
            first = place + 1
    last = len(found)
    if fault.closed_at is not None:
        for place in range(len(found) - 1, -1, -1):
            if found[place].at <= fault.closed_at:
                break
            if phases[place] is not StoryPhase.RECOVERY:
                last = place
    return found[first:last]


def _phases_of(found: Sequence[Happening]) -> list[StoryPhase]:
    """A routing table protects until a cell is ready again; the ones after that return its traffic."""
    phases, is_back = [], False
    for one in found:
        is_back = is_back or one.kind == "cell.ready"
        if one.kind == TABLE:
            phases.append(StoryPhase.RECOVERY if is_back else StoryPhase.PROTECTION)
        elif one.kind.startswith("fault."):
            phases.append(StoryPhase.CAUSE)
        elif one.kind.startswith("traffic."):
            phases.append(StoryPhase.PROTECTION)
        else:
            phases.append(_PHASE_OF_KIND.get(one.kind, StoryPhase.ACTION))
    return phases


def _cause_from_evidence(fault: Fault, found: Sequence[Happening]) -> Happening:
    """The first moment that the evidence names, if no event of the fault itself was recorded."""
    earliest = min([fault.opened_at, *(one.at for one in found)])
    at = min([earliest, *_moments(fault.evidence, fault.opened_at)])
    reason = str(fault.evidence.get("reason", "")) or fault.summary.partition(": ")[2] or fault.summary
    if fault.evidence.get(LAST_REPORT):
        reason = f"last report of the node; later found: {reason}"
    return Happening(at, "", reason, Tone.BAD)


LAST_REPORT = "last_report_at"
SEEN_FROM = ("since", "first", "at", LAST_REPORT)
EARLIEST_CAUSE = timedelta(hours=1)
"""A cause that is older is a date in a text, not the begin of this fault."""


def _moments(evidence: Mapping[str, Any], opened_at: datetime) -> Iterable[datetime]:
    for name, value in evidence.items():
        for each in value if isinstance(value, list) else ():
            if isinstance(each, dict):
                yield from _moments(each, opened_at)
        moment = _moment(value) if name in SEEN_FROM else None
        if moment is not None and timedelta(0) <= opened_at - moment <= EARLIEST_CAUSE:
            yield moment


def _moment(value: object) -> datetime | None:
    if not isinstance(value, str):
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else None


def _spans(steps: Sequence[Step], start: datetime, end: datetime) -> tuple[PhaseSpan, ...]:
    began: dict[StoryPhase, datetime] = {}
    for step in steps:
        began.setdefault(step.phase, step.at)
    present = [phase for phase in StoryPhase if phase in began]
    spans = []
    for place, phase in enumerate(present):
        at = began[phase]
        # A later phase may begin first: an ingress protects users before the node is found to be lost.
        until = min((began[later] for later in present[place + 1 :] if began[later] > at), default=max(end, at))
        spans.append(PhaseSpan(phase, at, (at - start).total_seconds(), (until - at).total_seconds()))
    return tuple(spans)


def elapsed_text(seconds: float) -> str:
    """A duration with the precision that a story needs: `0.4 s`, `42 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    for (unit, length), (lesser, part) in (
        (("d", 86_400), ("h", 3600)),
        (("h", 3600), ("min", 60)),
        (("min", 60), ("s", 1)),
    ):
        if whole >= length:
            rest = whole % length // part
            return f"{whole // length} {unit}" + (f" {rest} {lesser}" if rest else "")
    return f"{whole} s"


# --- evidence -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EvidenceTable:
    """A list in the evidence whose items have the same keys."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class EvidenceLine:
    label: str
    value: str


@dataclass(frozen=True, slots=True)
class Evidence:
    lines: tuple[EvidenceLine, ...]
    tables: tuple[EvidenceTable, ...]


WAITS = "waits"
"""Key in an incident's evidence: why nothing is replaced for it yet."""
_LABELS = {
    "affected": "Affected", "at": "Issued", "below": "In the same place", "clock_percent": "Clock",
    "held_back": "Not replaced because", "last_pass_s": "Last complete pass", "last_pass_took_s": "That pass took",
    LAST_REPORT: "Last report", "pid": "Process ID", "refused": "Refused requests by status",
    "score": "Speed against its peers", "served_by": "Served by", "silent_s": "Silent for", "size": "Size of the group",
    "times": "Seen", "waits": "Waits for", "wanted": "Cells wanted", "was": "State before", "z": "Robust z-score",
}  # fmt: skip
_UNITS = (("_ms", "ms"), ("_percent", "%"), ("_celsius", "°C"), ("_watts", "W"), ("_mib", "MiB"), ("_gib", "GiB"))


def evidence_in_units(evidence: Mapping[str, Any]) -> Evidence:
    """The evidence as labelled lines and tables, with units, clock times and no JSON."""
    lines, tables = [], []
    for name, value in evidence.items():
        if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
            names = tuple(dict.fromkeys(key for one in value for key in one))
            rows = tuple(tuple(_value_text(key, one.get(key)) for key in names) for one in value)
            tables.append(EvidenceTable(_label(name), tuple(_label(key) for key in names), rows))
        elif name != WAITS:
            lines.append(EvidenceLine(_label(name), _value_text(name, value)))
    return Evidence(tuple(lines), tuple(tables))


def _label(name: str) -> str:
    if name in _LABELS:
        return _LABELS[name]
    bare = name
    for suffix, _ in (*_UNITS, ("_bytes", ""), ("_s", ""), ("_at", "")):
        if name.endswith(suffix) and len(name) > len(suffix):
            bare = name.removesuffix(suffix)
            break
    words = bare.replace("_", " ").replace("-", " ").strip()
    return words[:1].upper() + words[1:]


def _value_text(name: str, value: Any) -> str:
    if value is None or value in ("", [], {}):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _number_text(name, value)
    if isinstance(value, list):
        return ", ".join(_value_text("", one) for one in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_value_text(str(key), one)}" for key, one in value.items())
    moment = _moment(value)
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC" if moment is not None else str(value)


def _number_text(name: str, value: float) -> str:
    if name.endswith("_s"):
        return elapsed_text(value)
    if name.endswith("_bytes"):
        return f"{value / 2**30:.2f} GiB" if value >= 10 * 2**20 else f"{value:,.0f} B"
    plain = f"{value:,}" if isinstance(value, int) else f"{value:,.3f}".rstrip("0").rstrip(".")
    unit = next((unit for suffix, unit in _UNITS if name.endswith(suffix)), "")
    if name == "times":
        unit = "time" if value == 1 else "times"
    return f"{plain} {unit}" if unit else plain
