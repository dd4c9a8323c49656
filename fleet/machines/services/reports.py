"""Stores the reports of machine agents and the notices about machines, one open row for each kind and machine. Moves
machines by their reports: to free once they joined or wiped their data, and to gone once they have left. A machine may
be compromised: it can report only about itself, once a minute of each kind, and withdraws only its own statements."""

import ipaddress
import logging
from collections.abc import Sequence
from datetime import datetime

import msgspec
from django.db import transaction

from engine_agent.protocol.machine_messages import VERSION_MOST, MachineFacts, MachineNotice, MachineReport
from engine_agent.protocol.messages import Hello
from engine_agent.protocol.ports import first_ports
from engine_agent.protocol.states import AgentKind, MachinePhase
from fleet.agents.services.authority import agent_trust_end
from fleet.clouds.models import CloudNotice
from fleet.faults.models import Incident
from fleet.faults.services.incidents import incident_open, incidents_close
from fleet.machines.models import Machine
from fleet.machines.planner import (
    CLOUDS,
    HARDWARE_DIFFERS,
    MACHINE_SPEAKS_EVERY,
    Evidence,
    Statement,
    add_statement,
    bounded_end,
    earliest_end,
    hardware_difference,
    instance_type_of,
    is_in_force,
    why_unfit,
)
from fleet.machines.services.layouts import layout_follow, slots_report
from fleet.machines.services.machines import detected_type, machine_move, machine_remove, nodes_on
from fleet.nodes.models import Node
from fleet.nodes.services.events import node_event
from fleet.reconcile.planning.states import IncidentState, MachineRole, MachineState, NoticeKind, NoticeSource
from kernel import live, wake_ups
from kernel.refusals import Conflict
from kernel.sanitize import UNSTORABLE_ERRORS, json_without_nul
from kernel.tones import Tone
from models_registry.instance_types.selectors import instance_shapes

log = logging.getLogger(__name__)

REASON_MOST = 500
ORDER_MOST = 64
MOST_DEVICES, MOST_NOTICES = 256, 20
ATTEMPTS = range(2**31)
REPORTED = [
    *("connected", "connection", "last_seen_at", "phase", "agent_reason", "release_trouble", "release_attempt"),
    *("may_reboot", "rebooted", "reboot_trouble"),
]


class ReceivedMachineReport(msgspec.Struct, frozen=True):
    """The latest report of one machine and its connection. `report` None: the connection ended."""

    machine: str
    connection: str
    connected: bool
    at: datetime
    report: MachineReport


def machine_hellos_store(hellos: Sequence[Hello], *, now: datetime) -> dict[str, Conflict]:
    """Stores the facts in hellos. Returns the rejected agents with the reason: no facts, invalid facts, or no
    machine."""
    refused = {}
    for hello in hellos:
        try:
            _hello_store(hello, now)
        except Conflict as conflict:
            refused[hello.id] = conflict
        except UNSTORABLE_ERRORS as error:
            refused[hello.id] = Conflict(f"the hello of {hello.id} cannot be stored: {error}")
    return refused


def _hello_store(hello: Hello, now: datetime) -> None:
    if hello.machine is None:
        raise Conflict(f"the hello of {hello.id} lacks the facts of its host")
    _require_reachable(hello.machine)
    facts = msgspec.json.decode(
        json_without_nul(
            msgspec.json.encode(
                msgspec.structs.replace(
                    hello.machine,
                    devices=hello.machine.devices[:MOST_DEVICES],
                    notices=tuple(notice[:REASON_MOST] for notice in hello.machine.notices[:MOST_NOTICES]),
                )
            )
        ),
        type=MachineFacts,
    )
    with transaction.atomic():
        machine = Machine.objects.select_for_update().filter(id=hello.id).exclude(state=MachineState.GONE).first()
        if machine is None:
            raise Conflict(f"{hello.id} was removed; uninstall it and join it with a new token")
        if machine.revoked_at is not None:
            raise Conflict(f"{hello.id} was revoked; uninstall it and join it with a new token")
        _require_first_port(AgentKind(machine.role), facts.port_base)
        if machine.provider in CLOUDS and facts.address != machine.address:
            raise Conflict(f"{hello.id} has the address {machine.address}, and its hello states {facts.address[:80]}")
        _find_type(machine, facts, now)
        machine.facts = msgspec.to_builtins(facts)
        machine.address, machine.port_base = facts.address[:64], facts.port_base
        machine.agent_version = hello.agent_version[:VERSION_MOST]
        machine.connected, machine.last_seen_at = True, now
        machine.save(
            update_fields=[
                *("facts", "address", "port_base", "agent_version", "connected", "last_seen_at", "instance_type"),
            ]
        )
        if machine.state == MachineState.JOINING:
            machine_move(machine, MachineState.POOL, "its agent is connected", now=now)
        _compare_hardware(machine, facts, now)
        live.push("machines", machine.id)


