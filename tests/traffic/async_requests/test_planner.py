"""Meaning of answers as tables, and parsing of queue messages."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traffic.async_requests.planner import (
    ENDED,
    ENDPOINTS,
    OPEN,
    REASON_LETTERS,
    AsyncSettings,
    AsyncState,
    AttemptResponse,
    InvalidMessage,
    QueueAddress,
    Window,
    body_object_key,
    evaluate_attempt,
    is_temporary,
    is_unread,
    limit_of,
    parse_attributes,
    pause_s,
    queue_address,
    reason_text,
    retry_after_s,
    room,
)

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
SETTINGS = AsyncSettings(first_retry_s=1.0, longest_retry_s=8.0, max_failures=3)
OK = b'{"choices":[]}'
DEEP = b"[" * 100_000 + b"]" * 100_000


def verdict_of(
    received: AttemptResponse, *, attempts: int = 1, failures: int = 0, left_s: float = 60.0
) -> tuple[str, float]:
    """State, and seconds until the next attempt."""
    deadline_at = NOW + timedelta(seconds=left_s)
    verdict = evaluate_attempt(
        received, attempts=attempts, failures=failures, deadline_at=deadline_at, now=NOW, settings=SETTINGS
    )
    return verdict.state.value, (verdict.due_at - NOW).total_seconds() if verdict.due_at else 0.0


@pytest.mark.parametrize(
    ("received", "state", "wait_s"),
    [
        (AttemptResponse(200, OK), "done", 0.0),
        (AttemptResponse(200, '{"choices":[{"logprob":NaN,"text":"\u00e9"}]}'.encode()), "done", 0.0),
        (AttemptResponse(200, b'{"choices":"\xff"}'), "queued", 1.0),
        (AttemptResponse(200, b'{"choices":' + DEEP + b"}"), "queued", 1.0),
        (AttemptResponse(400, b'{"error":' + DEEP + b"}"), "failed", 0.0),
        (AttemptResponse(200, b'{"choices":['), "queued", 1.0),
        (AttemptResponse(200, b"[]"), "queued", 1.0),
        (AttemptResponse(400, b'{"error":{"message":"no"}}'), "failed", 0.0),
        (AttemptResponse(403), "failed", 0.0),
        (AttemptResponse(404), "failed", 0.0),
        (AttemptResponse(413), "failed", 0.0),
        (AttemptResponse(302), "failed", 0.0),
        (AttemptResponse(401), "queued", 1.0),
        (AttemptResponse(429, retry_after_s=5.0), "queued", 5.0),
        (AttemptResponse(503, retry_after_s=500.0), "queued", 8.0),
        (AttemptResponse(500), "queued", 1.0),
        (AttemptResponse(502), "queued", 1.0),
        (AttemptResponse(None, sent=False, reason="refused"), "queued", 1.0),
        (AttemptResponse(None, reason="it broke off"), "queued", 1.0),
    ],
)
def test_an_attempt_ends_a_request_or_has_it_tried_again(received: AttemptResponse, state: str, wait_s: float) -> None:
    assert verdict_of(received) == (state, wait_s)


def test_an_answer_counts_even_when_it_comes_late() -> None:
    assert verdict_of(AttemptResponse(200, OK), left_s=-1.0)[0] == "done"


@pytest.mark.parametrize(
    "received", [AttemptResponse(503), AttemptResponse(500), AttemptResponse(None), AttemptResponse(400)]
)
def test_after_the_deadline_nothing_else_is_an_outcome(received: AttemptResponse) -> None:
    assert verdict_of(received, left_s=0.0)[0] == "expired"


def test_a_request_that_breaks_engines_is_not_given_to_all_of_them() -> None:
    assert verdict_of(AttemptResponse(500), attempts=9, failures=1)[0] == "queued"
    assert verdict_of(AttemptResponse(500), attempts=9, failures=2)[0] == "failed"
    assert verdict_of(AttemptResponse(503), attempts=9, failures=2)[0] == "queued"
    assert verdict_of(AttemptResponse(None, sent=False), attempts=9, failures=2)[0] == "queued"


def test_what_went_wrong_is_said_in_the_words_of_who_answered() -> None:
    answers = [
        AttemptResponse(400, b'{"error":{"message":"no such thing"}}'),
        AttemptResponse(400, b"plain words"),
        AttemptResponse(400),
    ]
    messages = [
        evaluate_attempt(
            each, attempts=1, failures=0, deadline_at=NOW + timedelta(1), now=NOW, settings=SETTINGS
        ).reason
        for each in answers
    ]
    assert messages == ["answered 400: no such thing", "answered 400: plain words", "answered 400"]


def test_pauses_double_and_are_bounded() -> None:
    assert [retry_after_s(attempts, SETTINGS) for attempts in (1, 2, 3, 4, 5, 500)] == [1, 2, 4, 8, 8, 8]


def test_a_limit_is_milliseconds_or_the_default() -> None:
    assert limit_of(None, SETTINGS) == SETTINGS.default_limit_s
    assert limit_of("1500", SETTINGS) == 1.5


@pytest.mark.parametrize("text", ["", "0", "-1", "soon", "1.5", "99999999999999", "86400001", "²"])
def test_another_limit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="from 1 to 86400000"):
        limit_of(text, SETTINGS)


def test_a_window_opens_with_answers_and_closes_when_there_is_too_much() -> None:
    window = Window()
    window.sending = 8
    assert window.room == 0
    for _ in range(3):
        window.ended(AttemptResponse(200, OK))
    assert window.room == 6, "three have ended, and there are three more places"
    window.ended(AttemptResponse(503))
    assert window.room == 1
    for _ in range(6):
        window.sending = 6
        window.ended(AttemptResponse(200, OK))
    assert window.room == 1, "one more place a round"
    window.sending = 1
    window.ended(AttemptResponse(200, OK))
    assert window.room == 6, "an unused window does not grow"


def test_every_state_is_open_or_an_outcome_and_has_a_tone() -> None:
    assert set(AsyncState) == OPEN | ENDED
    assert not OPEN & ENDED


INSTALL = "sw-0123456789ab"
NAME = f"{INSTALL}-requests-orders"
URL = f"https://sqs.us-east-1.amazonaws.com/123456789012/{NAME}"
QUEUE = QueueAddress(URL, "us-east-1", "123456789012", NAME)
POINTER = "software.amazon.payloadoffloading.PayloadS3Pointer"
RECEIVED_AT = datetime(2026, 11, 24, 12, tzinfo=UTC)


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
    with pytest.raises(ValueError, match=r"is not a (request )?queue"):
        queue_address(url, INSTALL)


def test_attributes_are_the_headers_of_the_endpoint() -> None:
    plain = parse_attributes("m-1", {"traceparent": "anything"})
    assert (plain.path, plain.idempotency_key, plain.limit_ms, plain.callback_url) == (ENDPOINTS[0], "m-1", None, None)
    said = parse_attributes(
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
        ({"authorization": "Bearer sw_1_2"}, "cannot name a key"),
        ({"Endpoint": "/api/v1/keys"}, "Endpoint"),
        ({"Endpoint": "/v1/completions", "endpoint": "/v1/completions"}, "given twice"),
        ({"Idempotency-Key": ""}, "empty"),
    ],
)
def test_what_a_message_may_not_say(attributes: dict[str, str], why: str) -> None:
    with pytest.raises(InvalidMessage, match=why):
        parse_attributes("m-1", attributes)


def test_a_long_body_is_in_the_queues_own_bucket() -> None:
    pointer = json.dumps([POINTER, {"s3BucketName": NAME, "s3Key": "a/b"}])
    assert body_object_key(pointer, QUEUE) == "a/b"
    assert body_object_key('{"model": "m"}', QUEUE) is None


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
    with pytest.raises(InvalidMessage):
        body_object_key(body, QUEUE)


@given(st.text())
def test_any_text_is_a_body_a_pointer_or_none(body: str) -> None:
    try:
        assert body_object_key(body, QUEUE) is None
    except InvalidMessage:
        assert body.strip().startswith("[")


def test_no_more_is_received_than_would_be_accepted() -> None:
    assert room(waiting=0, most_waiting=1000, last_minute=0, per_minute=0) == 10
    assert room(waiting=997, most_waiting=1000, last_minute=0, per_minute=0) == 3
    assert room(waiting=1200, most_waiting=1000, last_minute=0, per_minute=0) == 0
    assert room(waiting=0, most_waiting=1000, last_minute=58, per_minute=60) == 2
    assert [status for status in (400, 403, 404, 409, 413, 429, 503) if is_temporary(status)] == [429, 503]


def test_how_long_a_queue_rests_and_when_it_is_a_persons() -> None:
    assert [pause_s(failures) for failures in (1, 2, 3, 7, 1000)] == [1, 2, 4, 60, 60]
    assert not is_unread(RECEIVED_AT, RECEIVED_AT - timedelta(days=1), RECEIVED_AT + timedelta(seconds=60))
    assert is_unread(RECEIVED_AT, RECEIVED_AT - timedelta(days=1), RECEIVED_AT + timedelta(seconds=61))
    assert is_unread(None, RECEIVED_AT, RECEIVED_AT + timedelta(seconds=61))


def test_a_reason_can_be_stored_whatever_it_quotes() -> None:
    assert reason_text("a\0b\ud800") == "a\ufffdb?"
    assert len(reason_text("x" * 10_000)) == REASON_LETTERS + 1
