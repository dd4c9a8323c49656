"""What the headers of a request say about it."""

import pytest

from engine_agent.cell_proxy.admission import BadHeader, RequestMetadata, read_metadata
from engine_agent.protocol.messages import OTHER_TENANTS
from engine_agent.protocol.states import ServingClass

NOW = 1_795_286_000.0


def test_without_headers_a_request_is_real_time_and_nobodys() -> None:
    assert read_metadata([(b"content-type", b"application/json")], NOW) == RequestMetadata(
        ServingClass.REALTIME, "", None
    )


def test_all_three_are_read() -> None:
    headers = [
        (b"x-switchyard-class", b"batch"),
        (b"x-switchyard-tenant", b"acme"),
        (b"x-switchyard-deadline-ms", b"1500"),
    ]
    assert read_metadata(headers, NOW) == RequestMetadata(ServingClass.BATCH, "acme", 1.5)


@pytest.mark.parametrize(("value", "key"), [(b"0a1b2c3d", "0a1b2c3d"), (b"", ""), (b"0A1B", ""), (b"x" * 99, "")])
def test_the_prefix_of_a_key_is_read_and_nothing_else_taken_for_one(value: bytes, key: str) -> None:
    assert read_metadata([(b"x-switchyard-key", value)], NOW).key == key


def test_an_ingress_says_that_it_chose_the_deployment() -> None:
    assert read_metadata([(b"x-switchyard-deployment", b"chat-v2")], NOW).is_routed


@pytest.mark.parametrize("tenant", [b"a b", b"", b"x" * 65, "ä".encode(), b'x"', b"~others"])
def test_a_name_that_no_tenant_has_is_counted_among_the_others(tenant: bytes) -> None:
    assert read_metadata([(b"x-switchyard-tenant", tenant)], NOW).tenant == OTHER_TENANTS


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        (b"x-switchyard-class", b"urgent", "one of realtime, near_realtime, batch"),
        (b"x-switchyard-deadline-ms", b"soon", "the milliseconds left, a whole number"),
        (b"x-switchyard-deadline-ms", b"1.5", "a whole number"),
        (b"x-switchyard-deadline-ms", b"9" * 11, "a whole number"),
    ],
)
def test_a_header_that_says_nothing_sensible_is_refused_by_name(name: bytes, value: bytes, right: str) -> None:
    with pytest.raises(BadHeader, match=right) as caught:
        read_metadata([(name, value)], NOW)
    assert caught.value.refusal.status == 400
    assert name.decode() in caught.value.refusal.message.lower()


@pytest.mark.parametrize(
    ("arrived", "left_s"),
    [(b"1795285999500", 1.0), (b"1795285990000", -8.5), (b"1795286009000", 1.5), (b"soon", 1.5), (b"5", 1.5)],
)
def test_what_a_request_waited_at_its_ingress_is_taken_off_its_time(arrived: bytes, left_s: float) -> None:
    headers = [(b"x-switchyard-deadline-ms", b"1500"), (b"x-switchyard-arrived-ms", arrived)]
    assert read_metadata(headers, NOW).time_left_s == left_s