def _find_type(machine: Machine, facts: MachineFacts, now: datetime) -> None:
    """A free machine without a stated type gets a known type that it fits; if it had none yet, also a new type with the
    hardware that its agent found. A type that it fits stays, and so does one with more accelerators than it has now:
    that difference is an incident."""
    if machine.type_stated or machine.state not in {MachineState.JOINING, MachineState.POOL}:
        return
    if machine.instance_type_id is None:
        machine.instance_type_id = detected_type(facts, machine.id, now=now)
        return
    shapes = instance_shapes()
    before = shapes[machine.instance_type_id]
    name = instance_type_of(facts, shapes.values())
    if why_unfit(facts, before) and name and shapes[name].chips >= before.chips:
        machine.instance_type_id = detected_type(facts, machine.id, now=now)


def _compare_hardware(machine: Machine, facts: MachineFacts, now: datetime) -> None:
    """An incident while a node's machine is not what its instance type states."""
    kind = machine.instance_type_id if machine.role == MachineRole.NODE else None
    found = None
    if kind is not None:
        found = hardware_difference(machine.id, facts, instance_shapes([kind])[kind], is_stated=machine.type_stated)
    known = Incident.objects.filter(kind=HARDWARE_DIFFERS, subject=machine.id, state=IncidentState.OPEN.value).first()
    if known is not None and (found is None or found.summary != known.summary):
        resolution = f"now {found.summary}" if found else "it has what its instance type states"
        incidents_close(kind=HARDWARE_DIFFERS, subject=machine.id, resolution=resolution, now=now)
    if found is not None:
        incident_open(
            kind=HARDWARE_DIFFERS,
            subject=machine.id,
            summary=found.summary,
            evidence=found.evidence,
            now=now,
            region=machine.region_id,
            node=machine.runs,
        )


def _require_reachable(facts: MachineFacts) -> None:
    """The address goes into the routing tables of other regions' ingresses."""
    try:
        address = ipaddress.ip_address(facts.address)
    except ValueError:
        raise Conflict(f"the address of a machine must be an IP address, not {facts.address[:80]!r}") from None
    if address.is_unspecified or address.is_multicast or "%" in facts.address:
        raise Conflict(f"the address of a machine must be reachable from other hosts, not {address}")


def _require_first_port(kind: AgentKind, port: int) -> None:
    possible = first_ports(kind)
    if port not in possible:
        raise Conflict(f"the first port of a machine must be {possible[0]} to {possible[-1]}, not {port}")


def machine_reports_store(received: Sequence[ReceivedMachineReport]) -> None:
    for one in received:
        with transaction.atomic():
            machine = Machine.objects.select_for_update().filter(id=one.machine).first()
            if machine is None or not (one.connected or machine.connection == one.connection):
                continue  # the end of a connection that was replaced
            before = _visible_part(machine)
            machine.connected, machine.connection, machine.last_seen_at = one.connected, one.connection, one.at
            machine.phase = one.report.phase.value
            machine.agent_reason = one.report.reason.replace("\0", "")[:REASON_MOST]
            machine.release_trouble = one.report.release_trouble.replace("\0", "")[:REASON_MOST]
            machine.release_attempt = one.report.attempt if one.report.attempt in ATTEMPTS else 0
            machine.may_reboot = one.report.may_reboot
            machine.rebooted = one.report.rebooted.replace("\0", "")[:ORDER_MOST]
            machine.reboot_trouble = one.report.reboot_trouble.replace("\0", "")[:REASON_MOST]
            machine.save(update_fields=REPORTED)
            if one.report.wants_to_leave and not machine.leaving and machine.state != MachineState.GONE:
                _remove_as_wished(machine, one.at)
            if one.connected and one.report.notices is not None and machine.state != MachineState.GONE:
                _store_notices(machine, one.report.notices, one.at)
            _apply_report(machine, one.report, one.at)
            if machine.layout:
                slots_report(machine, one.report, now=one.at)
            layout_follow(machine, now=one.at)
            if before != _visible_part(machine):
                live.push("machines", machine.id)
                wake_ups.send("fleet.provision")


def _visible_part(machine: Machine) -> tuple[object, ...]:
    reboots = machine.may_reboot, machine.rebooted, machine.reboot_trouble
    return machine.connected, machine.phase, machine.agent_reason, machine.release_trouble, reboots


