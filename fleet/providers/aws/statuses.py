"""What DescribeInstanceStatus says: state, checks and scheduled events of all machines of an account in a region, ours
and others'. It has no filter by tag: who asks drops the others."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from fleet.planning.call_budget import PAGE
from fleet.planning.states import NoticeKind
from fleet.providers.aws import calls
from fleet.providers.aws.notices import scheduled_kind

OVER = ("[Completed]", "[Canceled]")
"""How the description of an event begins that is still listed for a while."""
IMPAIRED = "impaired"


@dataclass(frozen=True, slots=True)
class ScheduledEvent:
    id: str
    machine: str
    kind: NoticeKind
    code: str
    text: str
    not_before: datetime


@dataclass(frozen=True, slots=True)
class Statuses:
    """By id of the instance. `impaired`: since when; None: not said."""

    states: dict[str, str] = field(default_factory=dict)
    impaired: dict[str, datetime | None] = field(default_factory=dict)
    events: list[ScheduledEvent] = field(default_factory=list)


def region_statuses(region: str) -> Statuses:
    """All pages, or nothing.

    Raises:
        CallFailed: some page did not come.
    """
    found = Statuses()
    for page in calls.pages("DescribeInstanceStatus", region, IncludeAllInstances=True, MaxResults=PAGE):
        for status in page["InstanceStatuses"]:
            _read(found, status)
    return found


def _read(found: Statuses, status: Mapping[str, Any]) -> None:
    machine = status["InstanceId"]
    found.states[machine] = status["InstanceState"]["Name"]
    checks = [status.get(name) or {} for name in ("SystemStatus", "InstanceStatus")]
    if any(check.get("Status") == IMPAIRED for check in checks):
        found.impaired[machine] = min(_since(checks), default=None)
    for event in status.get("Events") or ():
        text = event.get("Description", "")
        if event.get("NotBefore") is not None and not text.startswith(OVER):
            code = event["Code"]
            event_id = event.get("InstanceEventId") or code
            found.events.append(ScheduledEvent(event_id, machine, scheduled_kind(code), code, text, event["NotBefore"]))


def _since(checks: Iterable[Mapping[str, Any]]) -> list[datetime]:
    details = (detail for check in checks for detail in check.get("Details") or ())
    return [detail["ImpairedSince"] for detail in details if detail.get("ImpairedSince") is not None]
