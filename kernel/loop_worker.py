"""Makes a Celery worker run control loops: `celery worker -Q control` runs those of the queue `control`.

A bootstep of the worker starts a thread for each loop before Celery connects to the broker, so passes are made whether
or not a broker answers. Each pass is a request of the loop's task like any other: Celery's signals, `inspect` and
events show it. A message of the queue only wakes its loop up, and is acknowledged when that pass has ended.

To run a pass, Celery uses no broker: acknowledgements and events go through the worker's main thread.
"""

import logging
import os
import threading
from collections import deque
from time import monotonic, sleep, time
from types import SimpleNamespace
from typing import Any

from celery import bootsteps, signals
from celery.app.trace import build_tracer
from celery.concurrency import get_implementation
from celery.utils import uuid
from celery.worker import state
from celery.worker.consumer.consumer import STOP_CONDITIONS, Consumer  # type: ignore[attr-defined]
from celery.worker.request import Request
from celery.worker.strategy import default

from kernel.control_loops import control_loops
from kernel.loop_threads import LoopThreads, WakeUp
from kernel.request_id import MESSAGE_HEADER

PUBLISH_EVENTS_EVERY_S = 2.0
EVENTS_KEPT = 1000
"""While the broker does not answer: two minutes of the loops of a control plane."""
HEARTBEAT_EVERY_S = 10.0
"""For monitors alone; Celery's 2 s cost a third of a millisecond of processor each second."""
CONSUME_AGAIN_AFTER_S = 1.0
GIVE_UP_STATUS = os.EX_SOFTWARE
CLOSE_WITHIN_S = 2.0
"""For Celery to close its connections once a stop was requested and the last pass has ended."""
_NO_ARGUMENTS: tuple[tuple[()], dict[str, Any], dict[str, Any]] = ((), {}, {})

log = logging.getLogger(__name__)


class ControlLoops(bootsteps.StartStopStep):
    """Runs the control loops of the queues that the worker consumes; a worker of other queues is left alone."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        self._worker = worker
        self._loops = control_loops(worker.app.amqp.queues.consume_from)
        worker.control_loops = None
        self.events = PassEvents(worker)
        if self._loops:
            # This pool runs a request in the thread that submits it: here the thread of the loop.
            worker.pool_cls = get_implementation("solo")
            worker.concurrency = len(self._loops)  # prefetch one message for each loop
            worker.consumer_cls = "kernel.loop_worker:PersistentConsumer"
            worker.options["heartbeat_interval"] = HEARTBEAT_EVERY_S
            worker.control_loops = self.threads = LoopThreads(self._loops, self._make_pass)

    def include_if(self, worker: Any) -> bool:
        return bool(self._loops)

    def start(self, worker: Any) -> None:
        app = worker.app
        for name in self._loops:  # Celery does this only once it has a broker
            app.tasks[name].__trace__ = build_tracer(name, app.tasks[name], app.loader, worker.hostname, app=app)
        signals.worker_shutting_down.connect(self._shutting_down, weak=False)
        self.threads.start(_give_up)
        threading.Thread(target=self._end_in_time, name="end", daemon=True).start()

    def _end_in_time(self) -> None:
        """A broker that hangs holds up Celery's own way out for as long as it hangs."""
        self.threads.join()
        sleep(CLOSE_WITHIN_S)
        os._exit(0)

    def _shutting_down(self, **_: Any) -> None:
        self.threads.request_stop()

    def stop(self, worker: Any) -> None:
        """Wait for the passes that run; they release their leases."""
        self.threads.request_stop()
        self.threads.join()

    def terminate(self, worker: Any) -> None:
        """End without waiting. Leases run out."""
        self.threads.request_stop()

    def register_with_event_loop(self, worker: Any, hub: Any) -> None:
        """Called for each new connection to the broker."""
        hub.timer.call_repeatedly(PUBLISH_EVENTS_EVERY_S, self.events.publish)

    def _make_pass(self, loop: str, wake_up: WakeUp) -> None:
        self._request(loop, wake_up).execute_using_pool(self._worker.pool)

    def _request(self, loop: str, wake_up: WakeUp) -> Request:
        app = self._worker.app
        if wake_up.message is None:
            headers = {"task": loop, "id": uuid(), "lang": "py", "argsrepr": "()", "kwargsrepr": "{}"}
            headers |= {MESSAGE_HEADER: wake_up.request_id, "traceparent": wake_up.traceparent}
            message: Any = SimpleNamespace(delivery_info={}, properties={})
            parts: dict[str, Any] = {"headers": headers, "body": _NO_ARGUMENTS, "decoded": True}
        else:
            message = wake_up.message
            parts = {"headers": message.headers, "body": message.body, "decoded": False}
        request = Request(
            message,
            on_ack=wake_up.acknowledge,
            on_reject=wake_up.reject,
            app=app,
            task=app.tasks[loop],
            hostname=self._worker.hostname,
            eventer=self.events,
            **parts,
        )
        request.send_event("task-received", name=loop, args="()", kwargs="{}", retries=0)
        return request


def _give_up(reason: Exception) -> None:
    """End this process, which can do nothing for its loops any more; its supervisor starts another one."""
    log.critical("%s; this process ends, so that another one continues", reason, exc_info=reason)
    os._exit(GIVE_UP_STATUS)


class PassEvents:
    """Events of passes for monitors such as Flower. Loops' threads add them; the worker's main thread publishes them
    when it has a broker. Request objects use it as their event dispatcher."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._waiting: deque[tuple[str, dict[str, Any]]] = deque(maxlen=EVENTS_KEPT)

    @property
    def enabled(self) -> bool:
        dispatcher = self._worker.consumer.event_dispatcher
        return bool(dispatcher and dispatcher.enabled and (not dispatcher.groups or "task" in dispatcher.groups))

    def send(self, kind: str, **fields: Any) -> None:
        self._waiting.append((kind, {"timestamp": time(), **fields}))

    def publish(self) -> None:
        """Hand over what waits. Celery sends it as one message."""
        dispatcher = self._worker.consumer.event_dispatcher
        if not dispatcher:
            return
        dispatcher.buffer_limit = EVENTS_KEPT
        while self._waiting:
            kind, fields = self._waiting.popleft()
            dispatcher.send(kind, **fields)


def wake_up_strategy(task: Any, app: Any, consumer: Any) -> Any:
    """What a worker does with a message for a control loop: wake the loop up, if it runs here."""
    threads = getattr(consumer.controller, "control_loops", None)
    if threads is None or task.name not in threads.slots:
        return default(task, app, consumer)
    slot = threads.slots[task.name]

    def wake(message: Any, body: Any, acknowledge: Any, reject: Any, callbacks: Any) -> None:
        slot.wake(WakeUp(message=message, acknowledge=acknowledge, reject=reject))

    return wake


class PersistentConsumer(Consumer):
    """Celery's consumer ends the worker at an error that it does not expect from a broker. Here it connects again."""

    def start(self) -> None:
        while True:
            try:
                super().start()
                return
            except Exception:
                if self.blueprint.state in STOP_CONDITIONS:
                    raise
                log.exception("messages of the broker cannot be received; connecting again")
            began_s = monotonic()
            while monotonic() - began_s < CONSUME_AGAIN_AFTER_S:
                state.maybe_shutdown()
                sleep(0.1)
            self.on_close()
            self.blueprint.restart(self)
