"""Sets aside what is broken on joined hosts, which stay when their nodes are replaced: a device, or the whole machine.
No later node gets it until an operator states that it is repaired. Machines that a provider launches need none of this:
they are terminated with their node."""

from datetime import datetime

from django.db import transaction

from engine_agent.protocol.signatures import FaultScope, fault_scope, is_hard
from fleet.faults.models import Signal
from fleet.faults.planning.ladder import COME_BACK
from fleet.machines.models import Machine, MachineSlot
from fleet.machines.planner import POOLED, WHOLE, device_keys
from fleet.nodes.models import Node
from fleet.reconcile.planning.settings import FaultSettings
from kernel import live, wake_ups
from kernel.events import event_record
from kernel.refusals import Conflict
from kernel.tones import Tone

REASON_CHARS = 500


def hardware_set_aside(node: Node, *, now: datetime) -> None:
    """Sets aside what the unsettled grave signals of a faulty node are about, in the transaction that retires it."""
    unsettled = Signal.objects.filter(node=node, settled_at=None).order_by("id")
    signals = [s for s in unsettled if is_hard(s.signature) or _came_back(s)]
    slot = MachineSlot.objects.filter(runs=node.id).first()
    at = {"id": slot.machine_id} if slot else {"runs": node.id}
    machine = Machine.objects.select_for_update().filter(provider=POOLED, **at).first() if signals else None
    if machine is None:
        return
    broken = dict(machine.broken)
    for signal in signals:
        is_whole = slot is None or fault_scope(signal.signature, signal.evidence) is FaultScope.MACHINE
        keys = (WHOLE,) if is_whole or slot is None else device_keys(slot.resources(), signal.evidence)
        broken |= {key: f"{signal.signature}: {signal.summary}"[:REASON_CHARS] for key in keys if key not in broken}
    if broken == machine.broken:
        return
    Machine.objects.filter(id=machine.id).update(broken=broken)
    what = f"{machine.id} is" if WHOLE in broken else f"{', '.join(sorted(broken))} of {machine.id} are"
    text = f"{what} out of use until repaired: {signals[0].summary}"
    event_record(kind="machine.broken", message=text, tone=Tone.BAD, now=now, region=machine.region_id, node=node.id)
    live.push("machines", machine.id)


def _came_back(signal: Signal) -> bool:
    return signal.signature in COME_BACK and signal.count > FaultSettings().restarts_allowed


def machine_repaired(*, machine_id: str, actor: str, now: datetime, why: str = "") -> None:
    """Returns everything that was set aside on a machine to use. Raises Conflict if nothing was."""
    with transaction.atomic():
        machine = Machine.objects.select_for_update().get(id=machine_id)
        if not machine.broken:
            raise Conflict(f"nothing of {machine.id} is out of use")
        what = machine.id if WHOLE in machine.broken else f"{', '.join(sorted(machine.broken))} of {machine.id}"
        Machine.objects.filter(id=machine.id).update(broken={})
        text = f"{actor} returns {what} to use"
        event_record(
            kind="machine.repaired",
            message=text + (f": {why}" if why else ""),
            tone=Tone.OK,
            now=now,
            actor=actor,
            region=machine.region_id,
        )
        live.push("machines", machine.id)
        wake_ups.send("fleet.reconcile")
