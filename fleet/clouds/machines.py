"""The `machines` provider: hosts that joined by invitation. A launch assigns a free host that fits, a termination makes
its agent wipe the node. Makes no network call: a launch is a compare-and-set on the machine's row, and the machine's
agent carries out its orders and reports them."""

import time
from collections.abc import Callable, Mapping, Sequence

from django.db.models import F, Q

from engine_agent.protocol.states import AgentKind, MachinePhase
from fleet.clouds.base import Later, LaunchSpec, ProviderError
from fleet.clouds.base import Machine as Launched
from fleet.machines.models import Machine, MachineSlot
from fleet.machines.planner import POOLED, NoMachine, PooledMachine, plan_machine
from fleet.machines.selectors import NodeHost, hosts_running, neighbours_in_use, pool_of, reboot_orders
from fleet.machines.services.layouts import slot_assign, slot_forget, slot_release
from fleet.machines.services.machines import gone_machines_settle
from fleet.reconcile.planning.snapshot import ProviderStatus
from fleet.reconcile.planning.states import MachineRole, MachineState
from kernel import clock, live
from models_registry.instance_types.models import InstanceType


def agent_start_again(machine: Machine | None, node_id: str) -> None:
    """Repeats the order to start a node's agent, in case it was lost: the machine's agent restarts agents without it.
    Raises ProviderError if the machine's agent is not connected."""
    if machine is None:
        raise ProviderError(f"cannot start the agent of {node_id} again: it has no machine")
    if not machine.connected:
        raise ProviderError(f"cannot start the agent of {node_id} again: {machine.id} is not connected")
    Machine.objects.filter(id=machine.id).update(desired_version=F("desired_version") + 1)
    live.push_desired([machine.id])


def reported_status(phase: str) -> ProviderStatus:
    """Status of a node on a connected machine, as its agent reports it."""
    dead = phase == MachinePhase.AGENT_DEAD
    return ProviderStatus.AGENT_DEAD if dead else ProviderStatus.RUNNING


RACES = 5
"""Machines that other launches may take first."""
WIPED_WITHIN_S = 30.0
LOOK_EVERY_S = 0.5
REBOOTS_EVERY_S = 5.0


class MachinesProvider:
    name = POOLED

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self._sleep = sleep

    @classmethod
    def from_settings(cls) -> "MachinesProvider":
        return cls()

    def launch(self, specs: Sequence[LaunchSpec]) -> tuple[Launched, ...]:
        return tuple(self._launch(spec) for spec in specs)

    def _launch(self, spec: LaunchSpec) -> Launched:
        if spec.kind is not AgentKind.NODE and spec.id not in hosts_running([spec.id]):
            raise ProviderError(f"{spec.id} has no machine: an ingress is the machine that joined for it")
        return _launched(host_assign(spec))

    def restart_agent(self, node_id: str) -> None:
        host = hosts_running([node_id]).get(node_id)
        agent_start_again(host.machine if host else None, node_id)

    def reboot(self, node_id: str) -> None:
        """Has the machine's agent reboot its host. Raises Later until the host has rebooted, and ProviderError if its
        operator does not allow it, another node of it is in use, or it did not reboot."""
        host, order = hosts_running([node_id]).get(node_id), reboot_orders([node_id]).get(node_id)
        if host is None or order is None:
            raise ProviderError(f"{node_id} has no machine to reboot, or its repair has ended")
        machine = host.machine
        if machine.rebooted == order and machine.reboot_trouble:
            raise ProviderError(f"{machine.id} was not rebooted: {machine.reboot_trouble}")
        if machine.rebooted == order:
            return
        if machine.connected and not machine.may_reboot:
            raise ProviderError(f"the operator of {machine.id} does not allow reboots")
        if others := neighbours_in_use([node_id]):
            raise ProviderError(f"{', '.join(others[node_id][:3])} of {machine.id} in use")
        Machine.objects.filter(id=machine.id).update(desired_version=F("desired_version") + 1)
        live.push_desired([machine.id])
        raise Later(f"{machine.id} has not rebooted yet", REBOOTS_EVERY_S)

    def move_agents(self, releases: Mapping[str, str]) -> dict[str, str]:
        """Does nothing: a machine's orders name its release (`fleet.machines.selectors.machine_orders`)."""
        return {}

    def describe(self, node_ids: Sequence[str]) -> dict[str, ProviderStatus]:
        running = hosts_running(node_ids)
        return {node: _provider_status(running.get(node)) for node in node_ids}

    def terminate(self, node_id: str) -> None:
        deadline = time.monotonic() + WIPED_WITHIN_S
        while (host := hosts_running([node_id]).get(node_id)) is not None:
            machine = host.machine
            if machine.revoked_at is not None or (
                host.state != MachineState.TAKEN and machine.leaving and not machine.connected
            ):
                slot_forget(host.slot, now=clock.now()) if host.slot else _release_revoked(machine)
            elif host.state == MachineState.TAKEN:
                slot_release(host.slot, now=clock.now()) if host.slot else _release_machine(machine)
            elif not machine.connected:
                raise ProviderError(f"{machine.id} is not connected; it wipes {node_id} when it reconnects")
            elif time.monotonic() >= deadline:
                raise ProviderError(f"{machine.id} has not confirmed that it wiped {node_id}")
            else:
                self._sleep(LOOK_EVERY_S)

    def describe_all(self) -> dict[str, ProviderStatus]:
        rows = Machine.objects.filter(provider=self.name, state=MachineState.TAKEN, role=MachineRole.NODE.value)
        slots = MachineSlot.objects.filter(machine__in=rows, state=MachineState.TAKEN)
        names = [*rows.exclude(runs="").values_list("runs", flat=True), *slots.values_list("runs", flat=True)]
        return {name: _provider_status(host) for name, host in hosts_running(names).items()}


