"""Ports of a fleet on one computer never overlap; an overlapping configuration is rejected by name."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.embedded.configuration import CannotStart, read_configuration
from controlplane.embedded.preflight import require_distinct_ports
from engine_agent.protocol.ports import (
    PORTS_PER_NODE,
    PortUse,
    demo_ingresses,
    fixed_ports,
    ingress_ports,
    node_blocks,
    node_ports,
    overlap,
    region_of_same_ingress,
)


def test_an_overlap_names_both_users_and_what_to_set() -> None:
    uses = fixed_ports(dashboard=10080, agents=10523, ingresses=demo_ingresses(8080))
    assert overlap(uses) == (
        "Port 10080 is for the dashboard and for other regions' requests of the ingress i-us-east-1:"
        " set SWITCHYARD_PORT or SWITCHYARD_INGRESS_PORT to another port."
    )


def test_a_node_keeps_its_block_and_the_other_moves() -> None:
    uses = [*fixed_ports(dashboard=8000, agents=8443, ingresses=demo_ingresses(19000)), *node_ports("n-1", 20990)]
    assert overlap(uses) == (
        "Port 21000 is for other regions' requests of the ingress i-us-east-1 and for node n-1:"
        " set SWITCHYARD_INGRESS_PORT to another port."
    )


def test_nodes_pass_over_the_ports_of_ingresses() -> None:
    """As with ingresses at 19000: other regions reach them at 21000 and 21001."""
    taken = [port for first in demo_ingresses(19000).values() for port in ingress_ports(first).values()]
    assert next(node_blocks(21000, taken)) == 21020
    assert next(node_blocks(20990, taken)) == 21010


PORTS = st.integers(1024, 65535) | st.sampled_from([8000, 8080, 9080, 10080, 18000, 19000, 20000, 21000, 65500])


@given(PORTS, PORTS, PORTS, st.integers(0, 40))
def test_no_two_users_share_a_port_or_the_start_is_refused(
    port: int, ingress_port: int, nodes_from: int, nodes: int
) -> None:
    environment = {
        "SWITCHYARD_PORT": str(port),
        "SWITCHYARD_INGRESS_PORT": str(ingress_port),
        "SWITCHYARD_NODE_PORTS": str(nodes_from),
        "SWITCHYARD_HOME": "/nonexistent",
    }
    try:
        configuration = read_configuration(environment)
        require_distinct_ports(configuration)
    except CannotStart:
        return
    uses = fixed_ports(dashboard=port, agents=configuration.agent_port, ingresses=configuration.ingress_ports)
    blocks = node_blocks(nodes_from, [use.port for use in uses])
    for number, base in zip(range(nodes), blocks, strict=False):
        uses += node_ports(f"n-{number}", base)
    assert overlap(uses) == ""
    assert len({use.port for use in uses}) == len(uses)
    assert all(0 < use.port <= 65535 for use in uses)


def test_nodes_of_an_earlier_start_count(tmp_path: Path) -> None:
    boot = tmp_path / "nodes" / "n-1" / "boot.json"
    boot.parent.mkdir(parents=True)
    boot.write_text('{"id": "n-1", "argv": ["python", "--port-base", "21000"]}')
    home = {"SWITCHYARD_HOME": str(tmp_path)}
    require_distinct_ports(read_configuration(home))
    with pytest.raises(CannotStart, match=r"Port 21000 is for other regions' requests .* and for node n-1"):
        require_distinct_ports(read_configuration({**home, "SWITCHYARD_INGRESS_PORT": "19000"}))
    boot.write_text("{")
    require_distinct_ports(read_configuration({**home, "SWITCHYARD_INGRESS_PORT": "19000"}))


def test_a_block_ends_at_the_last_port() -> None:
    assert list(node_blocks(65536 - 2 * PORTS_PER_NODE, [])) == [65496, 65516]
    assert list(node_blocks(65530, [])) == []


def test_uses_of_one_port_without_a_variable_are_named_all_the_same() -> None:
    assert overlap([PortUse(1, "a"), PortUse(1, "b")]) == "Port 1 is for a and for b: move one of them."


@pytest.mark.parametrize(
    ("region", "others", "same"),
    [
        ("us-east-1-2", ["us-west-2", "us-east-1"], "us-east-1"),
        ("us-east-1", ["us-east-1-8"], "us-east-1-8"),
        ("us-east-1", ["us-east-1-9", "us-east-1-1", "us-east-1-02", "us-east-2", "us-east-1-2-2"], None),
        ("us-east-1", [], None),
    ],
)
def test_regions_whose_ingresses_would_have_the_same_name_are_found(
    region: str, others: list[str], same: str | None
) -> None:
    assert region_of_same_ingress(region, others) == same
