"""Invites hosts, lets them join, and removes machines. Never decides what runs on a machine; providers do
(`fleet.clouds.machines`)."""

import contextlib
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from django.db import transaction

from engine_agent.protocol.machine_messages import MachineFacts, is_machine_id, machine_id_of
from engine_agent.protocol.states import AgentKind
from fleet.agents.services.authority import agent_trust_end
from fleet.agents.services.enrolment import credential_issue
from fleet.cells.models import CellMember
from fleet.cells.services import layout_disruption_close
from fleet.clouds.models import CloudNotice
from fleet.faults.services.incidents import incidents_close
from fleet.machines.layouts import InvalidLayout, parse_layout
from fleet.machines.models import Invitation, Machine, MachineSlot
from fleet.machines.planner import (
    HARDWARE_DIFFERS,
    POOLED,
    SILENT_AFTER_S,
    has_machine_agent,
    instance_type_of,
    shape_found,
    silent_for_s,
)
from fleet.nodes.models import Node
from fleet.nodes.services.nodes import node_replacement_request, node_retire
from fleet.reconcile.planning.decisions import RetireNode
from fleet.reconcile.planning.states import MACHINE_ALLOWED, MachineRole, MachineState, NodeState
from fleet.regions.models import Region
from kernel import live, wake_ups
from kernel.events import event_record
from kernel.metrics import JOINS_REFUSED
from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from kernel.secrets import secret_matches, secret_prefix, secret_row_create
from kernel.tones import Tone
from kernel.transitions import StaleDecision
from models_registry.instance_types.models import InstanceType, Origin
from models_registry.instance_types.selectors import instance_shapes
from models_registry.instance_types.services import instance_type_ensure, instance_type_found, instance_type_named

MOST_INVITED = 1000
LONGEST = timedelta(days=7)
EXPIRED_KEPT = timedelta(days=7)
"""Until then errors say "expired" instead of "unknown"."""
REFUSALS_PER_MIN = 5
STRANGERS_EVERY = timedelta(minutes=10)
REASON_MOST = 300


class InvitationRefused(Exception):
    """The invitation does not let this host join; the text says why."""


class NewInvitation(NamedTuple):
    invitation: Invitation
    text: str


def invitation_create(
    *,
    region: str,
    count: int,
    expires_in: timedelta,
    actor: str,
    now: datetime,
    role: MachineRole = MachineRole.NODE,
    instance_type: str = "",
    layout: str = "",
) -> NewInvitation:
    """Lets `count` hosts join a region within `expires_in`. With a `layout` each is divided into nodes when it joins,
    which then have the instance type. Raises InvalidInput for an unknown region or instance type, a region of another
    provider, an invalid layout, or a number out of bounds."""
    place = Region.objects.filter(name=region).first()
    if place is None:
        there = ", ".join(Region.objects.values_list("name", flat=True)) or "none"
        raise InvalidInput(field="region", rule="exists", message=f"there is no region {region!r}; there are: {there}")
    if place.provider != POOLED:
        message = f"region {region} gets its machines from provider {place.provider}; hosts join regions of {POOLED}"
        raise InvalidInput(field="region", rule="provider", message=message)
    if not 1 <= count <= MOST_INVITED:
        raise InvalidInput(field="count", rule="range", message=f"count is {count}; it must be 1 to {MOST_INVITED}")
    if not timedelta(minutes=1) <= expires_in <= LONGEST:
        message = f"it expires in {expires_in.total_seconds():.0f} s; it must be 60 s to {LONGEST.days} days"
        raise InvalidInput(field="expires_in_s", rule="range", message=message)
    kind = instance_type_named(instance_type) if instance_type else None
    _check_layout(layout, role)
    with transaction.atomic():
        invitation, text = secret_row_create(
            Invitation,
            region=place,
            role=role.value,
            instance_type=kind,
            layout=layout,
            count=count,
            left=count,
            created_by=actor,
            created_at=now,
            expires_at=now + expires_in,
        )
        event_record(
            kind="machine.invited",
            message=f"{actor} invited {count} x {role} into {region}, until {invitation.expires_at:%H:%M} UTC",
            tone=Tone.IDLE,
            now=now,
            actor=actor,
            region=region,
        )
        live.push("machines")
    return NewInvitation(invitation, text)


def _check_layout(layout: str, role: MachineRole) -> None:
    if layout and role is not MachineRole.NODE:
        raise InvalidInput(field="layout", rule="role", message="an ingress has no nodes, so it has no layout")
    try:
        parse_layout(layout or "1x1")
    except InvalidLayout as error:
        raise InvalidInput(field="layout", rule="layout", message=str(error)) from None


def is_ticket(token: str) -> bool:
    """Whether a token is a ticket of an attested cloud machine."""
    row = _invitation_row(token)
    return row is not None and row.machine_id is not None


