"""The threads of a worker that runs control loops: one for each loop, with its own database connection, so that no
loop waits for another one. A further thread receives wake-ups and checks that passes end.

Nothing here uses the broker, so nothing here depends on it. How a pass is made is up to the caller.
"""

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from time import monotonic, thread_time
from typing import Any

from django.db import DatabaseError, close_old_connections, connection

from kernel.control_loops import CHANNEL, is_control_loop
from kernel.loop_passes import PASSES

LISTEN_FOR_S = 1.0
WRITE_EVERY_S = 1.0
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
                    self._due.wait(max(0.0, self._every_s - took_s - resting_s))
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
        """Receive wake-ups, on a new connection after each database error.

        Raises:
            HangingPass: a pass does not end.
        """
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
        while not self._stopping.is_set():
            with connection.wrap_database_errors:
                for notification in connection.connection.notifies(timeout=LISTEN_FOR_S, stop_after=1):
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
        made no checks meanwhile, so its own sleep is not held against the pass.

        Raises:
            HangingPass: the same pass was running in too many checks in a row.
        """
        for name, slot in self.slots.items():
            begun, looks = self._looks.get(name, (0, 0))
            same = slot.is_at_work and begun == slot.passes_begun
            self._looks[name] = (slot.passes_begun, looks + 1 if same else 0)
            if self._looks[name][1] > self._pass_limit_looks:
                raise HangingPass(f"a pass of {name} has not ended in {self._looks[name][1]} looks")
