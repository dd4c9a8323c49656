"""Proofs from a task that did not start, and when and where the next one may start."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.clouds.planning.starts import (
    LONGEST_S,
    BackOff,
    Start,
    StartFault,
    back_off,
    instances_avoided,
    start_fault,
)

NOW = datetime(2027, 1, 1, tzinfo=UTC)
AGAIN, HERE, EVERYWHERE = StartFault.AGAIN, StartFault.HERE, StartFault.EVERYWHERE
FAILED, EXITED = "TaskFailedToStart", "EssentialContainerExited"
PULL = "CannotPullContainerError"


@pytest.mark.parametrize(
    ("code", "text", "fault"),
    [
        (FAILED, f"{PULL}: failed to resolve ref registry/agent:2: registry/agent:2: not found", EVERYWHERE),
        (FAILED, f"{PULL}: Error response from daemon: manifest unknown", EVERYWHERE),
        (FAILED, f"{PULL}: pull access denied for agent, repository does not exist", EVERYWHERE),
        (FAILED, f"{PULL}: image Manifest does not contain descriptor matching platform 'linux/amd64'", EVERYWHERE),
        (FAILED, "ResourceInitializationError: unable to pull registry auth: AccessDeniedException", EVERYWHERE),
        (FAILED, "ResourceInitializationError: ResourceNotFoundException: The specified log group does not exist",
         EVERYWHERE),
        (FAILED, "CannotStartContainerError: OCI runtime create failed: exec format error", EVERYWHERE),
        (EXITED, "Essential container in task exited; exec /usr/bin/agent: exec format error; exit code 1", EVERYWHERE),
        (FAILED, f"{PULL}: write /var/lib/docker/tmp: no space left on device", HERE),
        (FAILED, 'error gathering device information while adding custom device "/dev/neuron3"', HERE),
        (EXITED, "Essential container in task exited; OutOfMemoryError: Container killed; exit code 137", HERE),
        (FAILED, "DockerTimeoutError: Could not transition to started; timed out after waiting 3m0s", HERE),
        (FAILED, f"{PULL}: toomanyrequests: You have reached your pull rate limit", AGAIN),
        (FAILED, f"{PULL}: registry/agent:2: not found: dial tcp 10.0.0.1:443: i/o timeout", AGAIN),
        (FAILED, f"{PULL}: lookup registry on 10.0.0.2:53: no such host", AGAIN),
        (FAILED, "InternalError: a text that no table has", AGAIN),
        (EXITED, "Essential container in task exited; exit code 1", AGAIN),
        ("", "ECS has forgotten it", AGAIN),
        ("UserInitiated", "switchyard: n-1 is given back", None),
        ("SpotInterruption", "Your Spot Task was interrupted.", None),
        ("TerminationNotice", "Host EC2 (instance i-0) terminated.", None),
        (FAILED, "Host EC2 (instance i-0) stopped.", None),
    ],
)  # fmt: skip
def test_the_fault_of_a_task_that_did_not_start(code: str, text: str, fault: StartFault | None) -> None:
    assert start_fault(code, text) is fault


def start(age_s: float, fault: StartFault | None, unit: str = "", instance: str = "a", image: str = "1") -> Start:
    return Start(NOW - timedelta(seconds=age_s), unit or f"u-{age_s}", instance, image, fault, "why")


@pytest.mark.parametrize(
    ("starts", "failed", "wait_s"),
    [
        ([], 0, None),
        ([start(0, AGAIN)], 1, 0),
        ([start(0, HERE)], 1, 0),
        ([start(0, EVERYWHERE)], 1, 30),
        ([start(0, AGAIN), start(9, AGAIN)], 2, 30),
        ([start(0, EVERYWHERE), start(9, AGAIN), start(20, HERE)], 3, 120),
        ([start(0, HERE), start(9, HERE), start(20, HERE), start(30, HERE)], 4, 120),
        ([start(0, EVERYWHERE, "u"), start(1, EVERYWHERE, "u"), start(2, EVERYWHERE, "u")], 1, 30),
        ([start(0, AGAIN), start(5, None), start(9, EVERYWHERE)], 1, 0),
        ([start(0, None), start(9, EVERYWHERE)], 0, None),
        ([start(0, EVERYWHERE, image="2"), start(1, EVERYWHERE, image="2")], 0, None),
    ],
)
def test_each_failed_launch_of_an_image_in_a_row_doubles_the_wait(
    starts: list[Start], failed: int, wait_s: float | None
) -> None:
    for order in (starts, starts[::-1]):
        found = back_off(order, "1")
        assert (found.failed if found else 0) == failed
        assert (None if found is None else (found.until - NOW).total_seconds()) == wait_s


def test_the_wait_names_its_reason_and_whether_it_needs_a_person() -> None:
    once, twice = back_off([start(0, EVERYWHERE)], "1"), back_off([start(0, AGAIN), start(1, AGAIN)], "1")
    assert isinstance(once, BackOff)
    assert isinstance(twice, BackOff)
    assert (once.sentence, once.needs_person) == ("the last launch did not start: why", True)
    assert (twice.sentence, twice.needs_person) == ("2 launches in a row did not start: why", False)


@pytest.mark.parametrize(
    ("starts", "avoided"),
    [
        ([start(59, AGAIN)], "a"),
        ([start(61, AGAIN)], ""),
        ([start(299, HERE), start(5, HERE, instance="b")], "ab"),
        ([start(301, HERE)], ""),
        ([start(301, HERE), start(400, HERE)], "a"),
        ([start(0, EVERYWHERE)], ""),
        ([start(0, EVERYWHERE), start(10, HERE)], "a"),
        ([start(0, None), start(10, HERE)], ""),
        ([start(0, HERE, instance="")], ""),
        ([start(3601, HERE), *(start(3700 + at, HERE) for at in range(30))], ""),
    ],
)
def test_a_container_instance_that_did_not_start_a_task_is_avoided_for_a_while(
    starts: list[Start], avoided: str
) -> None:
    assert instances_avoided(starts[::-1], NOW) == set(avoided)


def _tries(instances: int, faulty: set[int]) -> Iterator[tuple[float, int]]:
    """Launches of one node over and over, each on the first free container instance that is not avoided, for an hour.
    Yields the time and the container instance of each."""
    starts: list[Start] = []
    now_s, last_s = 0.0, 3600.0
    while now_s < last_s:
        now = NOW + timedelta(seconds=now_s)
        waits, avoided = back_off(starts, "1"), instances_avoided(starts, now)
        chosen = next((at for at in range(instances) if str(at) not in avoided), None)
        if (waits is not None and waits.until > now) or chosen is None:
            now_s += 5.0
            continue
        yield now_s, chosen
        starts.append(Start(now, f"u-{now_s}", str(chosen), "1", HERE if chosen in faulty else None, ""))
        if chosen not in faulty:
            return
        now_s += 30.0


@given(st.integers(1, 40), st.data())
def test_the_next_launches_leave_faulty_container_instances_and_never_run_through_the_cluster(
    instances: int, data: st.DataObject
) -> None:
    faulty = data.draw(st.sets(st.integers(0, instances - 1), max_size=instances))
    tries = list(_tries(instances, faulty))
    assert len(tries) <= 12, "an hour of waits that double"
    gaps = [later - sooner for (sooner, _), (later, _) in pairwise(tries)]
    assert all(gap <= LONGEST_S + 5.0 or len(faulty) == instances for gap in gaps)
    chosen = [instance for _, instance in tries[:3]]
    assert len(set(chosen)) == len(chosen) or instances < 3
