"""Tags of tasks follow the rows, and a task without a row is judged by its tags."""

from typing import Any

import pytest

from fleet.clouds.planning.task_tags import TAGGED_AT_ONCE, Serves, judge_stray, plan_tags
from fleet.clouds.planning.tasks import TAG_NODE, TaskSeen, may_adopt

MEMBER = Serves("n-1", "m-1", "3")


def task(name: str, serves: Serves | None = None, status: str = "RUNNING", **columns: Any) -> TaskSeen:
    return TaskSeen(id=name, instance=f"i-{name}", status=status, tags=serves.tags if serves else {}, **columns)


def test_tasks_get_the_tags_of_their_work_members_of_cells_first() -> None:
    spare = Serves("n-0")
    wanted = {"a": spare, "b": MEMBER, "c": MEMBER, "d": spare, "e": MEMBER}
    tasks = [
        task("a"),
        task("b", Serves("n-1", "m-1", "2")),
        task("c", MEMBER),
        task("d", spare),
        task("e", status="STOPPED"),
        task("of nobody"),
    ]
    assert list(plan_tags(tasks, wanted).items()) == [("b", MEMBER), ("a", spare)]
    many = {f"t{index}": MEMBER for index in range(3 * TAGGED_AT_ONCE)}
    assert len(plan_tags([task(name) for name in many], many)) == TAGGED_AT_ONCE


@pytest.mark.parametrize(
    ("stray", "serves_now", "is_referenced", "is_recorded"),
    [
        pytest.param(task("a", MEMBER), True, True, False, id="its cell is at that generation"),
        pytest.param(task("a", Serves("n-1", "m-1", "2")), False, False, True, id="of an older generation"),
        pytest.param(task("a", Serves("n-9", "m-9", "1")), False, False, True, id="of a node that is retired"),
        pytest.param(task("a", started_by="open"), False, True, False, id="its launch is open"),
        pytest.param(task("a", unit="u-1", attempt="1"), False, False, True, id="its attempt has ended"),
        pytest.param(task("a", unit="u-1", attempt="2"), False, False, False, id="nothing is known of it"),
    ],
)
def test_a_task_without_a_row_is_left_alone_while_it_may_serve(
    stray: TaskSeen, serves_now: bool, is_referenced: bool, is_recorded: bool
) -> None:
    found = judge_stray(stray, frozenset({"open"}), frozenset({("u-1", "1")}), {"n-1": MEMBER})
    assert (found.serves_now, found.is_referenced, found.is_recorded) == (serves_now, is_referenced, is_recorded)


def test_tasks_of_an_attempt_that_no_row_knows_are_adopted_if_they_are_whole_and_have_not_joined() -> None:
    instances = {"i-a", "i-b"}
    assert may_adopt([task("a"), task("b")], 2, instances)
    assert not may_adopt([], 2, instances)
    assert not may_adopt([task("a")], 2, instances)
    assert not may_adopt([task("a"), task("c")], 2, instances), "its container instance is gone"
    joined = TaskSeen("b", "i-b", "RUNNING", tags={TAG_NODE: "n-1"})
    assert not may_adopt([task("a"), joined], 2, instances)
