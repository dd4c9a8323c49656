"""Declarations of topics, and the parsing of their records."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.refusals import InvalidInput
from tests.fleet.rows import NOW
from tests.traffic.rows import BODY, serving_fleet
from traffic.async_requests.models import AsyncRequest, RequestQueue
from traffic.async_requests.planner import AsyncSettings, InvalidMessage
from traffic.async_requests.planning.kafka import (
    InvalidSetting,
    Record,
    TopicAddress,
    TopicSettings,
    check_topic,
    origin_key,
    origin_of,
    parse_record,
    record_key,
    sent_at,
    topic_address,
)
from traffic.async_requests.services.kafka_records import kafka_records_accept
from traffic.async_requests.services.queues import request_queue_declare, request_queue_password
from traffic.keys.services import key_create, key_revoke

ORDERS = TopicAddress("k1:9092", "orders")


@pytest.mark.parametrize(
    "url",
    [
        "kafka://",
        "kafka://k1/orders",
        "kafka://k1:0/orders",
        "kafka://k1:65536/orders",
        "kafka://k1:9092",
        "kafka://k1:9092/",
        "kafka://k1:9092/..",
        "kafka://k1:9092/a/b",
        "kafka://k1:9092/a?b",
        "kafka://user:word@k1:9092/orders",
        "kafka://k1:9092,,k2:9092/orders",
        f"kafka://k1:9092/{'a' * 81}",
        f"kafka://{','.join(['k:1'] * 9)}/orders",
    ],
)
def test_malformed_addresses_are_refused(url: str) -> None:
    with pytest.raises(InvalidSetting) as refused:
        topic_address(url)
    assert refused.value.field == "url"


def test_an_address_has_brokers_and_a_topic() -> None:
    assert topic_address("kafka://k1:9092,[fd00::1]:9093/a.b_c-1") == TopicAddress("k1:9092,[fd00::1]:9093", "a.b_c-1")


@pytest.mark.parametrize(
    ("field", "stated"),
    [
        ("results_topic", {"results_topic": "orders"}),
        ("results_topic", {"results_topic": "a b"}),
        ("dead_letter_topic", {"dead_letter_topic": "orders"}),
        ("dead_letter_topic", {"results_topic": "same", "dead_letter_topic": "same"}),
        ("group", {"group": "a group"}),
        ("security", {"security": "SASL_SSL"}),
        ("security", {"security": "SASL_SSL", "username": "u"}),
        ("security", {"security": "SSL", "username": "u", "password": "p"}),
        ("security", {"password": "p"}),
        ("mechanism", {"mechanism": "PLAIN"}),
        ("ca_pem", {"ca_pem": "x"}),
    ],
)
def test_contradictory_settings_are_refused(field: str, stated: dict[str, str]) -> None:
    with pytest.raises(InvalidSetting) as refused:
        check_topic(ORDERS, TopicSettings(**stated))
    assert refused.value.field == field


def record(offset: int = 0, value: bytes | None = BODY, partition: int = 0, **columns: Any) -> Record:
    return Record(partition, offset, columns.pop("key", None), value, **columns)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (record(value=None), "no value"),
        (record(value=b"x" * 101), "longer than 100 bytes"),
        (record(value=b"{}", headers=[("Endpoint", b"\xff")]), "not UTF-8"),
        (record(value=b"{}", headers=[("Endpoint", b"a"), ("Endpoint", b"b")]), "twice"),
        (record(value=b"{}", headers=[("authorization", b"Bearer sw_1")]), "cannot name a key"),
        (record(value=b"{}", headers=[("Idempotency-Key", None)]), "empty"),
    ],
)
def test_records_that_are_no_requests_are_refused(bad: Record, why: str) -> None:
    with pytest.raises(InvalidMessage, match=why):
        parse_record(ORDERS, bad, 100)


@given(key=st.none() | st.binary(max_size=1200), sent_ms=st.integers(-(2**63), 2**63 - 1))
def test_any_key_and_time_can_be_stored(key: bytes | None, sent_ms: int) -> None:
    one = record(key=key, sent_ms=sent_ms)
    assert sent_at(one, NOW).tzinfo is not None
    is_kept = key is not None and len(key) <= 1024
    assert origin_key(origin_of(one), "mine") == (key if is_kept else b"mine")


def test_the_longest_place_is_an_idempotency_key() -> None:
    longest = TopicAddress(",".join(["k1:9092"] * 8), "a" * 80)
    assert len(record_key(longest, record(2**63 - 1, partition=2**31 - 1))) <= 128


def declared(**stated: str) -> RequestQueue:
    key = key_create(name="orders", tenant="acme", actor="ann", now=NOW).key
    url = "kafka://k1:9092/orders"
    return request_queue_declare(url=url, key=key.prefix, actor="ann", now=NOW, topic=TopicSettings(**stated))


@pytest.mark.django_db
def test_the_password_is_sealed_for_its_brokers_and_user() -> None:
    queue = declared(security="SASL_PLAINTEXT", username="u", password="word of mouth")
    assert "word" not in queue.sealed_password
    assert (request_queue_password(queue), queue.mechanism) == ("word of mouth", "SCRAM-SHA-512")
    queue.url = "kafka://elsewhere:9092/orders"
    assert request_queue_password(queue) == ""


@pytest.mark.django_db
def test_settings_of_topics_are_refused_for_other_queues() -> None:
    with pytest.raises(InvalidInput, match="has these settings"):
        request_queue_declare(url="https://sqs.x", key="k", actor="a", now=NOW, topic=TopicSettings(group="g"))
    with pytest.raises(InvalidInput, match="PEM"):
        declared(security="SSL", ca_pem="no certificate")


@pytest.mark.django_db
def test_a_partition_is_held_where_the_limits_end_and_invalid_records_are_passed() -> None:
    serving_fleet()
    queue = declared()
    settings = AsyncSettings(max_open_per_tenant=2)
    records = [record(7), record(8, b"no JSON"), record(9), record(10), record(11), record(3, partition=1)]
    taken = kafka_records_accept(queue, records, now=NOW, settings=settings)
    assert (taken.next_offsets, taken.held) == ({0: 10}, {0: 10, 1: 3})
    assert [refused.offset for refused, _ in taken.refused] == [8]
    assert AsyncRequest.objects.count() == 2
    again = kafka_records_accept(queue, records, now=NOW, settings=settings)
    assert (again.next_offsets, AsyncRequest.objects.count()) == ({0: 10}, 2)
    key_revoke(prefix=queue.key.prefix, actor="ann", now=NOW)
    queue.refresh_from_db()
    assert kafka_records_accept(queue, records, now=NOW, settings=settings).held == {0: 7, 1: 3}


@pytest.mark.django_db
def test_one_key_twice_in_a_group_is_one_request_or_a_conflict() -> None:
    serving_fleet()
    queue = declared(results_topic="out")
    twice = [record(n, headers=[("Idempotency-Key", b"mine")]) for n in range(2)]
    other = record(2, BODY.replace(b"why", b"who"), headers=[("Idempotency-Key", b"mine")])
    taken = kafka_records_accept(queue, [*twice, other], now=NOW, settings=AsyncSettings())
    assert taken.next_offsets == {0: 3}
    assert "belongs to another request" in taken.refused[0][1]
    assert AsyncRequest.objects.get().results_to_id == queue.pk
