"""Keeps what is announced about machines: one open row for each kind and machine, whoever says it."""

from collections.abc import Iterable
from datetime import datetime

import msgspec
from django.db import transaction

from engine_agent.protocol.messages import MachineNotice
from fleet.models import CloudNotice, Machine, Node
from fleet.planning.machines import CLOUDS
from fleet.planning.notice_evidence import NODE_SPEAKS_EVERY, Evidence, Said, bounded_end, end_of, heard, stands
from fleet.planning.states import MachineRole, MachineState, NoticeKind, NoticeSource
from fleet.services.node_event import node_event
from fleet.services.reports import ReceivedReport
from kernel import live, wake_ups
from kernel.tones import Tone

TEXT_MOST = 500


def notice_record(
    *,
    machine: Machine,
    kind: NoticeKind,
    source: NoticeSource,
    said: Said,
    text: str = "",
    since: datetime | None = None,
    now: datetime,
) -> bool:
    """Keep what a source said of a machine, or that it took it back. Returns whether anything follows from it: not
    where it was known, confirms what others said, or is older than what was said since. `since`: when it began; None:
    when it was said."""
    with transaction.atomic():
        Machine.objects.select_for_update().only("pk").get(pk=machine.pk)
        row = CloudNotice.objects.filter(machine=machine, kind=kind).order_by("-pk").first()
        evidence = heard(evidence_of(row), source, said)
        if evidence is None:
            return False
        if row is None or (row.settled_at is not None and not said.over and set(evidence) != {NoticeSource.IMDS}):
            evidence = {source: said}
            row = CloudNotice(machine=machine, kind=kind, source=source, at=since or said.at, settled_at=now)
        return _keep(row, evidence, text, now)


def evidence_of(row: CloudNotice | None) -> Evidence:
    return msgspec.convert(row.evidence, dict[NoticeSource, Said]) if row is not None else {}


def _keep(row: CloudNotice, evidence: Evidence, text: str, now: datetime) -> bool:
    before = (row.settled_at is None, row.ends_at)
    row.evidence = msgspec.to_builtins(evidence)
    if stands(evidence):
        row.ends_at, row.settled_at = end_of(evidence), None
    else:
        row.settled_at = row.settled_at or now
    row.text = row.text or text[:TEXT_MOST]
    row.save()
    if before == (row.settled_at is None, row.ends_at) or (not before[0] and row.settled_at is not None):
        return False
    node = Node.objects.filter(id=row.machine.runs).first()
    if node is not None:
        node_event(node, "node.notice", f"{node.id}: {_told(row)}", now=now, tone=_tone(row))
    live.push("machines")
    wake_ups.send("fleet.reconcile")
    return True


def _told(row: CloudNotice) -> str:
    if row.settled_at is not None:
        return f"{row.kind} is called off"
    until = f" until {row.ends_at:%Y-%m-%d %H:%M:%S} UTC" if row.ends_at else ""
    return f"{row.kind}{until}: {row.text}"


def _tone(row: CloudNotice) -> Tone:
    return Tone.WARN if row.settled_at is None else Tone.OK


# Keeps what node agents report of their machines' metadata. A node may be in a stranger's hands: it speaks of its
# own machine alone, in words of ours, once a minute of each kind, and takes back only what it said itself.

TEXT = "said by the machine's own metadata"


def node_notices_store(reports: Iterable[ReceivedReport], *, now: datetime) -> set[str]:
    """Keep what these nodes say. Returns those of which all is kept; what is too early is to be given again."""
    told = {one.node_id: one.report.telemetry.notices for one in reports}
    machines = Machine.objects.filter(provider__in=CLOUDS, role=MachineRole.NODE.value, runs__in=told)
    found = machines.exclude(state=MachineState.GONE.value).prefetch_related("notices")
    late = {machine.runs for machine in found if not _store(machine, told[machine.runs] or (), now)}
    return set(told) - late


def _store(machine: Machine, notices: tuple[MachineNotice, ...], now: datetime) -> bool:
    said = {NoticeKind(notice.kind): notice for notice in notices}
    known = {NoticeKind(row.kind): evidence_of(row) for row in sorted(machine.notices.all(), key=lambda row: row.pk)}
    is_whole = True
    for kind in said.keys() | known.keys():
        before, word = known.get(kind, {}).get(NoticeSource.IMDS), _word(said.get(kind), now)
        if word.over if before is None else (before.over, before.key) == (word.over, word.key):
            continue
        if before is not None and now - before.at < NODE_SPEAKS_EVERY:
            is_whole = False
            continue
        notice_record(machine=machine, kind=kind, source=NoticeSource.IMDS, said=word, text=TEXT, now=now)
    return is_whole


def _word(notice: MachineNotice | None, now: datetime) -> Said:
    if notice is None:
        return Said("", now, over=True)
    return Said(str(notice.ends_at), now, bounded_end(notice.ends_at, now))
