"""Doorbells over the real broker: they ring after the commit, and never stand in the way of anything."""

from typing import Any

import pytest
import redis
from django.conf import settings as configured
from django.db import transaction

from controlplane.celery import app
from kernel import hints, live
from kernel.circuit_breaker import CircuitBreaker
from kernel.events import event_record
from kernel.models import Event
from tests.fleet.rows import NOW
from tests.kernel.servers_away import KINDS, point_doorbells_at, server_away, use_fresh_doorbells

pytestmark = pytest.mark.django_db(transaction=True)

TASK = "kernel.test_doorbell"
QUEUE = "switchyard:celery"


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> redis.Redis:
    use_fresh_doorbells(monkeypatch)
    client = redis.Redis.from_url(configured.REDIS_URL)
    client.delete(QUEUE)
    return client


def test_a_doorbell_rings_after_the_commit_and_not_before(broker: redis.Redis) -> None:
    with transaction.atomic():
        hints.ring(TASK)
        assert broker.llen(QUEUE) == 0
    assert broker.llen(QUEUE) == 1
    (message,) = broker.lrange(QUEUE, 0, -1)
    assert TASK.encode() in message


def test_a_doorbell_of_a_change_that_was_taken_back_does_not_ring(broker: redis.Redis) -> None:
    with transaction.atomic():
        hints.ring(TASK)
        transaction.set_rollback(True)
    assert broker.llen(QUEUE) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_broker_that_is_away_breaks_nothing_and_holds_nobody_up(
    kind: str, settings: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with server_away(kind) as url:
        point_doorbells_at(url, settings, monkeypatch)
        with transaction.atomic():
            for number in range(20):
                event_record(kind="test", message=str(number), now=NOW)
                hints.ring(TASK)
    assert Event.objects.count() == 20
    failed = [record.name for record in caplog.records if record.name in (hints.log.name, live.log.name)]
    assert failed.count(hints.log.name) <= 1, "one is tried, unless a hint of the events failed before it"
    assert failed.count(live.log.name) <= 1
    assert failed


@pytest.mark.parametrize("kind", KINDS)
def test_a_doorbell_is_tried_once_and_each_step_of_it_has_a_limit(
    kind: str, settings: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with server_away(kind) as url:
        point_doorbells_at(url, settings, monkeypatch)
        for _ in range(20):
            hints.ring(TASK)
    assert len([record for record in caplog.records if record.name == hints.log.name]) == 1
    options = hints._BrokerConnection().open(app).transport_options
    assert (options["socket_timeout"], options["socket_connect_timeout"], options["max_retries"]) == (1.0, 1.0, 0)


def test_after_a_failure_it_is_quiet_for_a_while_and_then_rings_again(
    broker: redis.Redis, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = [0.0]
    doorbells = CircuitBreaker(pause_s=2, now_s=lambda: seconds[0])
    with server_away("refuses") as url, monkeypatch.context() as away:
        point_doorbells_at(url, settings, away)
        away.setattr(hints, "DOORBELLS", doorbells)
        hints.ring(TASK)
    monkeypatch.setattr(hints, "DOORBELLS", doorbells)
    for seconds[0], rung in ((1.9, 0), (2.0, 1)):
        hints.ring(TASK)
        assert broker.llen(QUEUE) == rung
