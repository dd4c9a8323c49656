"""A message that is longer than a frame arrives complete or not at all, whatever happens to its parts."""

import hashlib
import random

import msgspec
import pytest

from engine_agent.protocol.codec import (
    MAX_FRAME_BYTES,
    MAX_PARTS,
    PIECE_BYTES,
    BadMessage,
    MessageAssembly,
    decode_down,
    frames_of,
)
from engine_agent.protocol.ingress_messages import ApiKey, ApplicationTls, RoutingTable, ServerCertificate, TablePart
from engine_agent.protocol.messages import Certificate, Desired, DownMessage, EnginePlan, Trust
from tests.engine_agent.orders import assignment


def key(number: int) -> ApiKey:
    text = f"sw_{number:08x}_{number:048x}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    return ApiKey(f"{number:08x}", digest, f"tenant-{number % 50}", "realtime", ("demo",), None, 600, 200_000, 32)


def table(revision: int, keys: int) -> RoutingTable:
    return RoutingTable(revision, "us-east-1", (), keys=tuple(key(number) for number in range(keys)))


def parts_of(message: DownMessage) -> list[TablePart]:
    parts = [decode_down(frame) for frame in frames_of(message)]
    assert all(isinstance(part, TablePart) for part in parts)
    return [part for part in parts if isinstance(part, TablePart)]


def taken(parts: list[TablePart]) -> list[DownMessage]:
    assembly = MessageAssembly()
    return [whole for part in parts if (whole := assembly.take(part)) is not None]


def test_a_short_table_stays_one_frame_of_its_own_kind() -> None:
    (frame,) = frames_of(table(1, 2))
    assert decode_down(frame) == table(1, 2)


def test_a_table_with_20000_keys_goes_over_in_frames_within_the_limit_and_arrives_equal() -> None:
    long = table(7, 20_000)
    frames = frames_of(long)
    assert max(len(frame) for frame in frames) <= MAX_FRAME_BYTES
    assert taken(parts_of(long)) == [long]


def test_order_and_repetition_of_parts_do_not_matter() -> None:
    long = table(7, 4_000)
    parts = parts_of(long) * 2
    random.Random(5).shuffle(parts)
    assert long in taken(parts)


def test_a_table_that_lost_a_part_never_counts_and_the_next_one_does() -> None:
    first, second = parts_of(table(7, 4_000)), parts_of(table(8, 4_000))
    assert taken(first[:1] + first[2:]) == []
    assert taken([*first[:-1], *second]) == [table(8, 4_000)]


def test_a_part_of_an_older_table_changes_nothing() -> None:
    old, new = parts_of(table(7, 4_000)), parts_of(table(8, 4_000))
    assert taken([*new[:-1], *old, new[-1]]) == [table(8, 4_000)]


def test_parts_of_two_texts_of_one_revision_are_never_mixed() -> None:
    one, other = parts_of(table(7, 4_000)), parts_of(table(7, 4_100))
    assert taken([one[0], *other[1:]]) == []


def test_parts_that_do_not_make_what_they_say_are_refused() -> None:
    parts = parts_of(table(7, 4_000))
    broken = [*parts[:-1], msgspec.structs.replace(parts[-1], piece=b"x")]
    with pytest.raises(BadMessage, match="revision 7 do not have the digest of their message"):
        taken(broken)
    piece = msgspec.json.encode(table(3, 0))
    with pytest.raises(BadMessage, match="revision 4 form a different RoutingTable"):
        taken([TablePart(4, hashlib.sha256(piece).hexdigest(), 0, 1, piece)])


@pytest.mark.parametrize(("index", "count", "size"), [(0, 0, 1), (2, 2, 1), (-1, 2, 1), (0, MAX_PARTS + 1, 1)])
def test_a_part_outside_its_table_is_refused(index: int, count: int, size: int) -> None:
    with pytest.raises(BadMessage, match="is not a part of a routing_table"):
        MessageAssembly().take(TablePart(1, "", index, count, b"x" * size))


def test_a_piece_longer_than_any_sender_makes_is_refused() -> None:
    with pytest.raises(BadMessage, match="is not a part of a routing_table"):
        MessageAssembly().take(TablePart(1, "", 0, 2, b"x" * (PIECE_BYTES + 1)))


def test_revocation_lists_longer_than_a_frame_arrive_whole_and_so_does_a_certificate_with_them() -> None:
    trust = Trust("bundle", "revoked" * MAX_FRAME_BYTES)
    for long in (trust, Certificate("chain", trust), ApplicationTls("1", (ServerCertificate("a", trust.revoked),))):
        assert taken(parts_of(long)) == [long]


def test_parts_of_two_kinds_do_not_get_into_each_others_way() -> None:
    long, trust = table(7, 4_000), Trust("bundle", "revoked" * MAX_FRAME_BYTES)
    mixed = [part for pair in zip(parts_of(long), parts_of(trust), strict=False) for part in pair]
    assert taken([*mixed, *parts_of(long), *parts_of(trust)])[-2:] == [long, trust]


def test_a_part_of_what_is_never_taken_apart_is_refused() -> None:
    with pytest.raises(BadMessage, match="a part of 'desired', which is never split"):
        MessageAssembly().take(TablePart(0, "", 0, 1, b"x", "desired"))


def test_orders_are_not_taken_apart() -> None:
    plan = EnginePlan("sim", "demo", 1, 60.0, args=("x" * MAX_FRAME_BYTES,))
    order = Desired("n-1", 1, msgspec.structs.replace(assignment(), plan=plan))
    with pytest.raises(BadMessage, match="exceeds the limit of 262144"):
        frames_of(order)
