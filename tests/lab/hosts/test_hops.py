"""Connections at a router, and whether they are encrypted."""

import struct
from ipaddress import IPv4Address

import pytest

from lab.hosts.hops import Hop, Segment, begins_record, hops, segment
from lab.hosts.topology import Topology

LAB = Topology(("east",), controls=1, ingresses=1, nodes=1)
C1, I1, N1 = (str(LAB.hosts[name].address) for name in ("c1", "i1", "n1"))
HELLO = bytes([0x16, 3, 1, 0, 200]) + bytes(200)
DATA = bytes([0x17, 3, 3, 0, 30]) + bytes(30)


def packet(payload: bytes, *, protocol: int = 6, padding: bytes = b"") -> bytes:
    addresses = IPv4Address(I1).packed + IPv4Address(N1).packed
    head = struct.pack("!BBHHHBBH", 0x45, 0, 40 + len(payload), 1, 0, 64, protocol, 0) + addresses
    return head + struct.pack("!HHIIBBHHH", 40000, 21001, 1, 1, 0x50, 0x18, 512, 0, 0) + payload + padding


def test_a_segment_has_both_ends_and_what_it_carries() -> None:
    # A short frame is padded; the padding is not part of the packet.
    assert segment(packet(b"GET / ", padding=b"\0" * 6)) == Segment((I1, 40000), (N1, 21001), b"GET / ")


@pytest.mark.parametrize("other", [b"", b"\x45", packet(b""), packet(b"x", protocol=17), b"\x60" + bytes(60)])
def test_what_carries_nothing_by_tcp_is_no_segment(other: bytes) -> None:
    assert segment(other) is None


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (HELLO, True),
        (DATA[:5], True),
        (b"GET / HTTP/1.1\r\n", False),
        (b'{"model": 1}', False),
        (bytes([0x17, 3, 3, 0xFF, 0xFF]), False),
        (bytes([0x17, 3, 9, 0, 30]), False),
        (b"\x17\x03", False),
    ],
)
def test_a_record_of_tls_is_known_by_its_head(payload: bytes, expected: bool) -> None:
    assert begins_record(payload) is expected


def test_connections_are_summed_up_and_plain_ones_stand_first() -> None:
    segments = [
        Segment((N1, 40001), (C1, 8443), HELLO),
        Segment((C1, 8443), (N1, 40001), DATA),
        Segment((N1, 40001), (C1, 8443), b"the rest of a record"),
        Segment((N1, 40002), (C1, 8443), DATA),
        Segment((I1, 40003), (N1, 21001), b"GET /health\r\n"),
        Segment((N1, 21001), (I1, 40003), b"HTTP/1.1 200 OK"),
        Segment(("10.2.0.1", 40004), (I1, 8080), b"POST /v1"),
    ]

    assert hops(LAB, segments) == [
        Hop("i1", "n1", 21001, False, 1, "GET /health\\r\\n"),
        Hop("n1", "c1", 8443, True, 2),
    ]


def test_a_hop_says_what_a_plain_one_carried() -> None:
    assert str(Hop("i1", "n1", 21001, False, 3, "GET /")) == "i1 -> n1:21001 (3): PLAIN: GET /"
    assert str(Hop("n1", "c1", 8443, True, 2)) == "n1 -> c1:8443 (2): TLS"
