"""Layouts of joined hosts and of the control plane's computer: divides a machine into nodes once its own are wiped, and
assigns and releases the resulting slots. A machine with a layout is `taken` while a node is on it, then `wiping`, and
`pool` again when its agent, or provider `local`, has wiped every node."""

import secrets
from collections.abc import Sequence
from datetime import datetime

import msgspec
from django.db import transaction
from django.db.models import F

from engine_agent.protocol.machine_messages import MachineFacts, MachineReport
from fleet.cells.services import layout_charge, layout_disruption_close, layout_disruption_open
from fleet.machines.layouts import InvalidLayout, facts_of_node, plan_layout
from fleet.machines.models import Machine, MachineSlot
from fleet.machines.planner import LOCAL, POOLED, why_set_aside
from fleet.machines.selectors import is_reboot_due
from fleet.machines.services.machines import detected_type, machine_move, nodes_on
from fleet.nodes.models import Node
from fleet.nodes.services.nodes import node_retire
from fleet.reconcile.planning.decisions import ChangeLayout, RetireNode
from fleet.reconcile.planning.settings import LedgerLimits
from fleet.reconcile.planning.states import MachineRole, MachineState, NodeState
from fleet.regions.models import Region
from kernel import clock, live, wake_ups
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from kernel.transitions import StaleDecision
from models_registry.instance_types.services import instance_type_named

POOL, TAKEN, WIPING = MachineState.POOL.value, MachineState.TAKEN.value, MachineState.WIPING.value
GONE = MachineState.GONE.value


def machine_layout_set(
    *,
    machine_id: str,
    layout: str,
    actor: str,
    now: datetime,
    instance_type: str = "",
    pinned: bool = False,
    why: str = "",
) -> None:
    """Divides a joined host's devices into nodes; an empty layout makes it one node again. `instance_type`: of every
    node; empty: detected. `pinned`: only operators change the layout from now on; without another change only that is
    stored. A host with spare nodes gets the layout when they are retired and wiped. Raises InvalidInput for a layout
    that the host cannot have, and Conflict for a machine of another provider or role, one that joins or leaves, and one
    with a node in a cell."""
    if instance_type:
        instance_type_named(instance_type)
    with transaction.atomic():
        machine = Machine.objects.select_for_update().get(id=machine_id)
        _require_divisible(machine)
        is_pin_alone = not instance_type and layout == machine.layout and pinned is not machine.layout_pinned
        Machine.objects.filter(id=machine.id).update(layout_pinned=pinned)
        if is_pin_alone and not machine.layout_changes:
            verb = "pins" if pinned else "unpins"
            _layout_event(machine, f"{actor} {verb} the layout of {machine.id}", now, actor, why)
            return
        types = [instance_type] * len(_plan_slots(machine, layout, [], detect=False))
        if nodes_on(machine):
            reason = f"{actor} divides it into {layout or 'one node'}"
            layout_disruption_open(machine=machine.id, region=machine.region_id, reason=reason, now=now)
        reason = f"{actor} divides {machine.id} into {layout or 'one node'}"
        try:
            _begin_change(machine, layout, types if instance_type else [], reason, now, actor, why)
        except StaleDecision as error:
            raise Conflict(f"{machine.id} has nodes in use: {error}; drain its cell first") from None


def layout_change(decision: ChangeLayout, *, now: datetime, limits: LedgerLimits | None = None) -> None:
    """Divides a machine for waiting cells, and charges the disruption ledger. Raises StaleDecision if the machine or
    one of its nodes has changed since the decision, or the ledger has no budget left."""
    with transaction.atomic():
        region = Machine.objects.values_list("region_id", flat=True).get(id=decision.machine)
        reason = f"{decision.machine} is divided into {decision.layout}: {decision.reason}"
        layout_charge(machine=decision.machine, region=region, reason=reason, now=now, limits=limits or LedgerLimits())
        machine = Machine.objects.select_for_update().get(id=decision.machine)
        is_same = machine.layout == decision.seen and sorted(nodes_on(machine)) == sorted(decision.nodes)
        is_usable = machine.connected and not machine.broken
        if machine.layout_pinned or machine.layout_changes or not is_usable or not is_same:
            raise StaleDecision(f"machine {machine.id} has another layout, other nodes, or is pinned, broken or away")
        try:
            _require_divisible(machine)
            _plan_slots(machine, decision.layout, decision.types, detect=False)
        except (Conflict, InvalidInput) as error:
            raise StaleDecision(str(error)) from None
        _begin_change(machine, decision.layout, decision.types, reason, now)


