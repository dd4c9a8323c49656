"""A provider whose machines get addresses, ports and places after the launch call. The fleet takes them from the
agents' hellos."""

from collections.abc import Sequence

import pytest

from engine_agent.protocol.messages import Hello, Inventory
from engine_agent.protocol.states import AgentKind
from fleet.clouds import base as providers
from fleet.clouds.base import LaunchSpec, Machine, ProviderError, embedded_providers, provider_named
from fleet.machines.planner import LIMITS, ProviderLimits, provider_limits
from fleet.nodes.models import Node
from fleet.nodes.selectors import desired_for
from fleet.nodes.services.nodes import node_move, nodes_launch
from fleet.nodes.services.reports import hellos_store
from fleet.reconcile.planning.decisions import LaunchNodes, MoveNode
from fleet.reconcile.planning.snapshot import ProviderStatus
from fleet.reconcile.planning.states import NodeState
from tests.fleet import rows
from tests.fleet.provision import provision
from tests.fleet.rows import KIND, NOW

pytestmark = pytest.mark.django_db


class OrderingProvider:
    """Identifies machines by node ID, as a cloud does by client token."""

    name = "ordering"
    ordered: dict[str, LaunchSpec] = {}

    @classmethod
    def from_settings(cls) -> "OrderingProvider":
        return cls()

    def launch(self, specs: Sequence[LaunchSpec]) -> tuple[Machine, ...]:
        for spec in specs:
            self.ordered.setdefault(spec.id, spec)
        return (Machine(),) * len(specs)

    def describe_all(self) -> dict[str, ProviderStatus]:
        return {}

    def restart_agent(self, node_id: str) -> None:
        raise ProviderError("machines of this provider start their agents themselves")

    def reboot(self, node_id: str) -> None:
        raise ProviderError("machines of this provider have no power control")

    def describe(self, node_ids: Sequence[str]) -> dict[str, ProviderStatus]:
        known = self.ordered  # a machine may exist without being listed
        return {node: ProviderStatus.RUNNING if node in known else ProviderStatus.UNKNOWN for node in node_ids}

    def terminate(self, node_id: str) -> None:
        self.ordered.pop(node_id, None)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider needs one line in the registry."""
    line = {"ordering": f"{__name__}.{OrderingProvider.__name__}"}
    monkeypatch.setattr(providers, "PROVIDERS", {**providers.PROVIDERS, **line})
    monkeypatch.setattr(OrderingProvider, "ordered", {})


def ordered_nodes(count: int = 1) -> list[Node]:
    rows.region("us-east-1", provider="ordering")
    rows.deployment()
    nodes_launch(LaunchNodes("us-east-1", KIND, count, "needed", there=Node.objects.count()), now=NOW)
    provision()
    return list(Node.objects.filter(state=NodeState.JOINING.value))


def hello(node: str, address: str = "10.0.0.7", port_base: int = 9400) -> Hello:
    inventory = Inventory(KIND, address, port_base, cores=2, memory_bytes=1)
    return Hello(1, AgentKind.NODE, node, "b", "1", inventory, topology=("zone-a", "rack-7"))


def test_an_ordered_machine_is_a_joining_node_without_address_ports_and_place() -> None:
    first, second = ordered_nodes(2)
    for node in (first, second):
        assert (node.state, node.address, node.port_base, node.topology) == ("joining", "", None, [])
    assert provider_named("ordering").describe([first.id]) == {first.id: ProviderStatus.RUNNING}


def test_the_hello_states_what_the_provider_did_not_and_the_node_serves() -> None:
    (node,) = ordered_nodes()
    hellos_store([hello(node.id)])
    node_move(MoveNode(node.id, NodeState.JOINING, NodeState.READY, "its agent joined"), now=NOW)
    node.refresh_from_db()
    assert (node.address, node.port_base, node.topology) == ("10.0.0.7", 9400, ["zone-a", "rack-7"])
    assert node.port(3) == 9403
    assert desired_for([node.id])[node.id].assignment is None


def test_a_later_hello_moves_no_known_address() -> None:
    (node,) = ordered_nodes()
    hellos_store([hello(node.id)])
    hellos_store([hello(node.id, address="10.6.6.6", port_base=1)])
    assert Node.objects.values_list("address", "port_base").get() == ("10.0.0.7", 9400)


def test_a_hello_without_the_missing_address_or_with_another_nodes_is_refused() -> None:
    first, second = ordered_nodes(2)
    refused = hellos_store([Hello(1, AgentKind.NODE, first.id, "b", "1")])
    assert "its hello does not state them" in str(refused[first.id])
    refused = hellos_store([hello(first.id), hello(second.id)])
    assert list(refused) == [second.id]
    assert "another node has the ports 10.0.0.7:9400" in str(refused[second.id])


def test_a_repeated_launch_orders_no_second_machine() -> None:
    (node,) = ordered_nodes()
    spec = OrderingProvider.ordered[node.id]
    provider_named("ordering").launch([LaunchSpec(node.id, AgentKind.NODE, "us-east-1", "another token")])
    assert OrderingProvider.ordered == {node.id: spec}


def test_a_provider_of_other_hosts_is_not_stopped_with_this_one_nor_even_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(providers, "PROVIDERS", {**providers.PROVIDERS, "far": "library.that.is.missing.Far"})
    assert [provider.name for provider in embedded_providers()] == ["local"]


def test_every_provider_states_how_long_its_machines_take() -> None:
    assert LIMITS.keys() == providers.PROVIDERS.keys() - {"ordering"}
    assert provider_limits("ordering") == ProviderLimits()


def test_an_unknown_provider_is_refused_with_the_names_of_those_that_there_are() -> None:
    with pytest.raises(ProviderError, match="unknown provider 'mars'; there is: aws, ecs, local, machines, ordering"):
        provider_named("mars")
