"""Makes a Celery worker run control loops: `celery worker -Q control` runs those of the queue `control`.

A bootstep of the worker starts a thread for each loop before Celery connects to the broker, so passes are made whether
or not a broker answers. Each pass is a request of the loop's task like any other: Celery's signals, `inspect` and
events show it. A message of the queue only wakes its loop up, and is acknowledged when that pass has ended.

To run a pass, Celery uses no broker: acknowledgements and events go through the worker's main thread."""

import json
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from time import monotonic, sleep, thread_time, time
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
from django.db import DatabaseError, close_old_connections, connection

from kernel.control_loops import CHANNEL, control_loops, is_control_loop, rest_taken
from kernel.loop_passes import PASSES
from kernel.tracing import MESSAGE_HEADER

LISTEN_FOR_S = 1.0
WRITE_EVERY_S = 2.0
"""Delay until other processes see that a pass has ended. A loop counts as late after a much longer time."""
SHORTEST_PAUSE_S = 0.05
"""Between two passes of a loop, so that one pass sees several changes."""
PASS_LIMIT_S = 120
"""A pass that takes longer hangs. Each of its steps has a shorter limit, so only a new process helps."""

log = logging.getLogger(__name__)


def _ignore(*_: Any) -> None:
    return None


@dataclass(frozen=True, slots=True)
class WakeUp:
    """A reason for a pass: the request that caused it, and the Celery message if one did. `acknowledge` and `reject`
    are Celery's callbacks for that message."""

    request_id: str = ""
    traceparent: str = ""
    message: Any = None
    acknowledge: Callable[..., Any] = _ignore
    reject: Callable[..., Any] = _ignore


MakePass = Callable[[str, WakeUp], None]


def rest_s(took_s: float, computed_s: float) -> float:
    """Seconds until the next pass of a loop that has a wake-up already: as long as the pass computed, and PostgreSQL
    took about the same, so a loop that is woken up without end leaves half of the processor to others. A pass that only
    waited needs no rest, or a busy host would heal at half the pace."""
    return max(SHORTEST_PAUSE_S, min(took_s, 2 * computed_s))


class LoopSlot:
    """Makes the passes of one loop, one at a time. Any thread may call `wake`."""

    def __init__(self, loop: str, every_s: float, make_pass: MakePass) -> None:
        self.loop = loop
        self.passes_begun = 0
        self.is_at_work = False
        self._every_s = every_s
        self._make_pass = make_pass
        self._due = threading.Event()
        self._lock = threading.Lock()
        self._waiting = WakeUp()

    def wake(self, wake_up: WakeUp) -> None:
        """Make a pass soon. Of several wake-ups that wait, the last one names the request, and the messages of the
        others are acknowledged: the same pass does their work."""
        replaced = self._exchange(wake_up)
        self._due.set()
        replaced.acknowledge(log, ())

    def _exchange(self, wake_up: WakeUp) -> WakeUp:
        with self._lock:
            waiting, self._waiting = self._waiting, wake_up
        return waiting

    def run(self, stopping: threading.Event) -> None:
        """Make passes until `stopping` is set and the loop is woken up once more."""
        try:
            while not stopping.is_set():
                self._due.clear()  # before the pass reads: a later wake-up causes one more pass
                began_s = thread_time()
                took_s = self.run_once()
                resting_s = rest_s(took_s, thread_time() - began_s)
                if not stopping.wait(resting_s):
                    every_s = max(self._every_s, rest_taken(self.loop))
                    self._due.wait(max(0.0, every_s - took_s - resting_s))
        finally:
            connection.close()

    def run_once(self) -> float:
        """Make one pass and return its seconds. An error is logged, and the next pass tries again."""
        began_s = monotonic()
        wake_up = self._exchange(WakeUp())
        self.passes_begun += 1
        self.is_at_work = True
        try:
            self._make_pass(self.loop, wake_up)
        except Exception:
            log.exception("a pass of %s failed", self.loop)
        finally:
            self.is_at_work = False
        return monotonic() - began_s


class HangingPass(Exception):
    """A pass does not end."""


