"""Parses what EventBridge announces about tasks and container instances of ECS. Pure: text in, meaning out. An event
only names what to describe: ECS's own answer is stored, so that a replayed, late or forged event changes nothing, and a
lost one is found by the next list."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from fleet.clouds.aws.notices import UnreadableNotice

TASK = "ECS Task State Change"
INSTANCE = "ECS Container Instance State Change"
TASK_ID = re.compile(r"[0-9a-f-]{1,64}")
TEXT_MOST = 500


class _Event(msgspec.Struct, frozen=True, rename={"detail_type": "detail-type"}):
    id: str
    detail_type: str
    time: datetime
    detail: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """A task of `cluster` has changed. Both are the last parts of their ARNs."""

    task: str
    cluster: str


@dataclass(frozen=True, slots=True)
class InstanceEvent:
    """A container instance (ARN) has another status, connection or amount of free resources."""

    instance: str
    cluster: str
    status: str


def parse(body: str) -> TaskEvent | InstanceEvent:
    """Returns the meaning of a message. Raises UnreadableNotice if it has none."""
    try:
        event = msgspec.json.decode(body, type=_Event)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise UnreadableNotice(f"not an EventBridge event: {error}") from error
    if event.detail_type == TASK:
        task = _last_part(event.detail, "taskArn")
        if not TASK_ID.fullmatch(task):
            raise UnreadableNotice(f"its task is {task[:80]!r}, which is no ID")
        return TaskEvent(task, _last_part(event.detail, "clusterArn"))
    if event.detail_type == INSTANCE:
        instance, cluster = _text(event.detail, "containerInstanceArn"), _last_part(event.detail, "clusterArn")
        return InstanceEvent(instance, cluster, _text(event.detail, "status"))
    raise UnreadableNotice(f"its detail-type is {event.detail_type[:80]!r}, which no rule of this install sends")


def _last_part(detail: Mapping[str, Any], name: str) -> str:
    return _text(detail, name).rpartition("/")[2]


def _text(detail: Mapping[str, Any], name: str) -> str:
    value = detail.get(name)
    if not isinstance(value, str) or not value:
        raise UnreadableNotice(f"its detail has no {name}")
    return value[:TEXT_MOST]