def _remove_as_wished(machine: Machine, now: datetime) -> None:
    try:
        machine_remove(machine_id=machine.id, actor=machine.id, now=now, why="its owner wants the host back")
    except Conflict as conflict:
        log.info("%s cannot leave yet: %s", machine.id, conflict)
    machine.refresh_from_db()


def _apply_report(machine: Machine, report: MachineReport, now: datetime) -> None:
    follows = report.version >= machine.desired_version
    is_wiped = report.phase is MachinePhase.IDLE and not report.runs and not machine.layout
    if machine.state == MachineState.WIPING and follows and is_wiped:
        to = MachineState.LEAVING if machine.leaving else MachineState.POOL
        version = machine.desired_version + (to is MachineState.LEAVING)
        if machine_move(machine, to, "it has wiped what it held", now=now, runs="", desired_version=version):
            live.push_desired([machine.id])
    elif machine.state == MachineState.LEAVING and report.phase is MachinePhase.LEFT:
        machine_move(machine, MachineState.GONE, "it has uninstalled itself", now=now, connected=False)
        agent_trust_end(kind=AgentKind.MACHINE, subject=machine.id, now=now)


TEXT_MOST = 500


def notice_record(
    *,
    machine: Machine,
    kind: NoticeKind,
    source: NoticeSource,
    statement: Statement,
    text: str = "",
    since: datetime | None = None,
    now: datetime,
) -> bool:
    """Stores a source's statement about a machine, or its withdrawal. Returns whether it changed anything: not if it is
    known, confirmed, or outdated. `since`: start of the event; None: now."""
    with transaction.atomic():
        Machine.objects.select_for_update().only("pk").get(pk=machine.pk)
        row = CloudNotice.objects.filter(machine=machine, kind=kind).order_by("-pk").first()
        evidence = add_statement(evidence_of(row), source, statement)
        if evidence is None:
            return False
        if row is None or (row.settled_at is not None and not statement.over and set(evidence) != {NoticeSource.IMDS}):
            evidence = {source: statement}
            row = CloudNotice(machine=machine, kind=kind, source=source, at=since or statement.at, settled_at=now)
        return _store_evidence(row, evidence, text, now)


def evidence_of(row: CloudNotice | None) -> Evidence:
    return msgspec.convert(row.evidence, dict[NoticeSource, Statement]) if row is not None else {}


def _store_evidence(row: CloudNotice, evidence: Evidence, text: str, now: datetime) -> bool:
    before = (row.settled_at is None, row.ends_at)
    row.evidence = msgspec.to_builtins(evidence)
    if is_in_force(evidence):
        row.ends_at, row.settled_at = earliest_end(evidence), None
    else:
        row.settled_at = row.settled_at or now
    row.text = row.text or text[:TEXT_MOST]
    row.save()
    if before == (row.settled_at is None, row.ends_at) or (not before[0] and row.settled_at is not None):
        return False
    for node in Node.objects.filter(id__in=nodes_on(row.machine)).order_by("id"):
        node_event(node, "node.notice", f"{node.id}: {_notice_sentence(row)}", now=now, tone=_notice_tone(row))
    live.push("machines")
    wake_ups.send("fleet.reconcile")
    return True


def _notice_sentence(row: CloudNotice) -> str:
    if row.settled_at is not None:
        return f"{row.kind} is called off"
    until = f" until {row.ends_at:%Y-%m-%d %H:%M:%S} UTC" if row.ends_at else ""
    return f"{row.kind}{until}: {row.text}"


def _notice_tone(row: CloudNotice) -> Tone:
    return Tone.WARN if row.settled_at is None else Tone.OK


# Notices from machines, which read their own metadata.

TEXT = "reported by the machine's own metadata"


def _store_notices(machine: Machine, notices: tuple[MachineNotice, ...], now: datetime) -> None:
    """Stores the notices of a machine's report, in the caller's transaction. A statement that comes too soon is stored
    with a later report."""
    if machine.role != MachineRole.NODE:
        return
    by_kind = {NoticeKind(notice.kind): notice for notice in notices}
    known = {NoticeKind(row.kind): evidence_of(row) for row in machine.notices.order_by("pk")}
    for kind in by_kind.keys() | known.keys():
        before, word = known.get(kind, {}).get(NoticeSource.IMDS), _statement(by_kind.get(kind), now)
        if word.over if before is None else (before.over, before.key) == (word.over, word.key):
            continue
        if before is None or now - before.at >= MACHINE_SPEAKS_EVERY:
            notice_record(machine=machine, kind=kind, source=NoticeSource.IMDS, statement=word, text=TEXT, now=now)


def _statement(notice: MachineNotice | None, now: datetime) -> Statement:
    if notice is None:
        return Statement("", now, over=True)
    return Statement(str(notice.ends_at), now, bounded_end(notice.ends_at, now))
