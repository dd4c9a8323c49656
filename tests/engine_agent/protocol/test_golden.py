"""The wire format, held by golden files: both sides decode them, and encode to exactly these bytes.

A deliberate change of the protocol changes a file here, and is then visible in review.
"""

from pathlib import Path

import msgspec
import pytest

from engine_agent.protocol.codec import MAX_FRAME_BYTES, BadMessage, decode_down, decode_up, encode
from engine_agent.protocol.messages import Fault, Report
from engine_agent.protocol.ports import PORTS_PER_NODE, RENDEZVOUS, RENDEZVOUS_SLOTS, rendezvous_port
from engine_agent.protocol.states import EngineState

GOLDEN = Path(__file__).parent / "golden"
UP = sorted(path.name for path in GOLDEN.glob("up_*.json"))
DOWN = sorted(path.name for path in GOLDEN.glob("down_*.json"))


def golden(name: str) -> bytes:
    return (GOLDEN / name).read_bytes()


def compact(text: bytes) -> object:
    return msgspec.json.decode(text)


@pytest.mark.parametrize("name", UP)
def test_messages_from_agents_keep_their_form(name: str) -> None:
    assert compact(encode(decode_up(golden(name)))) == compact(golden(name))


@pytest.mark.parametrize("name", DOWN)
def test_messages_to_agents_keep_their_form(name: str) -> None:
    assert compact(encode(decode_down(golden(name)))) == compact(golden(name))


def test_every_message_has_a_golden_file() -> None:
    assert {name.split("_", 1)[1] for name in UP} == {
        "hello.json",
        "hello_machine.json",
        "report.json",
        "ingress_report.json",
        "fault.json",
        "log_tail.json",
        "machine_report.json",
        "certificate_request.json",
    }
    assert {name.split("_", 1)[1] for name in DOWN} == {
        "desired.json",
        "desired_spare.json",
        "desired_logs.json",
        "routing_table.json",
        "table_part.json",
        "application_tls.json",
        "machine_order.json",
        "refused.json",
        "trust.json",
        "certificate.json",
        "credential.json",
    }


def test_fields_that_a_newer_side_adds_are_passed_over() -> None:
    report = decode_up(b'{"type":"report","seq":1,"observed":{"state":"idle","mood":"fine"},"colour":"red"}')
    assert isinstance(report, Report)
    assert report.observed.state is EngineState.IDLE


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"[]", "Expected `object`"),
        (b"{}", "missing required field `type`"),
        (b'{"type":"dance"}', "Invalid value 'dance'"),
        (b'{"type":"report","seq":"1","observed":{"state":"idle"}}', r"Expected `int`, got `str` - at `\$.seq`"),
        (b'{"type":"report","seq":1,"observed":{"state":"asleep"}}', r"'asleep' - at `\$.observed.state`"),
        (b'{"type":"report","seq":1}', "missing required field `observed`"),
        (b"\xff\xfe", "."),
    ],
)
def test_a_bad_frame_says_where_and_why(frame: bytes, said: str) -> None:
    with pytest.raises(BadMessage, match=said):
        decode_up(frame)


def test_frames_are_limited_on_both_sides() -> None:
    fault = Fault(signature="x", summary="y" * MAX_FRAME_BYTES)
    with pytest.raises(BadMessage, match="exceeds the limit of 262144"):
        encode(fault)
    with pytest.raises(BadMessage, match="exceeds the limit of 262144"):
        decode_up(msgspec.json.encode(fault))


def test_rendezvous_ports_move_with_the_generation_and_stay_in_the_block() -> None:
    ports = {rendezvous_port(21000, generation) for generation in range(100)}
    assert ports == set(range(21000 + RENDEZVOUS, 21000 + RENDEZVOUS + RENDEZVOUS_SLOTS))
    assert max(ports) < 21000 + PORTS_PER_NODE
