"""What a message of a queue asks for, and why it may ask for nothing."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traffic.planning.request_queue import (
    ENDPOINTS,
    REASON_LETTERS,
    NoRequest,
    QueueAddress,
    asked_by,
    is_for_later,
    is_unread,
    pause_s,
    pointed_at,
    queue_address,
    reason_text,
    room,
)

INSTALL = "sw-0123456789ab"
NAME = f"{INSTALL}-requests-orders"
URL = f"https://sqs.us-east-1.amazonaws.com/123456789012/{NAME}"
QUEUE = QueueAddress(URL, "us-east-1", "123456789012", NAME)
POINTER = "software.amazon.payloadoffloading.PayloadS3Pointer"
NOW = datetime(2026, 11, 24, 12, tzinfo=UTC)


def test_a_queue_of_the_install_is_known_by_its_url() -> None:
    assert queue_address(URL, INSTALL) == QUEUE
    china = URL.replace("us-east-1.amazonaws.com", "cn-north-1.amazonaws.com.cn")
    assert queue_address(china, INSTALL).region == "cn-north-1"


@pytest.mark.parametrize(
    "url",
    [
        "", "orders", URL.replace("https", "http"), URL.replace("amazonaws.com", "example.com"), URL + ".fifo",
        URL + "/", URL.replace("sqs.", "u@sqs."), URL.replace("http", "ftp"),
        URL.replace("amazonaws.com", "amazonaws.com:443"), URL.replace("1234", "12"),
        URL.replace("requests-orders", "notices"), URL.replace("requests", "dead-requests"), URL + "\n", URL + "x" * 40,
        URL.replace(INSTALL, "sw-ffffffffffff"), URL.replace("orders", "Orders"), URL.replace("-orders", "-"),
    ],
)  # fmt: skip
def test_no_other_address_is_read(url: str) -> None:
    with pytest.raises(ValueError, match="is no queue"):
        queue_address(url, INSTALL)


def test_attributes_are_the_headers_of_the_endpoint() -> None:
    plain = asked_by("m-1", {"traceparent": "anything"})
    assert (plain.path, plain.idempotency_key, plain.limit_ms, plain.callback_url) == (ENDPOINTS[0], "m-1", None, None)
    said = asked_by(
        "m-1",
        {
            "endpoint": ENDPOINTS[1],
            "Idempotency-Key": "o-1",
            "X-Switchyard-Deadline-Ms": "5",
            "X-Switchyard-Callback-Url": "u",
        },
    )
    assert (said.path, said.idempotency_key, said.limit_ms, said.callback_url) == (ENDPOINTS[1], "o-1", "5", "u")


@pytest.mark.parametrize(
    ("attributes", "why"),
    [
        ({"authorization": "Bearer sw_1_2"}, "names no key"),
        ({"Endpoint": "/api/v1/keys"}, "Endpoint"),
        ({"Endpoint": "/v1/completions", "endpoint": "/v1/completions"}, "given twice"),
        ({"Idempotency-Key": ""}, "empty"),
    ],
)
def test_what_a_message_may_not_say(attributes: dict[str, str], why: str) -> None:
    with pytest.raises(NoRequest, match=why):
        asked_by("m-1", attributes)


def test_a_long_body_is_in_the_queues_own_bucket() -> None:
    pointer = json.dumps([POINTER, {"s3BucketName": NAME, "s3Key": "a/b"}])
    assert pointed_at(pointer, QUEUE) == "a/b"
    assert pointed_at('{"model": "m"}', QUEUE) is None


@pytest.mark.parametrize(
    "body",
    [
        "[", "[]", "[1, 2]", '["x"]', json.dumps(["other", {"s3BucketName": NAME, "s3Key": "k"}]),
        json.dumps([POINTER, {"s3BucketName": NAME}]), json.dumps([POINTER, {"s3BucketName": NAME, "s3Key": ""}]),
        json.dumps([POINTER, {"s3BucketName": NAME, "s3Key": 3}]), json.dumps([POINTER, [NAME, "k"]]),
        json.dumps([POINTER, {"s3BucketName": NAME, "s3Key": "k", "endpoint": "http://x"}]),
        json.dumps([POINTER, {"s3BucketName": NAME, "s3Key": "k" * 1025}]), "[" * 2000,
        json.dumps([POINTER, {"s3BucketName": NAME.replace("orders", "others"), "s3Key": "k"}]),
        f'["{POINTER}", {{"s3BucketName": "x", "s3BucketName": "{NAME}", "s3Key": "k"}}]',
    ],
)  # fmt: skip
def test_a_pointer_leads_nowhere_else(body: str) -> None:
    with pytest.raises(NoRequest):
        pointed_at(body, QUEUE)


@given(st.text())
def test_any_text_is_a_body_a_pointer_or_none(body: str) -> None:
    try:
        assert pointed_at(body, QUEUE) is None
    except NoRequest:
        assert body.strip().startswith("[")


def test_no_more_is_received_than_would_be_accepted() -> None:
    assert room(waiting=0, most_waiting=1000, last_minute=0, per_minute=0) == 10
    assert room(waiting=997, most_waiting=1000, last_minute=0, per_minute=0) == 3
    assert room(waiting=1200, most_waiting=1000, last_minute=0, per_minute=0) == 0
    assert room(waiting=0, most_waiting=1000, last_minute=58, per_minute=60) == 2
    assert [status for status in (400, 403, 404, 409, 413, 429, 503) if is_for_later(status)] == [429, 503]


def test_how_long_a_queue_rests_and_when_it_is_a_persons() -> None:
    assert [pause_s(failures) for failures in (1, 2, 3, 7, 1000)] == [1, 2, 4, 60, 60]
    assert not is_unread(NOW, NOW - timedelta(days=1), NOW + timedelta(seconds=60))
    assert is_unread(NOW, NOW - timedelta(days=1), NOW + timedelta(seconds=61))
    assert is_unread(None, NOW, NOW + timedelta(seconds=61))


def test_a_reason_can_be_stored_whatever_it_quotes() -> None:
    assert reason_text("a\0b\ud800") == "a\ufffdb?"
    assert len(reason_text("x" * 10_000)) == REASON_LETTERS + 1
