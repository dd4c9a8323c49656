"""Parses what EventBridge announces about tasks and container instances of ECS. Pure: text in, meaning out. An event is
a witness like any list: a lost or late one is found by polling, and a task that has ended stays so."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from fleet.clouds.aws.notices import UnreadableNotice
from fleet.clouds.planning.tasks import OVER

TASK = "ECS Task State Change"
INSTANCE = "ECS Container Instance State Change"
BY_ECS = frozenset({"SpotInterruption", "TerminationNotice", "InfrastructureHealth", "ServiceSchedulerInitiated"})
"""Stop codes of stops that this fleet did not request."""
TEXT_MOST = 500


class _Event(msgspec.Struct, frozen=True, rename={"detail_type": "detail-type"}):
    id: str
    detail_type: str
    time: datetime
    detail: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """`ends`: ECS is stopping the task for the reason `why`, without our request."""

    event_id: str
    at: datetime
    task: str
    state: str
    ends: bool
    why: str


@dataclass(frozen=True, slots=True)
class InstanceEvent:
    """A container instance has another status, connection or amount of free resources."""

    at: datetime
    instance: str
    status: str


def parse(body: str) -> TaskEvent | InstanceEvent:
    """Returns the meaning of a message. Raises UnreadableNotice if it has none."""
    try:
        event = msgspec.json.decode(body, type=_Event)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise UnreadableNotice(f"not an EventBridge event: {error}") from error
    if event.time.tzinfo is None:
        raise UnreadableNotice("its time has no time zone")
    if event.detail_type == TASK:
        state = _text(event.detail, "lastStatus")
        codes = [str(event.detail[name]) for name in ("stopCode", "stoppedReason") if event.detail.get(name)]
        ends = state not in OVER and event.detail.get("stopCode") in BY_ECS
        task = _text(event.detail, "taskArn").rpartition("/")[2]
        return TaskEvent(event.id, event.time, task, state, ends, ": ".join(codes)[:TEXT_MOST])
    if event.detail_type == INSTANCE:
        return InstanceEvent(event.time, _text(event.detail, "containerInstanceArn"), _text(event.detail, "status"))
    raise UnreadableNotice(f"its detail-type is {event.detail_type[:80]!r}, which no rule of this install sends")


def _text(detail: Mapping[str, Any], name: str) -> str:
    value = detail.get(name)
    if not isinstance(value, str) or not value:
        raise UnreadableNotice(f"its detail has no {name}")
    return value[:TEXT_MOST]
