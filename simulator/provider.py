"""The simulated provider: boots and stops machines, reports their status and restarts dead agents."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fleet.faults.planning.views import Rung
from fleet.reconcile.planning.snapshot import ProviderStatus
from simulator.agent_server import AgentServer
from simulator.context import SimulationContext
from simulator.engines import Engines
from simulator.machine import Machine

CHECKS_S = 20.0
"""Until the deep checks of a node have ended."""
rungs = tuple(Rung)


@dataclass
class SimulatedProvider:
    """`boot_s`: from a launch until the agent connects. `is_answering` is False while the cloud is down."""

    context: SimulationContext
    agent_server: AgentServer
    engines: Engines
    boot_s: float = 5.0
    per_rack: int = 16
    is_answering: bool = True
    machines: dict[str, Machine] = field(default_factory=dict)
    racks: Counter[tuple[str, ...]] = field(default_factory=Counter)
    _region_of: dict[str, str] = field(default_factory=dict)
    launched: int = 0
    sold_out: set[str] = field(default_factory=set)
    """Regions in which no more machines boot."""
    dark: set[str] = field(default_factory=set)
    """Regions about whose machines the provider reports nothing."""
    on_checked: Callable[[str, bool], None] = lambda node, is_well: None

    def add(self, node: str, topology: tuple[str, ...]) -> Machine:
        """Adds a machine that exists from the beginning."""
        machine = self.machines[node] = self.agent_server.machines[node] = Machine(node, self.context, self.engines)
        self.racks[topology] += 1
        self._region_of[node] = topology[1] if len(topology) > 1 else ""
        return machine

    def launch(self, node: str, region: str, topology: tuple[str, ...]) -> None:
        machine = self.add(node, topology)
        if region in self.sold_out:
            machine.has_power = False
        else:
            self.launched += 1
        self.context.queue.after(self.boot_s * (0.8 + 0.4 * self.context.random.random()), machine.boot)

    def terminate(self, node: str) -> None:
        machine = self.machines.pop(node, None)
        if machine is not None:
            machine.power_off(silently=False)
            self.agent_server.machines.pop(node, None)

    def power_on(self, node: str) -> None:
        """Boots a machine again, unless it was terminated meanwhile."""
        machine = self.machines.get(node)
        if machine is not None:
            machine.power_on()

    def restart_agent(self, node: str) -> None:
        machine = self.machines.get(node)
        if machine is not None and machine.has_power and not machine.agent_lives:
            self.context.queue.after(1.0, machine.boot)

    def reset(self, node: str) -> None:
        self._repair(node, Rung.RESET)
        self.check(node)

    def reboot(self, node: str) -> None:
        self._repair(node, Rung.REBOOT)
        machine = self.machines.get(node)
        if machine is not None:
            machine.power_off(silently=False)
            self.context.queue.after(self.boot_s, machine.power_on)

    def check(self, node: str) -> None:
        self.context.queue.after(CHECKS_S, lambda: self._report_checks(node))

    def _repair(self, node: str, rung: Rung) -> None:
        machine = self.machines.get(node)
        if machine is not None and machine.cured_by is not None and rungs.index(machine.cured_by) <= rungs.index(rung):
            machine.cured_by = None

    def _report_checks(self, node: str) -> None:
        machine = self.machines.get(node)
        if machine is not None and machine.acts:
            self.on_checked(node, machine.cured_by is None)

    def topology(self, region: str, near: tuple[str, ...]) -> tuple[str, ...]:
        """Returns a rack with room, below `near` if there is one."""
        for topology, count in self.racks.items():
            fits = topology[: len(near)] == near if near else topology[1:2] == (region,)
            if count < self.per_rack and fits:
                return topology
        return ("simulated", region, f"{region}-rack-{len(self.racks) + 1}")

    def describe(self, node: str) -> ProviderStatus:
        if not self.is_answering or self._region_of.get(node) in self.dark:
            return ProviderStatus.UNKNOWN
        machine = self.machines.get(node)
        if machine is None or not machine.has_power:
            return ProviderStatus.GONE
        return ProviderStatus.RUNNING if machine.agent_lives else ProviderStatus.AGENT_DEAD

    def in_region(self, region: str, regions: Mapping[str, str]) -> list[Machine]:
        return [machine for node, machine in sorted(self.machines.items()) if regions.get(node) == region]
