"""The wire format, held by golden files: both sides decode them, and encode to exactly these bytes.

A deliberate change of the protocol changes a file here, and is then visible in review.
"""

import msgspec
import pytest

from engine_agent.protocol.codec import MAX_FRAME_BYTES, BadMessage, decode_down, decode_up, encode
from engine_agent.protocol.messages import PROTOCOL_VERSION, PROTOCOLS_SPOKEN, Fault, Report
from engine_agent.protocol.ports import PORTS_PER_NODE, RENDEZVOUS, RENDEZVOUS_SLOTS, rendezvous_port
from engine_agent.protocol.states import EngineState
from tests.engine_agent.protocol.shapes import folder, shapes, shapes_of, unread

UP = sorted(path.name for path in folder(PROTOCOL_VERSION).glob("up_*.json"))
DOWN = sorted(path.name for path in folder(PROTOCOL_VERSION).glob("down_*.json"))
BEFORE = PROTOCOL_VERSION - 1
OLD_UP = sorted(path.name for path in folder(BEFORE).glob("up_*.json"))
OLD_DOWN = sorted(path.name for path in folder(BEFORE).glob("down_*.json"))


def golden(name: str, version: int = PROTOCOL_VERSION) -> bytes:
    return (folder(version) / name).read_bytes()


def compact(text: bytes) -> object:
    return msgspec.json.decode(text)


def lost(old: object, new: object, where: str = "$") -> list[str]:
    """Where the new text has not what is in the old one; members that were added are nothing lost."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [each for name in old for each in lost(old[name], new.get(name), f"{where}.{name}")]
    return [] if old == new else [where]


@pytest.mark.parametrize("name", UP)
def test_messages_from_agents_keep_their_form(name: str) -> None:
    assert compact(encode(decode_up(golden(name)))) == compact(golden(name))


@pytest.mark.parametrize("name", DOWN)
def test_messages_to_agents_keep_their_form(name: str) -> None:
    assert compact(encode(decode_down(golden(name)))) == compact(golden(name))


def test_a_changed_shape_raises_the_version() -> None:
    assert shapes() == shapes_of(PROTOCOL_VERSION), (
        "a message has another shape: raise PROTOCOL_VERSION, copy the folder of golden files, and write its shapes by"
        " `python -m tests.engine_agent.protocol.shapes`"
    )


@pytest.mark.parametrize("name", OLD_UP)
def test_agents_of_the_version_before_are_read(name: str) -> None:
    assert lost(compact(golden(name, BEFORE)), compact(encode(decode_up(golden(name, BEFORE))))) == []


@pytest.mark.parametrize("name", OLD_DOWN)
def test_agents_read_a_control_plane_of_the_version_before(name: str) -> None:
    assert lost(compact(golden(name, BEFORE)), compact(encode(decode_down(golden(name, BEFORE))))) == []


@pytest.mark.parametrize("messages", ["up", "down"])
def test_both_versions_read_what_the_other_writes(messages: str) -> None:
    """Down to the version before, because the control plane goes first, and up from it; and the reverse, because it may
    be taken back before its agents are."""
    now, before = shapes_of(PROTOCOL_VERSION), shapes_of(BEFORE)
    assert unread(now, before, messages) == []
    assert unread(before, now, messages) == []


def test_what_a_reader_cannot_take_is_found() -> None:
    now, before = shapes_of(PROTOCOL_VERSION), shapes_of(BEFORE)
    del now["definitions"]["Report"]["properties"]["observed"]
    now["definitions"]["Hello"]["properties"]["id"] = {"type": "integer"}
    now["definitions"]["MachinePhase"]["enum"].append("asleep")
    assert sorted(unread(now, before, "up")) == [
        "Hello.id is of another type",
        "MachinePhase has values that are not known",
        "Report.observed is not sent",
    ]


def test_two_versions_are_spoken() -> None:
    assert PROTOCOLS_SPOKEN == (PROTOCOL_VERSION, BEFORE)


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
