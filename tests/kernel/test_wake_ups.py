"""Wake-ups over the real broker: they are sent after the commit, and never block or fail their caller."""

from typing import Any

import pytest
import redis
from django.conf import settings as configured
from django.db import transaction

from controlplane.celery import app
from kernel import live, wake_ups
from kernel.circuit_breaker import CircuitBreaker
from kernel.events import event_record
from kernel.models import Event
from tests.fleet.rows import NOW
from tests.kernel.servers_away import KINDS, point_valkey_at, server_away, use_fresh_connections

pytestmark = pytest.mark.django_db(transaction=True)

TASK = "kernel.test_wake_up"
QUEUE = "switchyard:celery"


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> redis.Redis:
    use_fresh_connections(monkeypatch)
    client = redis.Redis.from_url(configured.REDIS_URL)
    client.delete(QUEUE)
    return client


def test_a_wake_up_is_sent_after_the_commit_and_not_before(broker: redis.Redis) -> None:
    with transaction.atomic():
        wake_ups.send(TASK)
        assert broker.llen(QUEUE) == 0
    assert broker.llen(QUEUE) == 1
    (message,) = broker.lrange(QUEUE, 0, -1)
    assert TASK.encode() in message


def test_a_change_that_was_rolled_back_sends_no_wake_up(broker: redis.Redis) -> None:
    with transaction.atomic():
        wake_ups.send(TASK)
        transaction.set_rollback(True)
    assert broker.llen(QUEUE) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_broker_that_is_away_fails_and_blocks_no_caller(
    kind: str, settings: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with server_away(kind) as url:
        point_valkey_at(url, settings, monkeypatch)
        with transaction.atomic():
            for number in range(20):
                event_record(kind="test", message=str(number), now=NOW)
                wake_ups.send(TASK)
    assert Event.objects.count() == 20
    failed = [record.name for record in caplog.records if record.name in (wake_ups.log.name, live.log.name)]
    assert failed.count(wake_ups.log.name) <= 1, "one is tried, unless a hint of the events failed before it"
    assert failed.count(live.log.name) <= 1
    assert failed


@pytest.mark.parametrize("kind", KINDS)
def test_a_wake_up_is_tried_once_and_each_step_of_it_has_a_limit(
    kind: str, settings: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with server_away(kind) as url:
        point_valkey_at(url, settings, monkeypatch)
        for _ in range(20):
            wake_ups.send(TASK)
    assert len([record for record in caplog.records if record.name == wake_ups.log.name]) == 1
    options = wake_ups._BrokerConnection().open(app).transport_options
    assert (options["socket_timeout"], options["socket_connect_timeout"], options["max_retries"]) == (1.0, 1.0, 0)


def test_after_a_failure_it_pauses_and_then_sends_again(
    broker: redis.Redis, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = [0.0]
    breaker = CircuitBreaker(pause_s=2, now_s=lambda: seconds[0])
    with server_away("refuses") as url, monkeypatch.context() as away:
        point_valkey_at(url, settings, away)
        away.setattr(wake_ups, "VALKEY_BREAKER", breaker)
        wake_ups.send(TASK)
    monkeypatch.setattr(wake_ups, "VALKEY_BREAKER", breaker)
    for seconds[0], sent in ((1.9, 0), (2.0, 1)):
        wake_ups.send(TASK)
        assert broker.llen(QUEUE) == sent
