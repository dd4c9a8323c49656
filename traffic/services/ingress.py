"""Ingresses: launched through the region's provider, watched, and started again when they are gone."""

import logging
from datetime import datetime, timedelta

from django.db import transaction

from engine_agent.protocol.states import AgentKind
from fleet.models import Region
from fleet.planning.snapshot import ProviderStatus
from fleet.providers import provider_named
from fleet.providers.base import LaunchSpec, ProviderError
from fleet.selectors.trust import is_trusted
from fleet.services.agent_releases import launch_release
from fleet.services.authority import authority_ensure
from fleet.services.certificate import agent_trust_end
from fleet.services.enrolment import join_token_issue
from fleet.services.revocation import host_locked, machine_revoke
from kernel import live
from kernel.events import event_record
from kernel.leases import lease_release, lease_take, this_holder
from kernel.tones import Tone
from traffic.models import Ingress, IngressReport
from traffic.planning.ingress import SILENT_AFTER_S, plan_ingress
from traffic.services.ingress_machines import ingress_machines_follow

JOIN_TOKEN_TTL = timedelta(minutes=15)
START_LIMIT_S = 30.0
"""Booting a machine is bounded by its provider, at 10 s here; after this another worker may try."""

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
    ingress_machines_follow(now=now)
    started = []
    for ingress in Ingress.objects.filter(zone="").select_related("region", "report"):
        report: IngressReport | None = getattr(ingress, "report", None)
        if report is not None and _is_connected(report, now):
            continue
        if _ensure_alone(ingress, now):
            started.append(ingress.id)
    return started


def _is_connected(report: IngressReport, now: datetime) -> bool:
    """A web process that was killed leaves `connected` behind; only fresh reports prove the connection."""
    if not report.connected or report.last_seen_at is None:
        return False
    return (now - report.last_seen_at).total_seconds() < SILENT_AFTER_S


def _ensure_alone(ingress: Ingress, now: datetime) -> bool:
    """One worker at a time: booting takes longer than the next pass is away."""
    lease, holder = f"ingress:{ingress.id}", this_holder()
    if lease_take(name=lease, holder=holder, ttl_s=START_LIMIT_S, now=now) is None:
        return False
    try:
        return _ensure(ingress, now)
    except ProviderError as error:
        log.error("ingress %s: %s", ingress.id, error)
        return False
    finally:
        lease_release(name=lease, holder=holder, now=now)


def _ensure(ingress: Ingress, now: datetime) -> bool:
    report = IngressReport.objects.filter(ingress=ingress).first()
    provider = provider_named(ingress.region.provider)
    status = provider.describe([ingress.id])[ingress.id]
    action = plan_ingress(
        status,
        known=report is not None,
        disconnected_at=report.connection_changed_at if report else None,
        started_at=report.started_at if report else None,
        now=now,
    )
    if action is None:
        return False
    # Written down first: a start that fails, or that a crash cuts short, is tried again after its pause like any other.
    started = {"connected": False, "connection_changed_at": now, "started_at": now}
    IngressReport.objects.update_or_create(ingress=ingress, defaults=started)
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
        live.push("traffic", ingress.region_id)
    return True


def ingress_revoke(*, ingress_id: str, actor: str, now: datetime, why: str = "") -> None:
    """Trust an ingress no longer: its socket is cut within 5 s, and cells refuse its next connections. Once its machine
    is gone it is started again, with a credential of its own. A joined host that is it could enrol it again, so it is
    revoked with it. Nothing is done or said where nothing is left to revoke."""
    with transaction.atomic():
        machine = host_locked(ingress_id)
        ingress = Ingress.objects.select_for_update().get(id=ingress_id)
        is_hosted = machine is not None and machine.revoked_at is None
        if not is_hosted and not is_trusted(AgentKind.INGRESS, ingress.id, now):
            return
        if machine is not None:
            machine_revoke(machine_id=machine.id, actor=actor, now=now, why=why)
        agent_trust_end(kind=AgentKind.INGRESS, subject=ingress.id, now=now)
        event_record(
            kind="ingress.revoked",
            message=f"{ingress.id} is trusted no longer: revoked by {actor}" + (f": {why}" if why else ""),
            tone=Tone.BAD,
            now=now,
            actor=actor,
            region=ingress.region_id,
        )
        live.push("traffic", ingress.region_id)


def _launch(ingress: Ingress, now: datetime) -> None:
    token = join_token_issue(
        kind=AgentKind.INGRESS, subject=ingress.id, region=ingress.region_id, expires_at=now + JOIN_TOKEN_TTL
    )
    spec = LaunchSpec(
        id=ingress.id,
        kind=AgentKind.INGRESS,
        region=ingress.region_id,
        address=ingress.address,
        port=ingress.port,
        join_token=token,
        bundle=authority_ensure(now).bundle,
        release=launch_release(),
    )
    provider_named(ingress.region.provider).launch([spec])