def _begin_change(
    machine: Machine,
    layout: str,
    types: Sequence[str],
    reason: str,
    now: datetime,
    actor: str = "",
    why: str = "",
) -> None:
    """Retires the machine's nodes; it gets the layout when they are wiped."""
    Machine.objects.filter(id=machine.id).update(layout_changes=True, next_layout=layout, next_types=list(types))
    _layout_event(machine, reason, now, actor, why)
    for node in Node.objects.filter(id__in=nodes_on(machine)).exclude(state=NodeState.RETIRED).order_by("id"):
        node_retire(RetireNode(node.id, NodeState(node.state), reason), now=now)
    layout_follow(machine, now=now)


def _layout_event(machine: Machine, message: str, now: datetime, actor: str = "", why: str = "") -> None:
    event_record(
        kind="machine.layout",
        message=message + (f": {why}" if why else ""),
        tone=Tone.IDLE,
        now=now,
        actor=actor,
        region=machine.region_id,
    )
    live.push("machines", machine.id)


def _require_divisible(machine: Machine) -> None:
    is_host = machine.provider == POOLED or (machine.provider == LOCAL and machine.layout)
    if not is_host or machine.role != MachineRole.NODE:
        raise Conflict(f"{machine.id} is no joined host for nodes, and only those can have a layout")
    if machine.leaving or machine.state not in {POOL, TAKEN, WIPING}:
        raise Conflict(f"{machine.id} is {'leaving' if machine.leaving else machine.state}; it gets no other layout")


def _plan_slots(machine: Machine, layout: str, types: Sequence[str], *, detect: bool = True) -> list[MachineSlot]:
    """`types`: of each node, in order; empty: detected, if `detect`, which may create types."""
    facts = machine.stated_facts()
    if facts is None or machine.port_base is None:
        raise Conflict(f"the hardware of {machine.id} is not known yet")
    if not layout and machine.provider == LOCAL:
        raise InvalidInput(field="layout", rule="layout", message=f"{machine.id}: one node is layout 1x1 here")
    try:
        parts = plan_layout(layout, msgspec.structs.replace(facts, port_base=machine.port_base)) if layout else ()
    except InvalidLayout as error:
        raise InvalidInput(field="layout", rule="layout", message=f"{machine.id}: {error}") from None
    slots = [MachineSlot(machine=machine, number=at, owns=msgspec.to_builtins(owns)) for at, owns in enumerate(parts)]
    for at, (slot, owns) in enumerate(zip(slots, parts, strict=True)):
        if types:
            slot.instance_type_id = types[at]
        elif detect:
            slot.instance_type_id = detected_type(facts_of_node(facts, owns), machine.id, now=clock.now())
    return slots


def layout_follow(machine: Machine, *, now: datetime) -> None:
    """Gives a free machine the layout that it waits for, in the caller's transaction, which has locked the machine."""
    machine.refresh_from_db(fields=["state", "layout", "layout_changes", "next_layout", "next_types"])
    if not machine.layout_changes or machine.state != POOL:
        return
    wanted = machine.next_layout
    Machine.objects.filter(id=machine.id).update(layout_changes=False, layout_at=now)
    layout_disruption_close(machine=machine.id, now=now)
    try:
        slots = _plan_slots(machine, wanted, machine.next_types)
    except (Conflict, InvalidInput) as error:  # its hardware changed since the layout was ordered
        text = f"{machine.id} keeps layout {machine.layout or 'one node'}: {error}"
        event_record(kind="machine.layout", message=text, tone=Tone.WARN, now=now, region=machine.region_id)
        return
    machine.slots.all().delete()
    MachineSlot.objects.bulk_create(slots)
    Machine.objects.filter(id=machine.id).update(layout=wanted)
    live.push("machines", machine.id)
    wake_ups.send("fleet.reconcile")


def computer_divide(*, region: str, layout: str, instance_type: str, facts: MachineFacts, now: datetime) -> None:
    """Records the part of the control plane's computer that a region of provider `local` has as a machine, divided into
    nodes of this type, unless there is one. Raises InvalidLayout."""
    with transaction.atomic():
        Region.objects.select_for_update().get(name=region)
        if Machine.objects.filter(provider=LOCAL, region_id=region).exclude(layout="").exclude(state=GONE).exists():
            return
        name = f"m-{secrets.token_hex(4)}"
        machine = Machine(
            id=name,
            provider=LOCAL,
            provider_id=name,
            region_id=region,
            state=POOL,
            reason="it is a part of the control plane's computer",
            layout=layout,
            layout_at=now,
            address=facts.address,
            port_base=facts.port_base,
            instance_type_id=instance_type,
            facts=msgspec.to_builtins(facts),
            connected=True,
            created_at=now,
            state_since=now,
        )
        parts = enumerate(plan_layout(layout, facts))
        machine.save(force_insert=True)
        MachineSlot.objects.bulk_create(
            MachineSlot(machine=machine, number=at, owns=msgspec.to_builtins(owns), instance_type_id=instance_type)
            for at, owns in parts
        )
        _layout_event(machine, f"{name} is the part of this computer in {region}, as {layout}", now)


