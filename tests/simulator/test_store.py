"""The reference store in cases that have no counterpart in the services."""

from fleet.reconcile.planning.decisions import LaunchNodes
from simulator.clock import EPOCH
from simulator.fleet_spec import KIND, DeploymentSpec, FleetSpec, build_fleet
from simulator.rows import NoProvider
from simulator.store import Store


class Racks(NoProvider):
    """The next machine is in a new rack, unless it is launched near another one."""

    racks = 0

    def topology(self, region: str, near: tuple[str, ...]) -> tuple[str, ...]:
        self.racks += not near
        return near or (region, f"rack-{self.racks}")


def test_the_machines_of_a_unit_stand_together() -> None:
    store = Store(build_fleet(FleetSpec((DeploymentSpec("llama", {"east": 0}),), spares=0)))
    store.provider = Racks()
    store.apply(LaunchNodes("east", KIND, 4, "needed", there=0, unit=2), EPOCH)
    store.apply(LaunchNodes("east", KIND, 2, "needed", there=4), EPOCH)
    racks = [node.topology[1] for _, node in sorted(store.nodes.items())]
    assert racks == ["rack-1", "rack-1", "rack-2", "rack-2", "rack-3", "rack-4"]
