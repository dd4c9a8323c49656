"""Which ports a host that joins needs: all of them are looked at, and one that none follow from is refused."""

import pytest

from engine_agent.node.machine.join import ports_of
from engine_agent.protocol.ports import hop_port, tls_port


def test_a_node_has_a_block_and_an_ingress_a_port_for_each_kind_of_caller() -> None:
    assert ports_of("node", "0") == list(range(21000, 21020))
    assert ports_of("node", "65516") == list(range(65516, 65536))
    assert ports_of("ingress", "0") == [8080, 9080, hop_port(8080), tls_port(8080)]
    assert ports_of("ingress", "65000") == [65000, 64000, 63000, 62000]


@pytest.mark.parametrize(
    ("role", "stated", "highest"),
    [
        ("node", "65517", 65516),
        ("node", "443", 65516),
        ("ingress", "65536", 65535),
        ("ingress", "-1", 65535),
        ("ingress", "http", 65535),
        ("ingress", "", 65535),
        ("ingress", "\u0661\u0662\u0663\u0664", 65535),
        ("ingress", "9" * 5000, 65535),
    ],
)
def test_what_is_no_first_port_is_named_with_what_would_be(role: str, stated: str, highest: int) -> None:
    with pytest.raises(ValueError, match=f"is no first port of a {role}: give one from 1024 to {highest}") as refused:
        ports_of(role, stated)
    assert len(str(refused.value)) < 120
