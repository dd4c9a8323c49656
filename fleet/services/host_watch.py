"""Opens an incident when a host of the control plane is silent, and closes it when the host is heard again. Every web
process checks; an incident is opened once."""

from datetime import datetime

from fleet.models import Incident
from fleet.planning.states import IncidentState
from fleet.services.incident import incident_open, incidents_close
from kernel.control_hosts import control_hosts

KIND = "control-host"


class ControlHostWatch:
    """The checks of one process. A host must be silent in two checks in a row, because hosts restart."""

    def __init__(self) -> None:
        self._suspected: frozenset[str] = frozenset()

    def look(self, now: datetime) -> None:
        """To be called every few seconds."""
        found = control_hosts()
        problems, known = found.problems, {host.name for host in found.hosts}
        incidents = Incident.objects.filter(kind=KIND, state=IncidentState.OPEN.value)
        opened = set(incidents.values_list("subject", flat=True))
        for subject in sorted(problems.keys() & self._suspected - opened):
            incident_open(kind=KIND, subject=subject, summary=problems[subject], evidence={}, now=now)
        for subject in sorted(opened - problems.keys()):
            resolution = (
                "it is heard again" if subject in known else "it no longer counts as a host of the control plane"
            )
            incidents_close(kind=KIND, subject=subject, resolution=resolution, now=now)
        self._suspected = frozenset(problems)