def slot_assign(*, machine_id: str, number: int, node: str, now: datetime) -> bool:
    """Gives a free slot to a node. Returns whether it was still free."""
    with transaction.atomic():
        machine = Machine.objects.select_for_update().get(id=machine_id)
        if machine.leaving or machine.layout_changes or machine.state not in {POOL, TAKEN}:
            return False
        slot = machine.slots.filter(number=number, state=POOL).first()
        if slot is None or why_set_aside(slot.resources(), machine.broken) or is_reboot_due(machine):
            return False
        machine.slots.filter(number=number).update(state=TAKEN, runs=node)
        if machine.state == POOL:
            machine_move(machine, MachineState.TAKEN, f"it has {node}", now=now)
        _order_changed(machine)
    return True


def slot_release(slot: MachineSlot, *, now: datetime) -> None:
    """Has a slot's node stopped and wiped."""
    with transaction.atomic():
        machine = Machine.objects.select_for_update().get(id=slot.machine_id)
        if not machine.slots.filter(number=slot.number, state=TAKEN, runs=slot.runs).update(state=WIPING):
            return
        if machine.state == TAKEN and not machine.slots.filter(state=TAKEN).exists():
            machine_move(machine, MachineState.WIPING, f"{slot.runs} was given back", now=now)
        _order_changed(machine)


def slot_wiped(slot: MachineSlot, *, now: datetime) -> None:
    """Frees a slot whose node's processes its provider has stopped. With the last one the machine gets the layout that
    waits, or is gone if it was removed."""
    slot_release(slot, now=now)
    with transaction.atomic():
        machine = Machine.objects.select_for_update().get(id=slot.machine_id)
        wiping = machine.slots.filter(number=slot.number, runs=slot.runs, state=WIPING)
        wiping.update(state=POOL, runs="", phase="", agent_reason="")
        if machine.state == WIPING and not machine.slots.exclude(state=POOL).exists():
            to = MachineState.GONE if machine.leaving else MachineState.POOL
            machine_move(machine, to, "all of its nodes are stopped", now=now)
            layout_follow(machine, now=now)


def slot_forget(slot: MachineSlot, *, now: datetime) -> None:
    """Frees a slot of a machine that was revoked or removed while disconnected; the machine is gone with its last
    node."""
    with transaction.atomic():
        machine = Machine.objects.select_for_update().get(id=slot.machine_id)
        machine.slots.filter(number=slot.number, runs=slot.runs).update(state=POOL, runs="")
        if machine.state != MachineState.GONE and not machine.slots.exclude(state=POOL).exists():
            machine_move(machine, MachineState.GONE, machine.reason, now=now)
        live.push("machines", machine.id)


def slots_report(machine: Machine, report: MachineReport, *, now: datetime) -> None:
    """Stores what a machine reports about its nodes, in the caller's transaction, which has locked the machine. Frees
    the slots that it has wiped, and the machine with the last of them."""
    reported = {one.id: one for one in report.nodes}
    follows = report.version >= machine.desired_version
    for slot in machine.slots.exclude(state=POOL):
        one = reported.get(slot.runs)
        if slot.state == WIPING and follows and one is None:
            slot.state, slot.runs, slot.phase, slot.agent_reason = POOL, "", "", ""
        elif one is not None:
            slot.phase, slot.agent_reason = one.phase.value, one.reason.replace("\0", "")[:500]
        slot.save(update_fields=["state", "runs", "phase", "agent_reason"])
    if machine.state == WIPING and not machine.slots.exclude(state=POOL).exists():
        to = MachineState.LEAVING if machine.leaving else MachineState.POOL
        version = machine.desired_version + (to is MachineState.LEAVING)
        if machine_move(machine, to, "it has wiped what it held", now=now, desired_version=version):
            live.push_desired([machine.id])


def _order_changed(machine: Machine) -> None:
    Machine.objects.filter(id=machine.id).update(desired_version=F("desired_version") + 1)
    live.push("machines", machine.id)
    live.push_desired([machine.id])
