"""Rate limits: shown in headers, enforced with 429, and off without Valkey."""

from typing import Any
from uuid import uuid4

import pytest

from kernel.circuit_breaker import CircuitBreaker
from kernel.rest import throttling
from tests.controlplane.api.client import anonymous, bearer

pytestmark = pytest.mark.django_db


def test_every_answer_says_where_its_caller_stands(settings: Any) -> None:
    settings.API_READS_PER_MIN = 1000
    client = bearer(f"user-{uuid4()}")
    first, second = client.get("/api/v1/cells"), client.get("/api/v1/cells/x")
    assert first["RateLimit-Limit"] == "1000"
    assert first["RateLimit-Policy"] == "1000;w=60"
    assert int(first["RateLimit-Remaining"]) > int(second["RateLimit-Remaining"])
    assert 1 <= int(first["RateLimit-Reset"]) <= 60


def test_one_above_the_limit_is_told_when_to_come_again(settings: Any) -> None:
    settings.API_READS_PER_MIN = 2
    client = bearer(f"user-{uuid4()}")
    answers = [client.get("/api/v1/cells") for _ in range(6)]  # twice the limit, should a minute begin in between
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused
    assert 1 <= int(refused[0]["Retry-After"]) <= 60
    assert refused[0]["RateLimit-Remaining"] == "0"
    assert refused[0]["Content-Type"] == "application/problem+json"


def test_reads_do_not_use_up_writes(settings: Any) -> None:
    settings.API_READS_PER_MIN = 1
    client = bearer(f"user-{uuid4()}")
    for _ in range(4):
        client.get("/api/v1/cells")
    assert client.post("/api/v1/models", {}, format="json").status_code == 400


def test_strangers_are_counted_by_their_address(settings: Any) -> None:
    settings.API_ANONYMOUS_REQUESTS_PER_MIN = 2
    client = anonymous()
    client.defaults["REMOTE_ADDR"] = f"2001:db8::{uuid4().hex[:4]}"
    statuses = {client.get("/api/v1/cells").status_code for _ in range(6)}
    assert statuses == {401, 429}


def test_a_limit_of_none_is_none(settings: Any) -> None:
    settings.API_READS_PER_MIN = 0
    assert "RateLimit-Limit" not in bearer().get("/api/v1/cells")


def test_while_nobody_can_count_everybody_is_served(settings: Any) -> None:
    settings.API_READS_PER_MIN, settings.REDIS_URL = 1, "redis://127.0.0.1:1/0"
    throttling._server.cache_clear()
    try:
        answers = [bearer(f"user-{number}").get("/api/v1/cells") for number in (1, 1, 1)]
        assert throttling.COUNTS.is_open
    finally:
        throttling._server.cache_clear()
        throttling.COUNTS = CircuitBreaker(throttling.COUNTS.pause_s)
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert "RateLimit-Limit" not in answers[0]
