"""The wire format, held by golden files: both sides decode them, and encode to exactly these bytes.

A deliberate change of the protocol changes a file here, and is then visible in review.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_agent.protocol.codec import MAX_FRAME_BYTES, BadMessage, decode_down, decode_up, encode
from engine_agent.protocol.messages import (
    PROTOCOL_VERSION,
    PROTOCOLS_SPOKEN,
    DownMessage,
    Fault,
    Report,
    UpMessage,
)
from engine_agent.protocol.ports import PORTS_PER_NODE, RENDEZVOUS, RENDEZVOUS_SLOTS, rendezvous_port
from engine_agent.protocol.states import EngineState

GOLDEN = Path(__file__).parent / "golden" / f"v{PROTOCOL_VERSION}"
UP = sorted(path.name for path in GOLDEN.glob("up_*.json"))
DOWN = sorted(path.name for path in GOLDEN.glob("down_*.json"))


def golden(name: str) -> bytes:
    return (GOLDEN / name).read_bytes()


def compact(text: bytes) -> Any:
    return msgspec.json.decode(text)


@pytest.mark.parametrize("name", UP)
def test_messages_from_agents_keep_their_form(name: str) -> None:
    assert compact(encode(decode_up(golden(name)))) == compact(golden(name))


@pytest.mark.parametrize("name", DOWN)
def test_messages_to_agents_keep_their_form(name: str) -> None:
    assert compact(encode(decode_down(golden(name)))) == compact(golden(name))


def members(written: Any, message: Any) -> set[str]:
    """The members of messages that occur in a golden file, as `Report.seq`."""
    if isinstance(message, msgspec.Struct):
        present = {each.name for each in msgspec.structs.fields(message) if each.encode_name in written}
        below = [members(written[name], getattr(message, name)) for name in present]
        return {f"{type(message).__name__}.{name}" for name in present}.union(*below)
    if isinstance(message, dict):
        return set().union(*(members(written[str(key)], value) for key, value in message.items()))
    if isinstance(message, list | tuple):
        return set().union(*(members(*pair) for pair in zip(written, message, strict=True)))
    return set()


def test_every_member_of_every_message_has_a_value_in_a_golden_file() -> None:
    """A member without a golden value could change its shape under the same protocol version."""
    _, definitions = msgspec.json.schema_components((UpMessage, DownMessage))
    every = {f"{name}.{member}" for name, shape in definitions.items() for member in shape.get("properties", {})}
    found = set().union(
        *(members(compact(golden(name)), decode_up(golden(name))) for name in UP),
        *(members(compact(golden(name)), decode_down(golden(name))) for name in DOWN),
    )
    assert {member for member in every - found if not member.endswith(".type")} == set()


def test_two_versions_are_spoken() -> None:
    assert PROTOCOLS_SPOKEN == (PROTOCOL_VERSION, PROTOCOL_VERSION - 1)


def test_every_message_has_a_golden_file() -> None:
    assert {name.split("_", 1)[1] for name in UP} == {
        "hello.json",
        "hello_machine.json",
        "report.json",
        "heartbeat.json",
        "ingress_report.json",
        "fault.json",
        "log_tail.json",
        "requests.json",
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
