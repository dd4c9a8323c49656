"""Decides what a task of ECS that ended before its agent joined proves, and when the next one may start. Pure. A stop
code and its texts are evidence: the task has ended, so its node is given up immediately and not after the time in which
a list may lag. Three faults follow from the texts. `here`: this container instance cannot start it, and gets no task
for a while. `everywhere`: no container instance can, because of the image, a role or the task definition. `again`: it
may succeed with another try. Each failed try of the same image in a row doubles the wait before the next one, so that a
fault does not run through all container instances of the cluster."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import takewhile

WHY_MOST = 500
"""Characters of the stored reason."""


class StartFault(StrEnum):
    AGAIN = "again"
    HERE = "here"
    EVERYWHERE = "everywhere"


BLAMELESS = frozenset({"UserInitiated", "ServiceSchedulerInitiated", "SpotInterruption", "TerminationNotice"})
"""Stop codes of tasks that a request or the end of their machine has stopped."""
HOST_ENDED = "host ec2 (instance"
"""ECS's text for a task whose machine was stopped or terminated."""

_PASSING = (
    "toomanyrequests", "rate exceeded", "rate limit", "throttl", "i/o timeout", "client.timeout", "handshake timeout",
    "context deadline exceeded", "connection reset", "connection refused", "no such host", "temporary failure",
    "unexpected eof", "service unavailable", "internal server error", "bad gateway", "request canceled",
)  # fmt: skip
"""Texts of registries, DNS and AWS that are busy or cut off."""
_OF_THE_INSTANCE = (
    "no space left on device", "error gathering device information", "outofmemory", "cannot allocate memory",
    "cannotcreatevolumeerror", "cannotinspectcontainererror", "dockertimeouterror", "containerruntimetimeouterror",
    "read-only file system", "input/output error", "device or resource busy", "address already in use",
    "nvidia-container-cli", "error mounting",
)  # fmt: skip
"""Texts about disk, memory, devices and the container runtime of one machine."""
_OF_THE_DEFINITION = (
    "exec format error", "descriptor matching platform", "no matching manifest", "manifest unknown", "name unknown",
    "repository does not exist", "invalid reference format", "pull access denied", "no basic auth credentials",
    "accessdenied", "access denied", "not authorized", "unauthorized", "assume the role", "assume role",
    "log group does not exist", "executable file not found", "no such image", ": not found", "does not exist",
)  # fmt: skip
"""Texts about the image, which may be of another architecture, about roles and about the task definition."""


def start_fault(code: str, text: str) -> StartFault | None:
    """Returns the fault of a task that ended before its agent joined. `code`: ECS's stop code; `text`: its reason with
    those of its containers. None if a request or the end of its machine has stopped it. An unknown text is worth
    another try."""
    plain = text.lower()
    if code in BLAMELESS or HOST_ENDED in plain:
        return None
    # A registry that is cut off may also report that it did not find the image.
    for fault, texts in (
        (StartFault.AGAIN, _PASSING),
        (StartFault.HERE, _OF_THE_INSTANCE),
        (StartFault.EVERYWHERE, _OF_THE_DEFINITION),
    ):
        if any(each in plain for each in texts):
            return fault
    return StartFault.AGAIN


@dataclass(frozen=True, slots=True)
class Start:
    """A task that has joined (`fault` None) or failed to start. `at`: when that was seen. `instance`: ARN of its
    container instance; "": the call was refused. `why`: the stored reason."""

    at: datetime
    unit: str
    instance: str
    image: str
    fault: StartFault | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class BackOff:
    """`failed`: units in a row. `until`: no task starts before. `needs_person`: more tries cannot succeed."""

    failed: int
    until: datetime
    why: str
    needs_person: bool

    @property
    def sentence(self) -> str:
        many = f"{self.failed} launches in a row" if self.failed > 1 else "the last launch"
        return f"{many} did not start: {self.why}"


FIRST_S, LONGEST_S = 30.0, 600.0
"""Wait after the first counted failure of an image. A failed launch is not repeated for 30 s in any case
(`FleetSettings.failed_launch_kept_s`)."""
INSTANCE_FIRST_S: Mapping[StartFault, float] = {StartFault.AGAIN: 60.0, StartFault.HERE: 300.0}
INSTANCE_LONGEST_S = 3600.0
"""An operator may have repaired it by then."""
LOOKED_BACK = timedelta(hours=6)
"""Several times the longest wait."""


def back_off(starts: Iterable[Start], image: str) -> BackOff | None:
    """Returns the wait of launches with an image, from its starts in any order. A task that has joined since ends it.
    The tasks of a unit count once. One failure that may be the fault of its container instance delays nothing; the next
    try uses another one."""
    row: dict[str, Start] = {}
    for start in sorted(starts, key=lambda one: one.at, reverse=True):
        if start.image != image:
            continue
        if start.fault is None:
            break
        row.setdefault(start.unit, start)
    if not row:
        return None
    last = next(iter(row.values()))
    counted = len(row) - (last.fault is not StartFault.EVERYWHERE)
    wait_s = min(FIRST_S * 2.0 ** (min(counted, 16) - 1), LONGEST_S) if counted else 0.0
    return BackOff(len(row), last.at + timedelta(seconds=wait_s), last.why, last.fault is StartFault.EVERYWHERE)


def instances_avoided(starts: Iterable[Start], now: datetime) -> frozenset[str]:
    """Returns the ARNs of container instances that get no task now, because the last tasks on them did not start. Each
    further failure there doubles the time."""
    by_instance: dict[str, list[Start]] = defaultdict(list)
    for start in sorted(starts, key=lambda one: one.at, reverse=True):
        by_instance[start.instance].append(start)
    return frozenset(one for one, newest_first in by_instance.items() if one and _is_avoided(newest_first, now))


def _is_avoided(newest_first: Sequence[Start], now: datetime) -> bool:
    since_joined = takewhile(lambda start: start.fault is not None, newest_first)
    failed = [start for start in since_joined if start.fault is not StartFault.EVERYWHERE]
    if not failed:
        return False
    is_here = any(start.fault is StartFault.HERE for start in failed)
    first_s = INSTANCE_FIRST_S[StartFault.HERE if is_here else StartFault.AGAIN]
    wait_s = min(first_s * 2.0 ** (min(len(failed), 16) - 1), INSTANCE_LONGEST_S)
    return failed[0].at + timedelta(seconds=wait_s) > now
