"""What the worker of control loops does about its broker: nothing that a pass could wait for."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
from celery.app.trace import build_tracer
from celery.concurrency.solo import TaskPool
from celery.worker.consumer.consumer import Consumer

from controlplane.celery import app
from kernel import loop_worker
from kernel.loop_worker import (
    EVENTS_KEPT,
    GIVE_UP_STATUS,
    ControlLoops,
    HangingPass,
    LoopThreads,
    PassEvents,
    PersistentConsumer,
    WakeUp,
    wake_up_strategy,
)
from kernel.tracing import request_id


class Dispatcher:
    """Celery's, as far as passes use it."""

    enabled = True
    groups: frozenset[str] | None = None

    def __init__(self) -> None:
        self.buffer_limit = 24
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def send(self, kind: str, **fields: Any) -> None:
        self.sent.append((kind, fields))


def worker(dispatcher: Dispatcher | None) -> Any:
    return SimpleNamespace(consumer=SimpleNamespace(event_dispatcher=dispatcher))


def test_events_are_published_in_order_with_their_own_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_worker, "time", iter([100.0, 107.0]).__next__)
    dispatcher = Dispatcher()
    events = PassEvents(worker(dispatcher))
    events.send("task-started", uuid="1")
    events.send("task-succeeded", uuid="1")
    assert dispatcher.sent == []
    events.publish()
    events.publish()
    assert [(kind, fields["timestamp"]) for kind, fields in dispatcher.sent] == [
        ("task-started", 100.0),
        ("task-succeeded", 107.0),
    ]


def test_without_a_broker_the_newest_events_wait() -> None:
    away = worker(None)
    events = PassEvents(away)
    assert not PassEvents(away).enabled
    for number in range(EVENTS_KEPT + 5):
        events.send("task-started", uuid=number)
    events.publish()
    away.consumer.event_dispatcher = dispatcher = Dispatcher()
    assert events.enabled
    events.publish()
    assert [fields["uuid"] for _, fields in dispatcher.sent] == list(range(5, EVENTS_KEPT + 5))


def test_a_worker_that_is_not_to_send_events_of_tasks_keeps_none() -> None:
    dispatcher = Dispatcher()
    dispatcher.groups = frozenset({"worker"})
    assert not PassEvents(worker(dispatcher)).enabled


def test_messages_for_a_loop_wake_it_up_and_start_nothing_themselves() -> None:
    given: list[WakeUp] = []
    threads = LoopThreads({"fleet.reconcile": 3600.0}, lambda loop, wake_up: given.append(wake_up))
    consumer = SimpleNamespace(controller=SimpleNamespace(control_loops=threads))
    handle = wake_up_strategy(SimpleNamespace(name="fleet.reconcile"), None, consumer)
    acknowledged: list[str] = []
    for name in ("one", "two"):
        handle(name, None, lambda *_, name=name: acknowledged.append(name), None, None)
    assert (given, acknowledged) == ([], ["one"])
    threads.slots["fleet.reconcile"].run_once()
    assert [wake_up.message for wake_up in given] == ["two"]


@pytest.mark.django_db
def test_a_pass_is_a_request_of_its_task_that_knows_what_woke_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    app.loader.import_default_modules()
    monkeypatch.setattr(loop_worker, "control_loops", lambda queues: {"fleet.cloud": 1.0})
    task = app.tasks["fleet.cloud"]
    numbers: list[str] = []

    def run() -> bool:
        numbers.append(request_id())
        return False

    monkeypatch.setattr(task, "run", run)
    monkeypatch.setattr(task, "__trace__", build_tracer(task.name, task, app=app))
    shown = worker(Dispatcher())
    shown.app, shown.hostname, shown.pool, shown.options = app, "controller@test", TaskPool(app=app), {}
    step = ControlLoops(shown)
    step._make_pass("fleet.cloud", WakeUp(request_id="r-7"))
    assert numbers == ["r-7"]
    step.events.publish()
    assert [kind for kind, _ in shown.consumer.event_dispatcher.sent] == [
        "task-received",
        "task-started",
        "task-succeeded",
    ]


@pytest.mark.parametrize("loops", [None, LoopThreads({"traffic.plan": 5.0}, lambda loop, wake_up: None)])
def test_a_worker_that_does_not_run_the_loop_treats_a_message_as_any_other(
    loops: LoopThreads | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_worker, "default", lambda task, app, consumer: "Celery's own")
    consumer = SimpleNamespace(controller=SimpleNamespace(control_loops=loops))
    assert wake_up_strategy(SimpleNamespace(name="fleet.reconcile"), None, consumer) == "Celery's own"


def test_a_consumer_that_fails_in_an_unknown_way_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter([KeyError("a bug"), ValueError("another"), None])
    restarts: list[str] = []

    def start(_: Consumer) -> None:
        if (outcome := next(outcomes)) is not None:
            raise outcome

    monkeypatch.setattr(Consumer, "start", start)
    monkeypatch.setattr(loop_worker, "CONSUME_AGAIN_AFTER_S", 0.0)
    consumer: Any = PersistentConsumer.__new__(PersistentConsumer)
    consumer.blueprint = SimpleNamespace(state=0, restart=lambda _: restarts.append("restarted"))
    consumer.on_close = lambda: restarts.append("cleared")
    consumer.start()
    assert restarts == ["cleared", "restarted"] * 2


def test_a_worker_that_gives_up_says_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    loop_worker._give_up(HangingPass("a pass of fleet.reconcile has not ended in 121 looks"))
    assert ended == [GIVE_UP_STATUS]
    assert "a pass of fleet.reconcile has not ended in 121 looks; this process ends" in caplog.text
