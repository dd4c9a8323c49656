"""Opens incidents while a host of the control plane is silent or a control loop makes no pass. Every web process
checks; an incident is opened once."""

from collections.abc import Callable
from datetime import datetime
from time import monotonic

from engine_agent.protocol.watchdog import LateWakeUp
from fleet.models import Incident
from fleet.planning.states import IncidentState
from fleet.services.incident import incident_open, incidents_close
from kernel.ages import age_text
from kernel.control_hosts import control_hosts
from kernel.control_standing import LATE_AFTER_S, STALE_AFTER_S, LoopAge
from kernel.loop_passes import control_standing

CONTROL_HOST = "control-host"


class ControlHostWatch:
    """The checks of one process. A host must be silent in two checks in a row, because hosts restart."""

    def __init__(self) -> None:
        self._suspected: frozenset[str] = frozenset()

    def look(self, now: datetime) -> None:
        """To be called every few seconds."""
        found = control_hosts()
        problems, known = found.problems, {host.name for host in found.hosts}
        incidents = Incident.objects.filter(kind=CONTROL_HOST, state=IncidentState.OPEN.value)
        opened = set(incidents.values_list("subject", flat=True))
        for subject in sorted(problems.keys() & self._suspected - opened):
            incident_open(kind=CONTROL_HOST, subject=subject, summary=problems[subject], evidence={}, now=now)
        for subject in sorted(opened - problems.keys()):
            resolution = (
                "it is heard again" if subject in known else "it no longer counts as a host of the control plane"
            )
            incidents_close(kind=CONTROL_HOST, subject=subject, resolution=resolution, now=now)
        self._suspected = frozenset(problems)


# Opens an incident when a control loop makes no pass, and closes it when it does. For processes that are not the
# controller: who does not run cannot say so.

LOOK_EVERY_S = 5.0
LOOP_STALE = "control-loop-stale"


class ControlLoopWatch:
    """The look of one process. One that has just begun, or was stopped itself, gives the controller as long to pass as
    it has anyway: whatever stopped it may have stopped both."""

    def __init__(self, now_s: Callable[[], float] = monotonic) -> None:
        self._now_s = now_s
        self._own = LateWakeUp(grace_s=STALE_AFTER_S, longest_pause_s=3 * LOOK_EVERY_S)

    def look(self, now: datetime) -> None:
        """To be called every `LOOK_EVERY_S`. Several processes may look: an incident is open once."""
        may_judge = self._own.may_judge(self._now_s())
        standing = control_standing()
        incidents = Incident.objects.filter(kind=LOOP_STALE, state=IncidentState.OPEN.value)
        opened = set(incidents.values_list("subject", flat=True))
        for loop in standing.stale:
            if may_judge and loop.loop not in opened:
                _open(loop, now)
        for subject in opened & {loop.loop for loop in standing.loops if loop.age_s <= LATE_AFTER_S}:
            incidents_close(kind=LOOP_STALE, subject=subject, resolution="it makes passes again", now=now)


def _open(loop: LoopAge, now: datetime) -> None:
    incident_open(
        kind=LOOP_STALE,
        subject=loop.loop,
        summary=f"{loop.loop} has made no whole pass for {age_text(loop.age_s)}: nothing that it decides is decided",
        evidence={"last_pass_s": round(loop.age_s, 1), "last_pass_took_s": round(loop.took_s, 3)},
        now=now,
    )
