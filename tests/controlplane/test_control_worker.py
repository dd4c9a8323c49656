"""The worker of the queue `control`, as `make up` starts it: it makes passes whether or not there is a broker, shows
them to `celery inspect`, and whatever ends it leaves nothing stuck."""

import contextlib
import os
import signal
import socketserver
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
from celery import Celery
from django.conf import settings as django_settings
from django.db import connection, transaction

from controlplane.celery import app
from controlplane.embedded import control_plane
from controlplane.embedded.configuration import read_configuration
from controlplane.embedded.servers import binary
from fleet.reconcile.services import LEASE
from kernel import clock
from kernel.control_loops import control_loops
from kernel.leases import lease_held_since
from kernel.models import LoopPass
from tests.controlplane.embedded.processes import eventually
from tests.docs.pages import ROOT
from tests.ports import free_port

pytestmark = [pytest.mark.processes, pytest.mark.django_db(transaction=True)]

DEADLINE_S = 120.0
LOOPS = control_loops(["control"])
FREQUENT = {name for name, every_s in LOOPS.items() if every_s <= 2.0}


class Broker:
    """A port: no server listens on it, or a Valkey, or one that answers nonsense."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.valkey: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--loglevel", "warning"]
        self.valkey = subprocess.Popen([str(binary()), *options], stdout=subprocess.DEVNULL)
        assert eventually(self._answers, within_s=DEADLINE_S)

    def _answers(self) -> bool:
        try:
            return bool(self.client().ping())
        except redis.RedisError:
            return False

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=5.0)

    def signal(self, number: signal.Signals) -> None:
        assert self.valkey is not None
        self.valkey.send_signal(number)

    def kill(self) -> None:
        if self.valkey is not None:
            self.valkey.kill()
            self.valkey.wait()

    @contextmanager
    def talking_nonsense(self) -> Iterator[threading.Event]:
        """The event is set after the first answer."""
        answered = threading.Event()

        class Nonsense(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                while self.request.recv(65536):
                    self.request.sendall(b"-MISCONF what is this?\r\n*-7\r\n")
                    answered.set()

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = daemon_threads = True

        with Server(("127.0.0.1", self.port), Nonsense) as server:
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            yield answered
            server.shutdown()


@pytest.fixture
def broker() -> Iterator[Broker]:
    broker = Broker()
    yield broker
    broker.kill()


class Worker:
    """One that runs as `make up` runs it."""

    def __init__(self, broker: Broker, folder: Path) -> None:
        self._broker = broker
        url = urlsplit(os.environ["DATABASE_URL"])._replace(path=f"/{connection.settings_dict['NAME']}").geturl()
        self.environment = {
            **os.environ,
            "DATABASE_URL": url,
            "REDIS_URL": broker.url,
            "SWITCHYARD_HOME": str(folder / "home"),
            "SWITCHYARD_CACHE": str(folder / "cache"),
            "SWITCHYARD_SECRET_KEY": django_settings.SECRET_KEY,
        }
        self._log = folder / "controller.log"
        program = control_plane.service("controller", read_configuration({}), self.environment).program
        with self._log.open("ab") as output:
            self.process = subprocess.Popen(
                program.arguments, env=dict(program.environment), cwd=ROOT, stdout=output, stderr=output
            )

    @property
    def log(self) -> str:
        return self._log.read_text()[-5000:]

    def require_passes(self, loops: Collection[str] = FREQUENT) -> None:
        """Each of the loops makes one more whole pass."""
        from_now = clock.now()

        def without() -> set[str]:
            return set(loops) - set(LoopPass.objects.filter(passed_at__gt=from_now).values_list("loop", flat=True))

        assert eventually(lambda: not without(), within_s=DEADLINE_S), f"no pass of {without()}: {self.log}"
        assert self.process.poll() is None, self.log

    def queues(self) -> dict[str, list[str]]:
        """The queues that the worker returns to `celery inspect active_queues`, by its name."""
        inspecting = Celery("inspecting", broker=self._broker.url, set_as_current=False)
        inspecting.conf.broker_transport_options = app.conf.broker_transport_options
        with inspecting, inspecting.connection_for_write() as link:
            shown = inspecting.control.inspect(timeout=10.0, limit=1, connection=link).active_queues() or {}
        return {name.partition("@")[0]: [queue["name"] for queue in queues] for name, queues in shown.items()}


@pytest.fixture
def start(broker: Broker, tmp_path: Path) -> Iterator[Callable[[], Worker]]:
    started: list[Worker] = []

    def start() -> Worker:
        started.append(Worker(broker, tmp_path))
        return started[-1]

    yield start
    for worker in started:
        worker.process.kill()
        worker.process.wait()


def someone_waits_for_a_lock() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
        return bool(cursor.fetchone()[0])


def test_passes_go_on_whatever_the_broker_does(broker: Broker, start: Callable[[], Worker]) -> None:
    worker = start()
    worker.require_passes(LOOPS)  # no broker has ever answered
    broker.start()

    def control_is_shown() -> bool:
        return worker.queues() == {"controller": ["control"]}

    assert eventually(control_is_shown, within_s=DEADLINE_S), worker.log
    broker.signal(signal.SIGSTOP)
    worker.require_passes()
    broker.kill()
    worker.require_passes()
    with broker.talking_nonsense() as answered:
        assert answered.wait(DEADLINE_S), worker.log
        worker.require_passes()
    broker.start()
    assert eventually(control_is_shown, within_s=DEADLINE_S), worker.log


def test_messages_wake_loops_up_and_are_acknowledged_and_monitors_receive_the_events_of_passes(
    broker: Broker, start: Callable[[], Worker]
) -> None:
    broker.start()
    worker = start()
    with app.connection_for_write(broker.url) as link:
        for _ in range(50):
            app.send_task("fleet.reconcile", connection=link)
    assert broker.client().llen("switchyard:control") == 50
    worker.require_passes()

    def all_acknowledged() -> bool:
        client = broker.client()
        return not client.llen("switchyard:control") and not client.hlen("switchyard:unacked")

    assert eventually(all_acknowledged, within_s=DEADLINE_S), worker.log
    succeeded: set[str] = set()
    names: dict[str, str] = {}

    with app.connection_for_read(broker.url) as link:
        receiver = app.events.Receiver(
            link,
            handlers={
                "task-received": lambda event: names.update({event["uuid"]: event["name"]}),
                "task-succeeded": lambda event: succeeded.add(names.get(event["uuid"], "")),
            },
        )

        def all_shown() -> bool:
            with contextlib.suppress(TimeoutError):
                receiver.capture(limit=10, timeout=1.0)
            return succeeded >= FREQUENT

        assert eventually(all_shown, within_s=DEADLINE_S), worker.log


def test_a_killed_worker_leaves_nothing_stuck_and_a_stopped_one_frees_the_leases_of_its_passes(
    broker: Broker, start: Callable[[], Worker]
) -> None:
    broker.start()
    first = start()
    first.require_passes()
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("LOCK TABLE fleet_region IN ACCESS EXCLUSIVE MODE")
        assert eventually(lambda: lease_held_since(name=LEASE, now=clock.now()) is not None, within_s=DEADLINE_S)
        assert eventually(someone_waits_for_a_lock, within_s=DEADLINE_S)
        first.process.kill()
        first.process.wait()
    second = start()
    second.require_passes(LOOPS)
    assert_ends_cleanly(second)


@pytest.mark.long
@pytest.mark.parametrize("hangs", [False, True])
def test_a_worker_stops_cleanly_without_a_broker_or_while_it_hangs(
    hangs: bool, broker: Broker, start: Callable[[], Worker]
) -> None:
    if hangs:
        broker.start()
    worker = start()
    worker.require_passes()
    if hangs:
        assert eventually(lambda: "controller" in worker.queues(), within_s=DEADLINE_S), worker.log
        broker.signal(signal.SIGSTOP)
    assert_ends_cleanly(worker)


def assert_ends_cleanly(worker: Worker) -> None:
    worker.process.terminate()
    assert worker.process.wait(DEADLINE_S) == 0, worker.log
    assert lease_held_since(name=LEASE, now=clock.now()) is None
