"""Control loops go on whatever waits elsewhere: they look by themselves; a doorbell is a mark that cannot expire."""

import threading
from collections.abc import Iterator

import pytest
from django.db import connection, transaction

from kernel import hints
from kernel.control_loops import (
    CHANNEL,
    SHORTEST_PAUSE_S,
    Controller,
    ControlLoop,
    HangingPass,
    LoopRunner,
    Ring,
    control_loops,
    planner_loops,
    rest_s,
)
from kernel.loop_passes import PassBook, control_standing
from kernel.request_id import bind_request_id, request_id
from tests.controlplane.embedded.processes import eventually

DEADLINE_S = 60.0


def controller(run: "Passes", *, name: str = "fleet.reconcile", every_s: float = 3600.0) -> Controller:
    return Controller((ControlLoop(name, run, every_s),), pass_limit_s=3.0)


class Passes:
    """Counts passes, and keeps each until it is let go."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self) -> bool:
        self.made.append(request_id())
        self.begun.release()
        assert self.go_on.wait(DEADLINE_S)
        return True

    def wait(self) -> None:
        assert self.begun.acquire(timeout=DEADLINE_S)


@pytest.fixture
def stopping() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def start(what: LoopRunner | Controller, stopping: threading.Event) -> threading.Thread:
    thread = threading.Thread(target=what.run, args=(stopping,))
    thread.start()
    return thread


def someone_listens() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE query = %s", [f"LISTEN {CHANNEL}"])
        return bool(cursor.fetchone()[0])


@pytest.mark.django_db(transaction=True)
def test_a_loop_looks_by_itself_while_nobody_rings(stopping: threading.Event) -> None:
    passes = Passes()
    thread = start(controller(passes, every_s=0.1), stopping)
    for _ in range(4):
        passes.wait()
    stopping.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


@pytest.mark.django_db(transaction=True)
def test_a_doorbell_rings_after_the_commit_with_the_number_of_its_request(stopping: threading.Event) -> None:
    passes = Passes()
    thread = start(controller(passes), stopping)
    passes.wait()  # its first look; a second one follows if it begins to listen later
    assert eventually(someone_listens, within_s=DEADLINE_S)
    with bind_request_id("r-1"), transaction.atomic():
        hints.ring("fleet.reconcile")
        assert "r-1" not in passes.made
    while "r-1" not in passes.made:
        passes.wait()
    stopping.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


@pytest.mark.django_db(transaction=True)
def test_many_rings_during_a_pass_become_one_more(stopping: threading.Event) -> None:
    passes = Passes()
    runner = LoopRunner(ControlLoop("fleet.reconcile", passes, 3600.0), PassBook())
    passes.go_on.clear()
    thread = start(runner, stopping)
    passes.wait()
    for number in range(1000):
        runner.ring(Ring(request_id=f"r-{number}"))
    passes.go_on.set()
    passes.wait()
    assert passes.made[1] == "r-999"
    stopping.set()
    runner.ring(Ring())
    thread.join(DEADLINE_S)
    assert len(passes.made) <= 3


@pytest.mark.django_db(transaction=True)
def test_a_pass_that_fails_is_followed_by_the_next_and_counts_as_none(stopping: threading.Event) -> None:
    made = threading.Semaphore(0)

    def fails() -> bool:
        made.release()
        raise RuntimeError("a bug")

    book = PassBook()
    before = control_standing().loops
    thread = start(LoopRunner(ControlLoop("fleet.reconcile", fails, 0.05), book), stopping)
    assert all(made.acquire(timeout=DEADLINE_S) for _ in range(3))
    stopping.set()
    thread.join(DEADLINE_S)
    book.write()
    assert {loop.loop for loop in control_standing().loops} == {loop.loop for loop in before}


@pytest.mark.django_db(transaction=True)
def test_a_whole_pass_is_written_down_and_one_that_another_process_makes_is_not() -> None:
    before, book = {loop.loop for loop in control_standing().loops}, PassBook()
    LoopRunner(ControlLoop("of another", lambda: False, 1.0), book).run_once()
    LoopRunner(ControlLoop("of ours", lambda: True, 1.0), book).run_once()
    book.write()
    assert {loop.loop for loop in control_standing().loops} - before == {"of ours"}


@pytest.mark.django_db(transaction=True)
def test_a_controller_writes_down_the_passes_of_all_its_loops(stopping: threading.Event) -> None:
    loops = tuple(ControlLoop(name, lambda: True, 0.1) for name in ("of ours 1", "of ours 2"))
    thread = start(Controller(loops), stopping)
    assert eventually(
        lambda: {"of ours 1", "of ours 2"} <= {loop.loop for loop in control_standing().loops}, within_s=DEADLINE_S
    )
    stopping.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_a_loop_that_is_rung_without_end_leaves_half_of_the_time_to_others() -> None:
    assert rest_s(took_s=2.0, computed_s=1.0) == 2.0
    assert rest_s(took_s=2.0, computed_s=2.0) == 2.0
    assert rest_s(took_s=0.0, computed_s=0.0) == SHORTEST_PAUSE_S


def test_a_pass_that_only_waited_for_its_turn_is_followed_by_the_next() -> None:
    assert rest_s(took_s=15.0, computed_s=0.2) == pytest.approx(0.4)
    assert rest_s(took_s=15.0, computed_s=0.0) == SHORTEST_PAUSE_S


def test_a_pass_that_hangs_ends_the_process_and_a_process_that_was_stopped_forgives_itself() -> None:
    passes = Passes()
    own = controller(passes)
    runner = own.runners["fleet.reconcile"]
    runner.is_at_work, runner.passes_begun = True, 1
    for _ in range(4):  # it does not matter how long each took: a stopped process makes no looks
        own.require_progress()
    with pytest.raises(HangingPass, match=r"fleet\.reconcile has not ended in 4 looks"):
        own.require_progress()


def test_passes_that_go_on_are_never_taken_for_one_that_hangs() -> None:
    own = controller(Passes())
    runner = own.runners["fleet.reconcile"]
    for number in range(20):
        runner.is_at_work, runner.passes_begun = True, number
        own.require_progress()


@pytest.mark.parametrize("text", ["", "no json", "[]", '"x"', '{"loop": "unknown"}', '{"loop": ["a"]}', "{}"])
def test_a_notification_that_names_no_loop_is_ignored(text: str, caplog: pytest.LogCaptureFixture) -> None:
    controller(Passes()).hear(text)
    assert "names no control loop" in caplog.text


def test_the_loops_of_this_control_plane() -> None:
    named = {loop.name for loop in control_loops()}
    traffic = {"publish", "autopilot", "autoscale", "entry", "ensure_ingresses"}
    assert named == {"fleet.reconcile", "fleet.provision", "fleet.agents", "fleet.cloud", "fleet.send_webhooks"} | {
        f"traffic.{name}" for name in traffic
    }


def test_the_loops_of_the_planner() -> None:
    assert {loop.name for loop in planner_loops()} == {"traffic.demand", "traffic.plan"}


def test_a_doorbell_of_another_process_is_left_to_it(caplog: pytest.LogCaptureFixture) -> None:
    controller(Passes()).hear('{"loop": "traffic.plan"}')
    assert not caplog.text


def test_no_message_asks_for_a_control_loop() -> None:
    from controlplane.celery import app

    app.loader.import_default_modules()
    assert not {loop.name for loop in control_loops()} & set(app.tasks)
    assert not {loop.name for loop in control_loops()} & {row["task"] for row in app.conf.beat_schedule.values()}
