"""Opens an incident while tasks of an ECS cluster do not start for a reason that more tries do not change, or several
times in a row, and closes it once one has joined. `fleet.clouds.planning.starts` decides."""

from datetime import datetime

from fleet.clouds.models import CloudRegion, LaunchUnit
from fleet.clouds.planning.starts import LOOKED_BACK, BackOff, back_off
from fleet.clouds.selectors import task_starts
from fleet.deployments.models import DeploymentRegion
from fleet.faults.models import Incident
from fleet.faults.services.incidents import incident_open, incidents_close
from fleet.reconcile.planning.states import IncidentState, MachineRole

NOT_STARTED = "task-not-started"
"""Kind of the incident. Its subject is `REGION/INSTANCE TYPE`, with `/ingress` for ingresses."""
FAILED_MOST = 2
"""Failed launches in a row without an incident, if more tries may succeed."""


def start_incidents(cloud: CloudRegion, now: datetime) -> None:
    """Opens and closes the incidents of a region that is an ECS cluster."""
    units = LaunchUnit.objects.filter(region_id=cloud.pk, attempts__begun_at__gt=now - LOOKED_BACK)
    failing: dict[str, tuple[str, BackOff, str]] = {}
    for kind, role in sorted(set(units.order_by().values_list("instance_type_id", "role"))):
        starts = task_starts(cloud.pk, kind, MachineRole(role), now)
        newest = max(starts, key=lambda one: one.at, default=None)
        waits = back_off(starts, newest.image) if newest is not None else None
        if newest is not None and waits is not None and (waits.needs_person or waits.failed > FAILED_MOST):
            suffix = "" if role == MachineRole.NODE else f"/{role}"
            failing[f"{cloud.pk}/{kind}{suffix}"] = (kind, waits, newest.image)
    rows = Incident.objects.filter(kind=NOT_STARTED, region=cloud.pk, state=IncidentState.OPEN.value)
    for subject in set(rows.values_list("subject", flat=True)) - set(failing):
        incidents_close(kind=NOT_STARTED, subject=subject, resolution="a task has joined since", now=now)
    for subject, (kind, waits, image) in failing.items():
        incident_open(
            kind=NOT_STARTED,
            subject=subject,
            summary=f"Tasks on {kind} in {cloud.pk} do not start: {waits.why}",
            evidence={"image": image, "reason": waits.why, "deployments": _deployments_on(cloud.pk, kind)},
            now=now,
            region=cloud.pk,
        )


def _deployments_on(region: str, instance_type: str) -> list[str]:
    rows = DeploymentRegion.objects.filter(region_id=region, cells__gt=0)
    rows = rows.filter(deployment__instance_types__contains=[instance_type])
    return sorted(rows.values_list("deployment_id", flat=True))