class LoopThreads:
    """The slots of one worker, and the threads that run them, receive wake-ups and write down when passes ended."""

    def __init__(self, loops: Mapping[str, float], make_pass: MakePass, *, pass_limit_s: float = PASS_LIMIT_S) -> None:
        self.slots = {name: LoopSlot(name, every_s, make_pass) for name, every_s in loops.items()}
        self._pass_limit_looks = int(pass_limit_s / LISTEN_FOR_S)
        self._looks: dict[str, tuple[int, int]] = {}
        self._stopping = threading.Event()
        self._stop_orders: SimpleQueue[None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self, give_up: Callable[[Exception], None]) -> None:
        """Start all threads. `give_up` is called where only a new process helps: if a pass hangs, or if nothing
        would notice that one does."""

        def listen() -> None:
            try:
                self._listen_until_stopped()
            except Exception as error:
                give_up(error)

        threading.Thread(target=self._obey_stop_orders, name="stop", daemon=True).start()
        targets: dict[str, Callable[[], None]] = {"wake-ups": listen, "passes": self._write_passes}
        targets |= {name: partial(slot.run, self._stopping) for name, slot in self.slots.items()}
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for name, run in targets.items()]
        for thread in self._threads:
            thread.start()

    def request_stop(self) -> None:
        """Begin no further pass. Safe in a signal handler: a `SimpleQueue` takes no lock that it could wait for."""
        self._stop_orders.put(None)

    def join(self) -> None:
        """Wait for the passes that run. Call `request_stop` first."""
        for thread in self._threads:
            thread.join()

    def _obey_stop_orders(self) -> None:
        self._stop_orders.get()
        self._stopping.set()
        for slot in self.slots.values():
            slot.wake(WakeUp())

    def _write_passes(self) -> None:
        """Write down which passes have ended, of all loops in one statement."""
        try:
            while not self._stopping.wait(WRITE_EVERY_S):
                close_old_connections()
                try:
                    PASSES.write()
                except Exception as error:
                    log.warning("passes are not written down yet: %s", error)
        finally:
            connection.close()

    def _listen_until_stopped(self) -> None:
        """Receive wake-ups, on a new connection after each database error. Raises HangingPass if a pass does not
        end."""
        try:
            while not self._stopping.is_set():
                try:
                    self._listen()
                except DatabaseError as error:
                    log.warning("no wake-ups are received: %s", error)
                    self._stopping.wait(LISTEN_FOR_S)
                    self.require_progress()
        finally:
            connection.close()

    def _listen(self) -> None:
        connection.close()
        with connection.cursor() as cursor:
            cursor.execute(f"LISTEN {CHANNEL}")
        for slot in self.slots.values():  # notifications may have been sent before this connection listened
            slot.wake(WakeUp())
        arrived = select.poll()
        arrived.register(connection.connection.fileno(), select.POLLIN)
        while not self._stopping.is_set():
            arrived.poll(LISTEN_FOR_S * 1000)  # psycopg itself waits in steps of 0.1 s
            with connection.wrap_database_errors:
                for notification in connection.connection.notifies(timeout=0):
                    self.hear(notification.payload)
            self.require_progress()

    def hear(self, text: str) -> None:
        """Wake up the loop that a notification names, if it runs here."""
        try:
            stated: dict[str, Any] = json.loads(text)
            loop = stated["loop"]
            if loop in self.slots:
                cause = WakeUp(str(stated.get("request_id", "")), str(stated.get("traceparent", "")))
                self.slots[loop].wake(cause)
            elif not is_control_loop(loop):
                raise KeyError(loop)
        except (ValueError, KeyError, TypeError, AttributeError):
            log.warning("ignored a notification that names no control loop: %.100s", text)

    def require_progress(self) -> None:
        """Check that passes end. It counts checks, not seconds: a process that was stopped in the middle of a pass has
        made no checks meanwhile, so its own sleep is not held against the pass. Raises HangingPass if the same pass was
        running in too many checks in a row."""
        for name, slot in self.slots.items():
            begun, looks = self._looks.get(name, (0, 0))
            same = slot.is_at_work and begun == slot.passes_begun
            self._looks[name] = (slot.passes_begun, looks + 1 if same else 0)
            if self._looks[name][1] > self._pass_limit_looks:
                raise HangingPass(f"a pass of {name} has not ended in {self._looks[name][1]} looks")


PUBLISH_EVENTS_EVERY_S = 2.0
EVENTS_KEPT = 1000
"""While the broker does not answer: two minutes of the loops of a control plane."""
CONSUME_AGAIN_AFTER_S = 1.0
GIVE_UP_STATUS = os.EX_SOFTWARE
CLOSE_WITHIN_S = 2.0
"""For Celery to close its connections once a stop was requested and the last pass has ended."""
_NO_ARGUMENTS: tuple[tuple[()], dict[str, Any], dict[str, Any]] = ((), {}, {})


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