def invitation_withdraw(*, prefix: str, actor: str, now: datetime, why: str = "") -> Invitation:
    """Withdraws an invitation. Joined hosts stay, but cannot use it again. Raises Conflict if it is withdrawn
    already."""
    with transaction.atomic():
        invitation = Invitation.objects.select_for_update().get(prefix=prefix)
        if invitation.withdrawn_at is not None:
            raise Conflict(f"{invitation} is withdrawn already, since {invitation.withdrawn_at:%Y-%m-%d %H:%M:%S} UTC")
        invitation.withdrawn_at = now
        invitation.save(update_fields=["withdrawn_at"])
        event_record(
            kind="machine.invitation-withdrawn",
            message=f"{actor} withdrew {invitation}" + (f": {why}" if why else ""),
            tone=Tone.IDLE,
            now=now,
            actor=actor,
            region=invitation.region_id,
        )
        live.push("machines")
    return invitation


def invitation_open(token: str, *, now: datetime) -> Invitation:
    """Returns the invitation of a token that lets one more host join. Raises InvitationRefused if it is unknown, used
    up, withdrawn or expired."""
    found = invitation_of(token, now=now)
    if found.left == 0:
        raise _used_up(found)
    return found


def _invitation_row(token: str) -> Invitation | None:
    found = Invitation.objects.select_related("region").filter(prefix=secret_prefix(token) or "").first()
    return found if found is not None and secret_matches(token, found.digest) else None


def _used_up(invitation: Invitation) -> InvitationRefused:
    hosts = f"{invitation.count} hosts" if invitation.count > 1 else "one host"
    return InvitationRefused(f"this token was for {hosts} and is used up; `switchyard machine add` makes a new one")


def invitation_of(token: str, *, now: datetime) -> Invitation:
    """Returns the invitation of a token, used up or not. Raises InvitationRefused if it is unknown, withdrawn or
    expired."""
    found = _invitation_row(token)
    if found is None:
        raise InvitationRefused("this token is unknown; `switchyard machine add` prints a line with a new one")
    _check_counts(found, now)
    return found


def _check_counts(found: Invitation, now: datetime) -> None:
    if found.withdrawn_at is not None:
        raise InvitationRefused("this token was withdrawn; `switchyard machine add` makes a new one")
    if found.expires_at <= now:
        raise InvitationRefused(
            f"this token expired at {found.expires_at:%Y-%m-%d %H:%M:%S} UTC; `switchyard machine add` makes a new one"
        )


def machine_enrol(*, token: str, kind: str, subject: str, nonce: str, now: datetime) -> str:
    """Exchanges an invitation for a machine's credential. The machine's ID follows from its nonce. The machine may
    repeat the exchange while the invitation is valid, because the first response may have been lost. Raises
    InvitationRefused if it is unknown, used up, withdrawn or expired, or the ID does not match the nonce."""
    with transaction.atomic():
        invitation = invitation_of(token, now=now)
        Invitation.objects.select_for_update().get(pk=invitation.pk)
        by_nonce = invitation.machine_id is None
        if by_nonce and not (is_machine_id(subject) and hmac.compare_digest(subject, machine_id_of(nonce))):
            raise InvitationRefused("the id of a machine must be m- and 8 digits of its nonce's SHA-256")
        invitation.refresh_from_db(fields=["left", "withdrawn_at"])
        _check_counts(invitation, now)
        if invitation.machine_id is not None:
            return _enrol_by_ticket(invitation, subject, nonce, now)
        known = Machine.objects.select_for_update().filter(id=subject).first()
        if known is not None:
            _check_same(known, invitation, nonce)
        elif invitation.left == 0:
            raise _used_up(invitation)
        else:
            _machine_create(subject, nonce, invitation, now)
        return credential_issue(kind=kind, subject=subject, region=invitation.region_id, now=now)


def _enrol_by_ticket(ticket: Invitation, subject: str, nonce: str, now: datetime) -> str:
    """A cloud machine has its ID from its launch, and attested the digest of its nonce."""
    machine = Machine.objects.select_for_update().get(id=ticket.machine_id)
    if subject != machine.id or not hmac.compare_digest(ticket.proof_digest, _nonce_digest(nonce)):
        raise InvitationRefused(f"this ticket is only for {machine.id} with the nonce of its proof")
    if machine.state == MachineState.GONE or machine.revoked_at is not None:
        raise InvitationRefused(f"{machine.id} has ended or was revoked")
    Invitation.objects.filter(pk=ticket.pk).update(left=0)
    return credential_issue(kind=AgentKind.MACHINE.value, subject=machine.id, region=ticket.region_id, now=now)


