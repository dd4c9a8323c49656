"""Where the tasks of a unit are started, when again, and what their states prove."""

from datetime import UTC, datetime, timedelta

import pytest

from fleet.capacity.planning.pools import LaunchOutcome
from fleet.clouds.planning.tasks import (
    STARTED_BY_MOST,
    Cancelled,
    ContainerInstance,
    End,
    FindTasks,
    Keep,
    NoRoom,
    Started,
    StartUnit,
    TaskAttempt,
    TaskSeen,
    WaitFor,
    after_answers,
    after_search,
    choose_instances,
    next_task_step,
    outcome_of_failures,
    started_by_of,
    task_status,
)
from fleet.reconcile.planning.snapshot import ProviderStatus

NOW = datetime(2027, 1, 1, tzinfo=UTC)
TYPE = "trn1.32xlarge"
ATTEMPT = TaskAttempt(1, 2, NOW)
LATE = NOW + timedelta(seconds=61)


def instance(name: str, *path: str, **columns: object) -> ContainerInstance:
    return ContainerInstance(name, f"i-{name}", TYPE, "us-east-1a", path, **columns)  # type: ignore[arg-type]


def names(chosen: tuple[ContainerInstance, ...] | NoRoom) -> str:
    assert not isinstance(chosen, NoRoom), chosen.reason
    return "".join(one.arn for one in chosen)


SPREAD = [
    instance("a", "z1", "n1", "n11"),
    instance("b", "z1", "n2", "n21"),
    instance("c", "z1", "n1", "n12"),
    instance("d", "z2", "n3", "n31"),
    instance("e", "z1", "n2", "n21"),
]


@pytest.mark.parametrize(
    ("count", "near", "taken", "expected"),
    [
        (1, (), "", "a"),
        (2, (), "", "be"),
        (2, (), "b", "ac"),
        (2, ("z1", "n1"), "", "ac"),
        (1, ("z2",), "", "d"),
        (1, ("z1", "n2", "n21"), "b", "e"),
        (4, (), "", "acbe"),
        (5, (), "", "acbed"),
    ],
)
def test_a_unit_is_placed_under_the_smallest_network_node_that_has_room(
    count: int, near: tuple[str, ...], taken: str, expected: str
) -> None:
    assert names(choose_instances(TYPE, count, near, SPREAD, set(taken))) == expected


def test_the_reason_counts_why_container_instances_are_not_used() -> None:
    instances = [
        instance("a", status="DRAINING"),
        instance("b", connected=False),
        instance("c", memory_mib=99),
        instance("d", memory_mib=10),
        instance("e", memory_mib=99),
        instance("f", memory_mib=99),
    ]
    chosen = choose_instances(TYPE, 2, (), instances, {"c"}, memory_mib=50, alarmed={"i-f"})
    assert isinstance(chosen, NoRoom)
    assert chosen.reason == (
        f"the cluster has 6 container instances of {TYPE} "
        "(1 draining, 1 free, 1 in an alarm, 1 in use, 1 short of memory, 1 without a connected ECS agent); 2 needed"
    )
    assert isinstance(choose_instances("p5.48xlarge", 1, (), instances, set()), NoRoom)


def test_started_by_is_the_same_for_an_attempt_and_fits_into_ecs() -> None:
    token = started_by_of("sw-0123456789ab", "u-1", 1)
    assert (token, len(token)) == (started_by_of("sw-0123456789ab", "u-1", 1), STARTED_BY_MOST)
    assert token != started_by_of("sw-0123456789ab", "u-1", 2)


def ended(outcome: LaunchOutcome) -> TaskAttempt:
    return TaskAttempt(1, 2, NOW, outcome, ended_at=NOW)


@pytest.mark.parametrize(
    ("attempts", "wanted", "expected"),
    [
        ([], True, StartUnit(1)),
        ([], False, Cancelled("it is no longer wanted")),
        ([ATTEMPT], True, FindTasks(ATTEMPT)),
        ([ATTEMPT], False, FindTasks(ATTEMPT)),
        ([ended(LaunchOutcome.LAUNCHED)], True, Started(ended(LaunchOutcome.LAUNCHED))),
        ([ended(LaunchOutcome.NO_CAPACITY)], True, StartUnit(2)),
        ([ended(LaunchOutcome.ATTEMPT_ENDED)], True, StartUnit(2)),
        ([ended(LaunchOutcome.REFUSED)], True, Cancelled("attempt 1 was refused")),
    ],
)
def test_the_next_step_of_a_unit(attempts: list[TaskAttempt], wanted: bool, expected: object) -> None:
    assert next_task_step(attempts, wanted=wanted, now=NOW) == expected


