"""Control loops: what must go on whatever else the control plane does. Each runs in a thread of its own, with its own
connection, in the process `controller`; it waits behind no other work.

A loop looks by itself every so often, and at once when its doorbell rang. A doorbell is a mark, not a message: rings
during a pass become one more pass, none can expire, and one that is lost costs one interval. What a pass does is for
its function to know.
"""

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic, thread_time
from typing import Any

from django.conf import settings
from django.db import DatabaseError, close_old_connections, connection, transaction
from django.utils.module_loading import import_string

from kernel.loop_passes import PassBook
from kernel.metrics import TASK_RUNS, TASK_SECONDS
from kernel.request_id import bind_request_id, request_id
from kernel.tracing import span, traceparent

CHANNEL = "switchyard_control_loops"
"""Of PostgreSQL's notifications: they travel with the truth, so the loops need no other server."""
LISTEN_FOR_S = 1.0
WRITE_EVERY_S = 1.0
"""How late it may be known that a pass ended; a loop counts as late after far more."""
SHORTEST_PAUSE_S = 0.05
"""Between two passes of a loop, so that what changes together is seen together."""
PASS_LIMIT_S = 120
"""A pass that takes longer hangs, and only a new process helps: each of its steps has a limit of its own below."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ControlLoop:
    """`run` makes one pass; False says that another process is at it. `every_s` is how often it looks by itself."""

    name: str
    run: Callable[[], bool]
    every_s: float


@dataclass(frozen=True, slots=True)
class Ring:
    """Of which request a doorbell rang."""

    request_id: str = ""
    traceparent: str = ""


def control_loops() -> tuple[ControlLoop, ...]:
    """Those of `settings.CONTROL_LOOPS`."""
    return _loops(settings.CONTROL_LOOPS)


def planner_loops() -> tuple[ControlLoop, ...]:
    """Those of `settings.PLANNER_LOOPS`."""
    return _loops(settings.PLANNER_LOOPS)


def is_control_loop(name: str) -> bool:
    """Whether it is one of any process."""
    return name in settings.CONTROL_LOOPS or name in settings.PLANNER_LOOPS


def _loops(stated: Mapping[str, tuple[str, float]]) -> tuple[ControlLoop, ...]:
    return tuple(ControlLoop(name, import_string(run), every_s) for name, (run, every_s) in stated.items())


def loop_ring(name: str) -> None:
    """Ring the loop's doorbell; in a transaction, once it is committed. It never fails: the loop looks anyway."""
    text = json.dumps({"loop": name, "request_id": request_id(), "traceparent": traceparent()})
    transaction.on_commit(lambda: _notify(text), robust=True)


def _notify(text: str) -> None:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_notify(%s, %s)", [CHANNEL, text])
    except DatabaseError as error:
        log.warning("a doorbell did not ring: %s", error)


def rest_s(took_s: float, computed_s: float) -> float:
    """How long a loop waits after a pass though somebody rings: as long as it computed, and PostgreSQL about as much,
    so that one that is rung without end leaves half of the processor to others. A pass that only waited for its turn
    owes nobody a rest, or a full host would heal at half the pace."""
    return max(SHORTEST_PAUSE_S, min(took_s, 2 * computed_s))


class LoopRunner:
    """Runs one loop until it is told to stop. `ring` may be called by any thread."""

    def __init__(self, loop: ControlLoop, book: PassBook) -> None:
        self.loop = loop
        self._book = book
        self.passes_begun = 0
        self.is_at_work = False
        self._due = threading.Event()
        self._ring = Ring()

    def ring(self, ring: Ring) -> None:
        """Make a pass soon; of several rings the last one names the request."""
        self._ring = ring
        self._due.set()

    def run(self, stopping: threading.Event) -> None:
        """Make passes until `stopping` is set and the loop is rung once more."""
        try:
            while not stopping.is_set():
                self._due.clear()  # before the pass looks: whoever rings from now on gets another one
                began_s = thread_time()
                took_s = self.run_once()
                resting_s = rest_s(took_s, thread_time() - began_s)
                if not stopping.wait(resting_s):
                    self._due.wait(max(0.0, self.loop.every_s - took_s - resting_s))
        finally:
            connection.close()

    def run_once(self) -> float:
        """One pass; returns its seconds. Whatever goes wrong in it is logged, and the next one looks again."""
        began = monotonic()
        ring, self._ring = self._ring, Ring()
        self.passes_begun += 1
        self.is_at_work = True
        try:
            with bind_request_id(ring.request_id), span(self.loop.name, parent=ring.traceparent, kind="consumer"):
                self._pass(began)
            outcome = "success"
        except Exception:
            log.exception("a pass of %s failed", self.loop.name)
            outcome = "failure"
        finally:
            self.is_at_work = False
        took_s = monotonic() - began
        TASK_RUNS.labels(self.loop.name, outcome).inc()
        TASK_SECONDS.labels(self.loop.name).observe(took_s)
        return took_s

    def _pass(self, began: float) -> None:
        close_old_connections()
        try:
            if self.loop.run():
                self._book.note(self.loop.name, monotonic() - began)
        finally:
            close_old_connections()