def _check_same(known: Machine, invitation: Invitation, nonce: str) -> None:
    same = known.invitation_id == invitation.pk and hmac.compare_digest(known.nonce_digest, _nonce_digest(nonce))
    if not same or known.state == MachineState.GONE or known.revoked_at is not None:
        raise InvitationRefused(f"{known.id} joined with another token, was revoked or was removed; uninstall it first")


def _machine_create(subject: str, nonce: str, invitation: Invitation, now: datetime) -> None:
    """With a layout, it is divided when its hardware is known, and the stated type is that of its nodes."""
    kind = invitation.instance_type_id
    of_nodes = [kind] * len(parse_layout(invitation.layout)) if kind and invitation.layout else []
    of_machine = None if invitation.layout else kind
    Invitation.objects.filter(pk=invitation.pk).update(left=invitation.left - 1)
    Machine.objects.create(
        id=subject,
        provider=POOLED,
        provider_id=subject,
        region_id=invitation.region_id,
        role=invitation.role,
        state=MachineState.JOINING.value,
        reason=f"invited by {invitation.created_by}",
        instance_type_id=of_machine,
        type_stated=of_machine is not None,
        layout_changes=bool(invitation.layout),
        next_layout=invitation.layout,
        next_types=of_nodes,
        invitation=invitation,
        nonce_digest=_nonce_digest(nonce),
        created_at=now,
        state_since=now,
    )
    event_record(
        kind="machine.joining",
        message=f"{subject} joins {invitation.region_id} by an invitation of {invitation.created_by}",
        tone=Tone.MOVING,
        now=now,
        region=invitation.region_id,
    )
    live.push("machines")


def _nonce_digest(nonce: str) -> str:
    return hashlib.sha256(nonce.encode()).hexdigest()


def join_refused(*, token: str, address: str, reason: str, now: datetime) -> None:
    """Counts a host that did not join, with an event. To limit events, each known token gets `REFUSALS_PER_MIN`, and
    all unknown tokens together one in ten minutes."""
    row = _invitation_row(token)
    JOINS_REFUSED.labels("known" if row else "unknown").inc()
    kept, window = (REFUSALS_PER_MIN, timedelta(minutes=1)) if row else (1, STRANGERS_EVERY)
    detail = {"invitation": row.prefix if row else ""}
    if Event.objects.filter(kind="machine.refused", at__gt=now - window, detail=detail).count() >= kept:
        return
    message = f"a host at {address} " + (f"did not join {row.region_id}" if row else "could not join") + f": {reason}"
    text = "".join(char if char.isprintable() else " " for char in message)[:REASON_MOST]
    region = row.region_id if row else ""
    event_record(kind="machine.refused", message=text, tone=Tone.WARN, now=now, region=region, detail=detail)


def invitations_trim(*, now: datetime) -> int:
    """Deletes invitations that expired long ago. Returns how many."""
    return Invitation.objects.filter(expires_at__lt=now - EXPIRED_KEPT).delete()[0]


def machine_move(machine: Machine, to: MachineState, reason: str, *, now: datetime, **columns: object) -> bool:
    """Changes a machine's state, with its event, if it is still as `machine` states. Returns whether it was. Raises
    ValueError if the transition is not allowed."""
    if to not in MACHINE_ALLOWED[MachineState(machine.state)]:
        raise ValueError(f"a machine cannot go from {machine.state} to {to}")
    rows = Machine.objects.filter(id=machine.id, state=machine.state, runs=machine.runs)
    with transaction.atomic():
        if not rows.update(state=to.value, reason=reason, state_since=now, **columns):
            return False
        if to is MachineState.GONE:
            gone_machines_settle([machine.id], now=now)
            layout_disruption_close(machine=machine.id, now=now)
        event_record(
            kind=f"machine.{to}",
            message=f"{machine.id} is {to}: {reason}",
            tone=Tone.MOVING if to is MachineState.LEAVING else Tone.IDLE,
            now=now,
            region=machine.region_id,
            node=machine.runs if machine.runs.startswith("n-") else "",
        )
        live.push("machines")
        wake_ups.send("fleet.reconcile")
    return True


def detected_type(facts: MachineFacts, machine: str, *, now: datetime) -> str | None:
    """The known type that hardware fits, else a new type made of it. None if no type can be made of it."""
    own = InstanceType.objects.exclude(origin=Origin.SHIPPED).values_list("name", flat=True)
    name = instance_type_of(facts, instance_shapes().values(), preferred=set(own))
    if name:
        instance_type_ensure(name)
        return name
    shape = shape_found(facts)
    return None if shape is None else instance_type_found(shape, machine=machine, now=now).name


def gone_machines_settle(machines: Sequence[str], *, now: datetime) -> None:
    """Closes incidents about the hardware of machines that are gone, and settles the notices of joined hosts. Those of
    cloud machines are settled with the cloud's list (`fleet.clouds.services.notices`)."""
    incidents_close(kind=HARDWARE_DIFFERS, subject__in=list(machines), resolution="the machine is gone", now=now)
    own = CloudNotice.objects.filter(machine__in=machines, machine__provider=POOLED)
    own.filter(settled_at=None).update(settled_at=now)


