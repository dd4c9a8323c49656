"""What an answer means for a near-real-time request, as tables."""

from datetime import UTC, datetime, timedelta

import pytest

from traffic.planning.async_request import (
    ASYNC_TONE,
    ENDED,
    OPEN,
    AsyncSettings,
    AsyncState,
    AttemptResponse,
    Window,
    judge,
    limit_of,
    retry_after_s,
)

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
SETTINGS = AsyncSettings(first_retry_s=1.0, longest_retry_s=8.0, max_failures=3)
OK = b'{"choices":[]}'


def verdict_of(
    received: AttemptResponse, *, attempts: int = 1, failures: int = 0, left_s: float = 60.0
) -> tuple[str, float]:
    """State, and seconds until the next attempt."""
    deadline_at = NOW + timedelta(seconds=left_s)
    verdict = judge(received, attempts=attempts, failures=failures, deadline_at=deadline_at, now=NOW, settings=SETTINGS)
    return verdict.state.value, (verdict.due_at - NOW).total_seconds() if verdict.due_at else 0.0


@pytest.mark.parametrize(
    ("received", "state", "wait_s"),
    [
        (AttemptResponse(200, OK), "done", 0.0),
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
        judge(each, attempts=1, failures=0, deadline_at=NOW + timedelta(1), now=NOW, settings=SETTINGS).reason
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
    with pytest.raises(ValueError, match="a whole number from 1 to 86400000"):
        limit_of(text, SETTINGS)


def test_a_window_opens_with_answers_and_closes_when_there_is_too_much() -> None:
    window = Window()
    window.sending = 8
    assert window.is_full
    window.ended(AttemptResponse(503))
    assert window.is_full
    for _ in range(7):
        window.ended(AttemptResponse(200, OK))
    assert (window.sending, window.is_full) == (0, False)
    window.sending = 5
    assert window.is_full


def test_every_state_is_open_or_an_outcome_and_has_a_tone() -> None:
    assert OPEN | ENDED == set(AsyncState) == set(ASYNC_TONE)
    assert not OPEN & ENDED
