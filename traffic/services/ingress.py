"""Ingresses: launched through the region's provider, watched, and started again when they are gone."""

import logging
from datetime import datetime, timedelta

from django.db import transaction

from controlplane.kernel import live
from controlplane.kernel.events import event_record
from controlplane.kernel.tones import Tone
from engine_agent.protocol.states import AgentKind
from fleet.models import Region
from fleet.planning.snapshot import ProviderStatus
from fleet.providers import provider_named
from fleet.providers.base import LaunchSpec, ProviderError
from fleet.services.enrolment import join_token_issue
from traffic.models import Ingress, IngressReport
from traffic.planning.ingress import plan_ingress

JOIN_TOKEN_TTL = timedelta(minutes=15)
SILENT_AFTER = timedelta(seconds=10)
"""Ingress agents report every 2 s; five missed reports raise doubt, as for nodes."""

log = logging.getLogger(__name__)


def ingress_create(*, region: Region, address: str, port: int, now: datetime) -> Ingress:
    """Record the ingress of a region; `ingresses_ensure` starts it."""
    ingress, _ = Ingress.objects.update_or_create(
        id=f"i-{region.name}",
        defaults={"region": region, "address": address, "port": port},
        create_defaults={"region": region, "address": address, "port": port, "created_at": now},
    )
    return ingress


def ingresses_ensure(*, now: datetime) -> list[str]:
    """Start every ingress that is not there, and every dead ingress agent. Returns what was started."""
    started = []
    for ingress in Ingress.objects.select_related("region", "report"):
        report: IngressReport | None = getattr(ingress, "report", None)
        if report is not None and _is_connected(report, now):
            continue
        try:
            if _ensure(ingress, report, now):
                started.append(ingress.id)
        except ProviderError as error:
            log.error("ingress %s: %s", ingress.id, error)
    return started


def _is_connected(report: IngressReport, now: datetime) -> bool:
    """A web process that was killed leaves `connected` behind; only fresh reports prove the connection."""
    return report.connected and report.last_seen_at is not None and now - report.last_seen_at < SILENT_AFTER


def _ensure(ingress: Ingress, report: IngressReport | None, now: datetime) -> bool:
    provider = provider_named(ingress.region.provider)
    status = provider.describe([ingress.id])[ingress.id]
    changed_at = report.connection_changed_at if report else None
    action = plan_ingress(status, known=report is not None, disconnected_at=changed_at, now=now)
    if action is None:
        return False
    if action.start_whole:
        _launch(ingress, now)
    else:
        provider.restart_agent(ingress.id)
    with transaction.atomic():
        event_record(
            kind="ingress.started",
            message=f"{ingress.id}: {action.reason}",
            tone=Tone.MOVING if report is None else Tone.WARN,
            now=now,
            region=ingress.region_id,
            detail={"whole": action.start_whole, "status": ProviderStatus(status).value},
        )
        IngressReport.objects.update_or_create(
            ingress=ingress, defaults={"connected": False, "connection_changed_at": now}
        )
        live.push("traffic", ingress.region_id)
    return True


def _launch(ingress: Ingress, now: datetime) -> None:
    token = join_token_issue(
        kind=AgentKind.INGRESS, subject=ingress.id, region=ingress.region_id, expires_at=now + JOIN_TOKEN_TTL
    )
    provider_named(ingress.region.provider).launch(
        LaunchSpec(
            id=ingress.id,
            kind=AgentKind.INGRESS,
            region=ingress.region_id,
            address=ingress.address,
            port=ingress.port,
            join_token=token,
        )
    )