def host_assign(spec: LaunchSpec) -> NodeHost:
    """The machine of a node, or a free machine or slot that it gets now. Raises ProviderError if there is none."""
    if (known := hosts_running([spec.id]).get(spec.id)) is not None:
        return known
    shape = InstanceType.objects.get(name=spec.instance_type).shape()
    for _ in range(RACES):
        chosen = plan_machine(shape, pool_of(spec.region, MachineRole.NODE))
        if isinstance(chosen, NoMachine):
            raise ProviderError(chosen.reason)
        if _assign(chosen, spec.id):
            return hosts_running([spec.id])[spec.id]
    raise ProviderError(f"{RACES} machines for {spec.id} were taken by other launches")


def _launched(host: NodeHost) -> Launched:
    """A shared machine is the only known network node of its nodes, and so their failure domain: placement keeps cells
    of one deployment on different machines, and the members of one cell on the same."""
    return Launched(host.machine.address, host.port_base, (host.machine.id,) if host.slot else None)


def _assign(chosen: PooledMachine, node: str) -> bool:
    if chosen.slot is not None:
        return slot_assign(machine_id=chosen.id, number=chosen.slot, node=node, now=clock.now())
    return _assign_machine(chosen.id, node)


def _assign_machine(machine: str, node: str) -> bool:
    rows = Machine.objects.filter(id=machine, state=MachineState.POOL, leaving=False, runs="", layout="", broken={})
    rows = rows.filter(layout_changes=False)
    taken = rows.update(
        state=MachineState.TAKEN.value,
        runs=node,
        reason=f"it is {node}",
        state_since=clock.now(),
        desired_version=F("desired_version") + 1,
    )
    if taken:
        live.push("machines", machine)
        live.push_desired([machine])
    return bool(taken)


def _release_machine(machine: Machine) -> None:
    rows = Machine.objects.filter(id=machine.id, state=MachineState.TAKEN, runs=machine.runs)
    if rows.update(
        state=MachineState.WIPING.value,
        reason=f"{machine.runs} was given back"
        + ("" if machine.connected else "; it is not connected and wipes it when it reconnects"),
        state_since=clock.now(),
        desired_version=F("desired_version") + 1,
    ):
        live.push("machines", machine.id)
        live.push_desired([machine.id])


def _release_revoked(machine: Machine) -> None:
    """A machine that was revoked or removed while disconnected: its credential is void, so no confirmation can come."""
    rows = Machine.objects.filter(id=machine.id, runs=machine.runs, leaving=True)
    rows = rows.filter(Q(connected=False) | Q(revoked_at__isnull=False))
    reason = machine.reason if machine.revoked_at else f"{machine.reason}, while away"
    if rows.update(state=MachineState.GONE.value, runs="", reason=reason, state_since=clock.now()):
        gone_machines_settle([machine.id], now=clock.now())
    live.push("machines", machine.id)


def _provider_status(host: NodeHost | None) -> ProviderStatus:
    """A silent machine is not gone: its host may be off, or cut off and serving."""
    if host is None or host.state != MachineState.TAKEN:
        return ProviderStatus.GONE
    if not host.machine.connected:
        return ProviderStatus.SILENT
    return reported_status(host.phase)
