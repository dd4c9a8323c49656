"""Which releases of the agent the fleet has, and which agents were refused."""

import logging
from datetime import datetime, timedelta
from pathlib import Path

from django.db import IntegrityError, transaction

from engine_agent.protocol.machine_messages import release_in
from fleet.models import AgentRelease
from fleet.services.agent_archive import archives, own_release, release_folder, source_keep
from fleet.services.enrolment import AgentIdentity
from kernel.events import event_record
from kernel.models import Event
from kernel.tones import Tone

SAID_AGAIN_AFTER = timedelta(hours=1)
"""An agent that is refused tries again twice a minute."""

log = logging.getLogger(__name__)


def release_register(checkout: Path | None = None, *, now: datetime) -> AgentRelease:
    """Have the fleet know the release of a checkout, our own without one. The first one is current at once.

    Raises:
        NoRelease: the folder holds no agent.
        OSError: it cannot be kept.
    """
    release = source_keep(checkout) if checkout is not None else own_release()
    row, is_new = AgentRelease.objects.get_or_create(
        id=release.id, defaults={"version": release.version, "protocol": release.protocol, "created_at": now}
    )
    if is_new:
        log.info("release %s is known now", row)
    if not AgentRelease.objects.filter(is_current=True).exists():
        try:
            with transaction.atomic():
                AgentRelease.objects.filter(id=row.id).update(is_current=True)
        except IntegrityError:
            log.info("another controller's release became the current one")
        row.refresh_from_db()
    return row


def launch_release() -> str:
    """What an agent of this computer is to run that is launched now: the current release, as far as it is here."""
    current = AgentRelease.objects.filter(is_current=True).first()
    if current is None:
        return ""
    return current.id if release_in(release_folder(current.id)) is not None else own_release().id


def handed_out_release() -> str:
    """What a host that joins gets: the current release, or our own where there is no archive of that here."""
    current = AgentRelease.objects.filter(is_current=True).first()
    return current.id if current is not None and archives(current.id) else own_release().id


def archives_note(row: AgentRelease) -> None:
    """Keep which archives of a release are on this host, packing that of our own Python. What another host has packed
    first stays: machines believe one digest."""
    found = {one.tag: {"digest": one.digest, "size_bytes": one.path.stat().st_size} for one in archives(row.id)}
    row.archives = {**found, **row.archives}
    AgentRelease.objects.filter(id=row.id).update(archives=row.archives)


def agent_refused(identity: AgentIdentity, reason: str, *, now: datetime) -> None:
    """Put into the timeline, once an hour, that an agent was refused and why."""
    said = Event.objects.filter(kind="agent.refused", detail__agent=identity.id, at__gt=now - SAID_AGAIN_AFTER)
    if said.exists():
        return
    with transaction.atomic():
        event_record(
            kind="agent.refused",
            message=reason,
            tone=Tone.BAD,
            now=now,
            region=identity.region,
            node=identity.id if identity.id.startswith("n-") else "",
            detail={"agent": identity.id},
        )
