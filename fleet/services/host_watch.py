"""Opens an incident when a host of the control plane is silent, or its database has no standby that has everything, and
closes it when that is over. Every web process looks; an incident is open once."""

from datetime import datetime

from fleet.models import Incident
from fleet.planning.states import IncidentState
from fleet.services.incident import incident_open, incidents_close
from kernel.control_hosts import control_hosts

KIND = "control-host"


class ControlHostWatch:
    """The look of one process. What is wrong must be so at two looks in a row: hosts are started anew."""

    def __init__(self) -> None:
        self._suspected: frozenset[str] = frozenset()

    def look(self, now: datetime) -> None:
        """To be called every few seconds."""
        problems = control_hosts().problems
        incidents = Incident.objects.filter(kind=KIND, state=IncidentState.OPEN.value)
        opened = set(incidents.values_list("subject", flat=True))
        for subject in sorted(problems.keys() & self._suspected - opened):
            incident_open(kind=KIND, subject=subject, summary=problems[subject], evidence={}, now=now)
        for subject in sorted(opened - problems.keys()):
            incidents_close(kind=KIND, subject=subject, resolution="it is well again", now=now)
        self._suspected = frozenset(problems)
