"""Tells CloudWatch how the install stands, so that somebody hears when nothing here can tell any more. By the worker:
the control loops neither wait for it nor vouch for themselves.
"""

import logging
from datetime import datetime

from django.db.models import Sum

from fleet.models import Cell, CloudRegion, DeploymentRegion, Incident, Install
from fleet.planning.cloud_metrics import InstallFigures, metrics_request
from fleet.planning.states import CellState, CloudRegionState, IncidentState
from fleet.providers.aws import calls
from kernel.loop_passes import control_standing

RECONCILER = "fleet.reconcile"

log = logging.getLogger(__name__)


def cloud_metrics_send(now: datetime) -> str:
    """Send the figures of now, in one call that is not repeated: the next are sent in a minute. Blocks for 23 s at the
    worst. Nothing is sent by an install without a region on AWS, nor by one that is read-only, as a copied
    database is: it would keep the alarm of the other one quiet. Returns why nothing was sent; "" if it was."""
    home = _home()
    if home is None:
        return "no region of aws is ready"
    install = Install.objects.first()
    if install is None or install.read_only:
        return _said(f"this install holds no cloud: {install.read_only if install else 'it has no name yet'}")
    try:
        calls.call("cloudwatch", "PutMetricData", home, **metrics_request(install.pk, figures()))
    except calls.CallFailed as error:
        return _said(f"CloudWatch in {home} took none: {error}")
    return ""


def figures() -> InstallFigures:
    standing = control_standing()
    return InstallFigures(
        cells_wanted=DeploymentRegion.objects.aggregate(wanted=Sum("cells"))["wanted"] or 0,
        cells_ready=Cell.objects.filter(state=CellState.READY.value).count(),
        incidents_open=Incident.objects.filter(state=IncidentState.OPEN.value, shadow=False).count(),
        reconciled_s=next((loop.age_s for loop in standing.loops if loop.loop == RECONCILER), None),
        last_pass_s=standing.last_pass_s,
    )


def _home() -> str | None:
    """The region of AWS in which the install's alarm hears, as the first region's stack states it."""
    ready = CloudRegion.objects.filter(region__provider="aws", state=CloudRegionState.READY.value)
    first = ready.order_by("region__position", "pk").first()
    return (first.stated_base().home or first.aws_region) if first is not None else None


def _said(reason: str) -> str:
    log.warning("no metrics were sent: %s", reason)
    return reason