def test_an_attempt_in_doubt_rests_until_its_next_search() -> None:
    resting = TaskAttempt(1, 2, NOW, again_at=LATE)
    assert isinstance(next_task_step([resting], wanted=True, now=NOW), WaitFor)
    assert next_task_step([resting], wanted=True, now=LATE) == FindTasks(resting)


def task(name: str, status: str = "RUNNING") -> TaskSeen:
    return TaskSeen(name, f"arn-{name}", status, "STOPPED" if status in ("STOPPED", "STOPPING") else "RUNNING")


def test_answers_of_all_calls_launch_a_unit_or_stop_what_started() -> None:
    both = (task("a"), task("b"))
    assert after_answers(ATTEMPT, both, [], NOW) == End(LaunchOutcome.LAUNCHED, both)
    kept = after_answers(ATTEMPT, both[:1], ["RESOURCE:MEMORY of x"], NOW)
    assert isinstance(kept, Keep)
    assert (kept.outcome, kept.stop) == (LaunchOutcome.NO_CAPACITY, ("a",))
    assert after_answers(ATTEMPT, [], ["AGENT of x", "AGENT of y"], NOW) == End(LaunchOutcome.NO_CAPACITY)
    assert after_answers(ATTEMPT, [], ["ATTRIBUTE of x"], NOW) == End(LaunchOutcome.REFUSED)


def test_a_search_launches_only_a_whole_unit_that_is_wanted() -> None:
    both = [task("a", "PENDING"), task("b")]
    assert after_search(ATTEMPT, both, complete=False, wanted=True, now=NOW) == End(LaunchOutcome.LAUNCHED, tuple(both))
    unwanted = after_search(ATTEMPT, both, complete=True, wanted=False, now=NOW)
    assert isinstance(unwanted, Keep)
    assert unwanted.stop == ("a", "b")
    failed = TaskAttempt(1, 2, NOW, LaunchOutcome.NO_CAPACITY)
    being_stopped = after_search(failed, both, complete=True, wanted=True, now=NOW)
    assert isinstance(being_stopped, Keep)
    assert being_stopped.stop == ("a", "b")


@pytest.mark.parametrize(
    ("found", "complete", "now", "stops"),
    [
        ([], True, NOW, ()),
        ([], False, LATE, ()),
        ([task("a")], True, NOW, ()),
        ([task("a")], False, LATE, ()),
        ([task("a")], True, LATE, ("a",)),
        ([task("a"), task("b", "STOPPED")], True, NOW, ("a",)),
        ([task("a", "STOPPED"), task("b", "STOPPED")], True, NOW, ()),
    ],
)
def test_an_attempt_stays_open_until_nothing_of_it_can_appear(
    found: list[TaskSeen], complete: bool, now: datetime, stops: tuple[str, ...]
) -> None:
    kept = after_search(ATTEMPT, found, complete=complete, wanted=True, now=now)
    assert isinstance(kept, Keep)
    assert kept.stop == stops
    assert kept.again_at > now


def test_an_attempt_ends_when_every_list_shows_that_nothing_runs() -> None:
    stopped = [task("a", "STOPPED")]
    assert after_search(ATTEMPT, stopped, complete=True, wanted=True, now=LATE) == End(LaunchOutcome.ATTEMPT_ENDED)
    failed = TaskAttempt(1, 2, NOW, LaunchOutcome.NO_CAPACITY)
    assert after_search(failed, [], complete=True, wanted=True, now=LATE) == End(LaunchOutcome.NO_CAPACITY)


@pytest.mark.parametrize(
    ("state", "connected", "was_connected", "expected"),
    [
        ("", False, False, ProviderStatus.UNKNOWN),
        ("PENDING", False, False, ProviderStatus.RUNNING),
        ("RUNNING", False, True, ProviderStatus.SILENT),
        ("RUNNING", True, True, ProviderStatus.AGENT_DEAD),
        ("STOPPING", False, True, ProviderStatus.SILENT),
        ("STOPPED", True, True, ProviderStatus.GONE),
        ("gone", False, True, ProviderStatus.GONE),
    ],
)
def test_only_a_task_that_stopped_is_gone(
    state: str, connected: bool, was_connected: bool, expected: ProviderStatus
) -> None:
    dead = ProviderStatus.AGENT_DEAD
    assert task_status(state, connected=connected, reported=dead, was_connected=was_connected) is expected


def test_failures_of_an_answer_are_a_lack_of_room_or_need_an_operator() -> None:
    assert outcome_of_failures(["RESOURCE:GPU of x", "AGENT of y"]) is LaunchOutcome.NO_CAPACITY
    assert outcome_of_failures(["RESOURCE:GPU of x", "ATTRIBUTE of y"]) is LaunchOutcome.REFUSED
