"""Each loop runs in its thread whenever its interval is over. Wake-ups only hurry it, and coalesce."""

import threading
from collections.abc import Iterator

import pytest
from django.db import connection, transaction

from kernel import wake_ups
from kernel.control_loops import CHANNEL, rest_loop
from kernel.loop_passes import PASSES, control_standing
from kernel.loop_worker import SHORTEST_PAUSE_S, HangingPass, LoopSlot, LoopThreads, WakeUp, rest_s
from kernel.tracing import bind_request_id
from tests.controlplane.embedded.processes import eventually

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0
NEVER_S = 3600.0
LOOP = "fleet.reconcile"


class Passes:
    """Counts passes. While `go_on` is not set, a pass does not end."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, loop: str, wake_up: WakeUp) -> None:
        self.made.append(wake_up.request_id)
        self.begun.release()
        assert self.go_on.wait(DEADLINE_S)

    def wait(self) -> None:
        assert self.begun.acquire(timeout=DEADLINE_S)


@pytest.fixture
def passes() -> Passes:
    return Passes()


@pytest.fixture
def stopping() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def fail_test(reason: Exception) -> None:
    raise reason


def someone_listens() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE query = %s", [f"LISTEN {CHANNEL}"])
        return bool(cursor.fetchone()[0])


def stop(threads: LoopThreads) -> None:
    threads.request_stop()
    threads.join()


@pytest.mark.django_db(transaction=True)
def test_a_loop_runs_again_and_again_without_a_wake_up(passes: Passes) -> None:
    threads = LoopThreads({LOOP: 0.1}, passes)
    threads.start(fail_test)
    for _ in range(4):
        passes.wait()
    stop(threads)


@pytest.mark.django_db(transaction=True)
def test_a_loop_waits_for_no_other_one() -> None:
    hangs, goes_on = Passes(), Passes()
    hangs.go_on.clear()
    threads = LoopThreads(
        {"a": NEVER_S, "b": 0.05}, lambda loop, wake_up: {"a": hangs, "b": goes_on}[loop](loop, wake_up)
    )
    threads.start(fail_test)
    hangs.wait()
    for _ in range(4):
        goes_on.wait()
    hangs.go_on.set()
    stop(threads)


@pytest.mark.django_db(transaction=True)
def test_a_wake_up_follows_the_commit_with_the_number_of_its_request(passes: Passes) -> None:
    threads = LoopThreads({LOOP: NEVER_S}, passes)
    threads.start(fail_test)
    passes.wait()  # the first pass; a second one follows if the thread begins to listen later
    assert eventually(someone_listens, within_s=DEADLINE_S)
    with bind_request_id("r-1"), transaction.atomic():
        wake_ups.send(LOOP)
        assert "r-1" not in passes.made
    while "r-1" not in passes.made:
        passes.wait()
    stop(threads)


@pytest.mark.django_db(transaction=True)
def test_a_pass_may_state_a_longer_interval_once_and_a_wake_up_ends_it(
    passes: Passes, stopping: threading.Event
) -> None:
    slot = LoopSlot(LOOP, 0.0, passes)
    rest_loop(LOOP, NEVER_S)
    thread = threading.Thread(target=slot.run, args=(stopping,))
    thread.start()
    passes.wait()
    slot.wake(WakeUp(request_id="woken"))
    passes.wait()
    passes.wait()  # the rest was for one time
    stopping.set()
    slot.wake(WakeUp())
    thread.join(DEADLINE_S)
    assert passes.made[1] == "woken"


@pytest.mark.django_db(transaction=True)
def test_many_wake_ups_during_a_pass_become_one_more(passes: Passes, stopping: threading.Event) -> None:
    slot = LoopSlot(LOOP, NEVER_S, passes)
    passes.go_on.clear()
    thread = threading.Thread(target=slot.run, args=(stopping,))
    thread.start()
    passes.wait()
    for number in range(1000):
        slot.wake(WakeUp(request_id=f"r-{number}"))
    passes.go_on.set()
    passes.wait()
    assert passes.made[1] == "r-999"
    stopping.set()
    slot.wake(WakeUp())
    thread.join(DEADLINE_S)
    assert len(passes.made) <= 3


@pytest.mark.django_db(transaction=True)
def test_a_message_that_another_wake_up_replaces_is_acknowledged_and_the_last_one_goes_with_the_pass() -> None:
    acknowledged: list[str] = []
    given: list[WakeUp] = []
    slot = LoopSlot(LOOP, NEVER_S, lambda loop, wake_up: given.append(wake_up))
    for name in ("first", "second", "third"):
        slot.wake(WakeUp(message=name, acknowledge=lambda *_, name=name: acknowledged.append(name)))
    assert acknowledged == ["first", "second"]
    slot.run_once()
    assert [wake_up.message for wake_up in given] == ["third"]
    assert acknowledged == ["first", "second"], "the pass itself acknowledges the message that it got"


@pytest.mark.django_db(transaction=True)
def test_a_pass_that_fails_is_followed_by_the_next() -> None:
    made = threading.Semaphore(0)

    def fails(loop: str, wake_up: WakeUp) -> None:
        made.release()
        raise RuntimeError("a bug")

    threads = LoopThreads({LOOP: 0.05}, fails)
    threads.start(fail_test)
    assert all(made.acquire(timeout=DEADLINE_S) for _ in range(3))
    stop(threads)


@pytest.mark.django_db(transaction=True)
def test_the_passes_of_all_loops_are_written_down() -> None:
    threads = LoopThreads({"of ours 1": 0.1, "of ours 2": 0.1}, lambda loop, wake_up: PASSES.note(loop, 0.0))
    threads.start(fail_test)
    assert eventually(
        lambda: {"of ours 1", "of ours 2"} <= {loop.loop for loop in control_standing().loops}, within_s=DEADLINE_S
    )
    stop(threads)


def test_a_loop_that_is_woken_up_without_end_leaves_half_of_the_time_to_others() -> None:
    assert rest_s(took_s=2.0, computed_s=1.0) == 2.0
    assert rest_s(took_s=2.0, computed_s=2.0) == 2.0
    assert rest_s(took_s=0.0, computed_s=0.0) == SHORTEST_PAUSE_S


def test_a_pass_that_only_waited_is_followed_by_the_next() -> None:
    assert rest_s(took_s=15.0, computed_s=0.2) == pytest.approx(0.4)
    assert rest_s(took_s=15.0, computed_s=0.0) == SHORTEST_PAUSE_S


def test_a_pass_that_hangs_is_found_by_checks_and_a_process_that_was_stopped_made_none(passes: Passes) -> None:
    threads = LoopThreads({LOOP: NEVER_S}, passes, pass_limit_s=3.0)
    slot = threads.slots[LOOP]
    slot.is_at_work, slot.passes_begun = True, 1
    for _ in range(4):  # however long each took: a stopped process makes no checks
        threads.require_progress()
    with pytest.raises(HangingPass, match=r"fleet\.reconcile has not ended in 4 looks"):
        threads.require_progress()


def test_passes_that_go_on_are_never_taken_for_one_that_hangs(passes: Passes) -> None:
    threads = LoopThreads({LOOP: NEVER_S}, passes, pass_limit_s=3.0)
    slot = threads.slots[LOOP]
    for number in range(20):
        slot.is_at_work, slot.passes_begun = True, number
        threads.require_progress()


@pytest.mark.django_db(transaction=True)
def test_a_pass_that_hangs_ends_the_process_with_its_reason(passes: Passes) -> None:
    reasons: list[Exception] = []
    given_up = threading.Event()

    def give_up(reason: Exception) -> None:
        reasons.append(reason)
        given_up.set()

    passes.go_on.clear()
    threads = LoopThreads({LOOP: NEVER_S}, passes, pass_limit_s=1.0)
    threads.start(give_up)
    assert given_up.wait(DEADLINE_S)
    assert isinstance(reasons[0], HangingPass)
    passes.go_on.set()
    stop(threads)


@pytest.mark.parametrize("text", ["", "no json", "[]", '"x"', '{"loop": "unknown"}', '{"loop": ["a"]}', "{}"])
def test_a_notification_that_names_no_loop_is_ignored(
    text: str, passes: Passes, caplog: pytest.LogCaptureFixture
) -> None:
    LoopThreads({LOOP: NEVER_S}, passes).hear(text)
    assert "names no control loop" in caplog.text


def test_a_wake_up_of_another_worker_is_left_to_it(passes: Passes, caplog: pytest.LogCaptureFixture) -> None:
    LoopThreads({LOOP: NEVER_S}, passes).hear('{"loop": "traffic.plan"}')
    assert not caplog.text
