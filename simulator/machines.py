"""All machines of a world, and its provider: what it boots, ends, knows of, and where it puts them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from fleet.planning.snapshot import ProviderStatus
from simulator.engines import Engines
from simulator.hub import Hub
from simulator.machine import Machine
from simulator.site import Site


@dataclass
class Machines:
    """`boot_s`: from a launch until the agent speaks. `knows`: whether the provider answers; a cloud may not."""

    site: Site
    hub: Hub
    engines: Engines
    boot_s: float = 5.0
    per_rack: int = 16
    knows: bool = True
    all: dict[str, Machine] = field(default_factory=dict)
    racks: Counter[tuple[str, ...]] = field(default_factory=Counter)
    booted: int = 0
    closed: set[str] = field(default_factory=set)
    """Regions in which nothing boots any more."""

    def add(self, node: str, topology: tuple[str, ...]) -> Machine:
        """A machine that is there from the beginning."""
        machine = self.all[node] = self.hub.machines[node] = Machine(node, self.site, self.engines)
        self.racks[topology] += 1
        return machine

    def launch(self, node: str, region: str, topology: tuple[str, ...]) -> None:
        self.booted += 1
        machine = self.add(node, topology)
        if region in self.closed:
            machine.has_power = False
        self.site.queue.after(self.boot_s * (0.8 + 0.4 * self.site.random.random()), machine.boot)

    def terminate(self, node: str) -> None:
        machine = self.all.pop(node, None)
        if machine is not None:
            machine.power_off(silently=False)
            self.hub.machines.pop(node, None)

    def restart_agent(self, node: str) -> None:
        machine = self.all.get(node)
        if machine is not None and machine.has_power and not machine.agent_lives:
            self.site.queue.after(1.0, machine.boot)

    def topology(self, region: str, near: tuple[str, ...]) -> tuple[str, ...]:
        """A rack with room, below `near` if there is one."""
        for topology, count in self.racks.items():
            fits = topology[: len(near)] == near if near else topology[1:2] == (region,)
            if count < self.per_rack and fits:
                return topology
        return ("simulated", region, f"{region}-rack-{len(self.racks) + 1}")

    def describe(self, node: str) -> ProviderStatus:
        if not self.knows:
            return ProviderStatus.UNKNOWN
        machine = self.all.get(node)
        if machine is None or not machine.has_power:
            return ProviderStatus.GONE
        return ProviderStatus.RUNNING if machine.agent_lives else ProviderStatus.AGENT_DEAD

    def in_region(self, region: str, regions: Mapping[str, str]) -> list[Machine]:
        """Machines of one region, in a stable order."""
        return [machine for node, machine in sorted(self.all.items()) if regions.get(node) == region]