class HangingPass(Exception):
    pass


class Controller:
    """All loops of this process, and the thread that hears their doorbells."""

    def __init__(self, loops: tuple[ControlLoop, ...], *, pass_limit_s: float = PASS_LIMIT_S) -> None:
        self._book = PassBook()
        self.runners = {loop.name: LoopRunner(loop, self._book) for loop in loops}
        self._pass_limit_looks = int(pass_limit_s / LISTEN_FOR_S)
        self._looks: dict[str, tuple[int, int]] = {}

    def run(self, stopping: threading.Event) -> None:
        """Run until `stopping` is set.

        Raises:
            HangingPass: a pass does not end, so this process is of no use any more.
        """
        threads = [
            threading.Thread(target=runner.run, args=(stopping,), name=name, daemon=True)
            for name, runner in self.runners.items()
        ]
        threads.append(threading.Thread(target=self._write_passes, args=(stopping,), name="passes", daemon=True))
        for thread in threads:
            thread.start()
        while not stopping.is_set():
            try:
                self._listen(stopping)
            except DatabaseError as error:
                log.warning("doorbells are not heard: %s", error)
                stopping.wait(LISTEN_FOR_S)
                self.require_progress()
        for runner in self.runners.values():
            runner.ring(Ring())
        for thread in threads:
            thread.join()
        connection.close()

    def _write_passes(self, stopping: threading.Event) -> None:
        """Write down which passes have ended, of all loops together: it costs as much as of one."""
        try:
            while not stopping.wait(WRITE_EVERY_S):
                close_old_connections()
                try:
                    self._book.write()
                except Exception as error:
                    log.warning("passes are not written down yet: %s", error)
        finally:
            connection.close()

    def _listen(self, stopping: threading.Event) -> None:
        """Pass on what rings, on one connection, until it breaks."""
        connection.close()
        with connection.cursor() as cursor:
            cursor.execute(f"LISTEN {CHANNEL}")
        for runner in self.runners.values():  # for what rang while nobody listened
            runner.ring(Ring())
        while not stopping.is_set():
            with connection.wrap_database_errors:
                for notification in connection.connection.notifies(timeout=LISTEN_FOR_S, stop_after=1):
                    self.hear(notification.payload)
            self.require_progress()

    def hear(self, text: str) -> None:
        """Ring the doorbell that a notification names, if its loop is of this process; others are ignored."""
        try:
            stated: dict[str, Any] = json.loads(text)
            runner = self.runners.get(stated["loop"])
            if runner is None and is_control_loop(stated["loop"]):
                return
            if runner is None:
                raise KeyError(stated["loop"])
            runner.ring(Ring(str(stated.get("request_id", "")), str(stated.get("traceparent", ""))))
        except (ValueError, KeyError, TypeError, AttributeError):
            log.warning("ignored a notification that names no control loop: %.100s", text)

    def require_progress(self) -> None:
        """Look whether passes end. Looks are counted, not seconds: a process that was stopped in the middle of a pass
        has not looked meanwhile, and forgives itself.

        Raises:
            HangingPass: one was found at work in too many looks in a row.
        """
        for name, runner in self.runners.items():
            begun, looks = self._looks.get(name, (0, 0))
            same = runner.is_at_work and begun == runner.passes_begun
            self._looks[name] = (runner.passes_begun, looks + 1 if same else 0)
            if self._looks[name][1] > self._pass_limit_looks:
                raise HangingPass(f"a pass of {name} has not ended in {self._looks[name][1]} looks")
