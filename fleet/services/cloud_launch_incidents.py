"""Tells a person about launches that only a person can get going again: those for which a quota is too small, and those
that a cloud refuses. Closed once machines of that type come again, or nobody has asked for an hour."""

from datetime import datetime, timedelta

from fleet.models import CloudRegion, Incident, LaunchAttempt
from fleet.planning.markets import Market
from fleet.planning.pools import LaunchOutcome
from fleet.planning.states import IncidentState
from fleet.providers.aws.errors import quota_name
from fleet.services.incident import incident_open, incidents_close

KINDS = {LaunchOutcome.NO_QUOTA: "no-quota", LaunchOutcome.REFUSED: "launch-refused"}
LOOKED_BACK = timedelta(hours=1)
"""As long as pools rest for a quota."""


def launch_incidents(cloud: CloudRegion, now: datetime) -> None:
    """Open and close them by what the last attempt of each instance type in a region came to."""
    found: dict[str, dict[str, str]] = {kind: {} for kind in KINDS.values()}
    for name, attempt in _last_attempts(cloud, now).items():
        outcome = LaunchOutcome(attempt.outcome)
        if outcome in KINDS:
            found[KINDS[outcome]][f"{cloud.pk}/{name}"] = _summary(cloud, name, attempt, outcome)
    for kind, summaries in found.items():
        rows = Incident.objects.filter(kind=kind, region=cloud.pk, state=IncidentState.OPEN.value)
        for subject in set(rows.values_list("subject", flat=True)) - set(summaries):
            incidents_close(kind=kind, subject=subject, resolution="it was not the last answer any more", now=now)
        for subject, summary in summaries.items():
            incident_open(kind=kind, subject=subject, summary=summary, evidence={}, now=now, region=cloud.pk)


def _last_attempts(cloud: CloudRegion, now: datetime) -> dict[str, LaunchAttempt]:
    """By instance type, of the last hour, of those whose outcome is known."""
    rows = LaunchAttempt.objects.filter(unit__region_id=cloud.pk, ended_at__gt=now - LOOKED_BACK)
    return {row.unit.instance_type_id: row for row in rows.select_related("unit").order_by("ended_at", "pk")}


def _summary(cloud: CloudRegion, name: str, attempt: LaunchAttempt, outcome: LaunchOutcome) -> str:
    if outcome is LaunchOutcome.REFUSED:
        return f"{cloud.pk} refuses to launch {name}: {attempt.text}"
    quota = quota_name(name, Market(attempt.pool_seen["market"]))
    return f"{cloud.pk} has no quota for more {name}: ask for more of {quota!r} ({attempt.text})"