def machine_remove(*, machine_id: str, actor: str, now: datetime, why: str = "") -> None:
    """Removes a machine: its node or ingress is replaced first, then it stops, wipes its data and uninstalls itself. A
    disconnected machine without node or ingress is gone immediately, and its credential is revoked. So is a leaving one
    that disconnected before it confirmed, when it is removed again. Raises Conflict if it belongs to another provider,
    is gone, is leaving and connected, or its node is being replaced."""
    reason = f"removed by {actor}" + (f": {why}" if why else "")
    with transaction.atomic():
        machine = Machine.objects.select_for_update().get(id=machine_id)
        if machine.provider != POOLED and not machine.layout:
            noun = f"node {machine.runs}" if machine.runs else "it"
            raise Conflict(f"{machine.id} belongs to provider {machine.provider}; replace or release {noun} instead")
        if machine.state == MachineState.GONE:
            raise Conflict(f"{machine.id} is gone already")
        if machine.leaving:
            _forget_away(machine, reason, now)
            return
        Machine.objects.filter(id=machine.id).update(leaving=True, reason=reason)
        if not machine.connected:
            agent_trust_end(kind=AgentKind.MACHINE, subject=machine.id, now=now)
        _start_leaving(machine, actor, reason, why, now)
        live.push("machines")


def _forget_away(machine: Machine, reason: str, now: datetime) -> None:
    silent_s = silent_for_s(machine.last_seen_at, now)
    is_away = not machine.connected or (silent_s is not None and silent_s > SILENT_AFTER_S)
    if not is_away or machine.state not in {MachineState.WIPING, MachineState.LEAVING}:
        raise Conflict(f"{machine.id} is leaving already")
    agent_trust_end(kind=AgentKind.MACHINE, subject=machine.id, now=now)
    machine_move(machine, MachineState.GONE, f"{reason}, while away", now=now, runs="", connected=False)


def _start_leaving(machine: Machine, actor: str, reason: str, why: str, now: datetime) -> None:
    if machine.state == MachineState.TAKEN and machine.role == MachineRole.NODE:
        for node in Node.objects.filter(id__in=nodes_on(machine)).order_by("id"):
            _start_replacing(node, actor, reason, why, now)
    elif machine.state in {MachineState.POOL, MachineState.JOINING}:
        confirms = machine.connected and has_machine_agent(machine.provider)
        to = MachineState.LEAVING if confirms else MachineState.GONE
        machine_move(machine, to, reason, now=now, desired_version=machine.desired_version + 1)
    live.push_desired([machine.id])


def nodes_on(machine: Machine) -> list[str]:
    """Returns the IDs of the nodes or the ingress that a machine has."""
    whole = [machine.runs] if machine.runs else []
    return [*whole, *machine.slots.exclude(runs="").values_list("runs", flat=True)]


def _start_replacing(node: Node, actor: str, reason: str, why: str, now: datetime) -> None:
    if CellMember.objects.filter(node=node).exists():
        node_replacement_request(node_id=node.id, actor=actor, now=now, why=why or "its machine is removed")
    elif node.state != NodeState.RETIRED:
        with contextlib.suppress(StaleDecision):
            node_retire(RetireNode(node.id, NodeState(node.state), f"its machine was {reason}"), now=now)


def machine_launched(node: Node, *, now: datetime) -> None:
    """Creates the machine of a node whose provider recorded none, one for each launch, with the node's digits if they
    are free. Joined hosts get theirs by nonce and keep their row, as do machines with a layout."""
    if node.region.provider == POOLED or MachineSlot.objects.filter(runs=node.id).exists():
        return
    columns = {
        "provider": node.region.provider,
        "region_id": node.region_id,
        "state": MachineState.TAKEN.value,
        "reason": f"it is {node.id}",
        "runs": node.id,
        "instance_type_id": node.instance_type_id,
        "state_since": now,
    }
    if not Machine.objects.filter(runs=node.id).exclude(provider=POOLED).update(**columns):
        name = f"m-{node.id.removeprefix('n-')}"
        if Machine.objects.filter(id=name).exists():
            name = f"m-{secrets.token_hex(4)}"
        Machine.objects.create(id=name, provider_id=node.id, **columns, created_at=now)
    live.push("machines")


def machine_ended(node: Node, *, now: datetime) -> None:
    own = Machine.objects.filter(runs=node.id).exclude(provider=POOLED)
    gone_machines_settle(list(own.values_list("id", flat=True)), now=now)
    own.update(state=MachineState.GONE.value, reason=f"{node.id} was given back", state_since=now)
    live.push("machines")
