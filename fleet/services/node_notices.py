"""Keeps what node agents report of their machines' metadata. A node may be in a stranger's hands: it speaks of its own
machine alone, in words of ours, once a minute of each kind, and takes back only what it said itself."""

from collections.abc import Iterable
from datetime import datetime

from engine_agent.protocol.messages import MachineNotice
from fleet.models import Machine
from fleet.planning.machines import CLOUDS
from fleet.planning.notice_evidence import NODE_SPEAKS_EVERY, Said, bounded_end
from fleet.planning.states import MachineRole, MachineState, NoticeKind, NoticeSource
from fleet.services.machine_notice import evidence_of, notice_record
from fleet.services.reports import ReceivedReport

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
