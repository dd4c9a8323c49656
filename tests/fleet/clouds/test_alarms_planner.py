"""The subject of an alarm of CloudWatch, by its name and its dimensions."""

from datetime import UTC, datetime
from typing import Any

import pytest

from fleet.clouds.planning.alarms import (
    LISTED_MOST,
    SOURCES_MOST,
    About,
    AlarmedMachine,
    AlarmSource,
    about_of,
    alarm_seen,
    distinct,
    parse_alarms,
)
from kernel.constraints import InvalidField

AT = datetime(2026, 1, 1, tzinfo=UTC)
MACHINES = (
    AlarmedMachine("n-1", "i-1", "chat-1", "task-1", "ci-1", "sw-node-trn1"),
    AlarmedMachine("n-2", "i-2", "chat-1", "task-2", "ci-2", "sw-node-trn1"),
    AlarmedMachine("n-10", "i-3", "", "task-3", "ci-3", "sw-node-g5"),
)
CELLS = frozenset({"chat-1", "chat-12", "dead-1"})
GROUPS = {"asg": {"i-1", "i-3", "i-elsewhere"}}


def about(prefix: str, name: str = "", **dimensions: Any) -> About | None:
    stated = {key: value if isinstance(value, list) else [value] for key, value in dimensions.items()}
    listed = [{"Name": key, "Value": each} for key, values in stated.items() for each in values]
    queries = [{"MetricStat": {"Metric": {"Dimensions": [one]}}} for one in listed]
    found = {"AlarmName": name or prefix, "StateUpdatedTimestamp": AT, "Metrics": queries}
    return about_of(alarm_seen(found, AlarmSource(prefix)), MACHINES, CELLS, GROUPS, "cluster")


@pytest.mark.parametrize(
    ("dimensions", "node"),
    [
        ({"InstanceId": "i-2"}, "n-2"),
        ({"ContainerInstanceId": "ci-1", "ClusterName": "cluster"}, "n-1"),
        ({"TaskId": "task-3"}, "n-10"),
        ({"TaskId": "arn:aws:ecs:us-east-1:1:task/cluster/task-3"}, "n-10"),
        ({"InstanceId": "i-2", "AutoScalingGroupName": "asg"}, "n-2"),
    ],
)
def test_one_machine_in_the_dimensions_is_what_the_alarm_is_about(dimensions: dict[str, str], node: str) -> None:
    found = about("a", **dimensions)
    assert found is not None
    assert found.machine is not None
    assert (found.machine.node, found.words) == (node, "")


@pytest.mark.parametrize(
    ("dimensions", "words"),
    [
        ({"InstanceId": ["i-1", "i-2"]}, "2 machines (2 nodes in 1 cell)"),
        ({"AutoScalingGroupName": "asg"}, "Auto Scaling group asg (2 nodes in 1 cell)"),
        ({"AutoScalingGroupName": "gone"}, "Auto Scaling group gone"),
        ({"ClusterName": "cluster", "TaskDefinitionFamily": "sw-node-g5"}, "task definition sw-node-g5 (1 node)"),
        ({"ClusterName": "cluster", "ServiceName": "control"}, "service control"),
        ({"ClusterName": "cluster"}, "cluster cluster (3 nodes in 1 cell)"),
        ({"VolumeId": "vol-1"}, ""),
        ({}, ""),
    ],
)
def test_a_group_a_service_or_the_region_blames_no_machine(dimensions: dict[str, Any], words: str) -> None:
    found = about("a", **dimensions)
    assert found is not None
    assert (found.machine, found.words) == (None, words)


@pytest.mark.parametrize(
    "dimensions", [{"InstanceId": "i-9"}, {"TaskId": "task-9"}, {"ClusterName": "other", "ServiceName": "web"}]
)
def test_an_alarm_of_another_fleet_is_ignored(dimensions: dict[str, str]) -> None:
    assert about("a", **dimensions) is None


@pytest.mark.parametrize(
    ("prefix", "name", "cell"),
    [
        ("ttft-{cell}", "ttft-chat-1", "chat-1"),
        ("ttft-{cell}", "ttft-chat-1: p99", "chat-1"),
        ("ttft-{cell}", "ttft-chat-12", "chat-12"),
        ("ttft-{cell}", "ttft-chat-13", None),
        ("ttft-{cell}-p99", "ttft-chat-1-p99-high", "chat-1"),
        ("ttft-{cell}", "ttft-dead-1", "dead-1"),
        ("ttft-{cell}", "ttft-", None),
    ],
)
def test_a_name_has_the_id_of_a_cell(prefix: str, name: str, cell: str | None) -> None:
    found = about(prefix, name, InstanceId="i-3")
    assert (found and found.cell) == cell
    assert found is None or found.machine is None


def test_a_name_has_the_id_of_a_node() -> None:
    found = about("efa-{node}", "efa-n-1")
    assert found is not None
    assert found.machine == MACHINES[0]
    assert about("efa-{node}", "efa-n-3") is None


def test_an_alarm_of_two_prefixes_counts_once_by_the_stricter_one() -> None:
    found = {"AlarmName": "node-n-1", "StateUpdatedTimestamp": AT}
    sources = [AlarmSource("n"), AlarmSource("node-{node}"), AlarmSource("no", replaces=True)]
    assert [one.source for one in distinct(alarm_seen(found, one) for one in sources[:2])] == [sources[1]]
    assert [one.source for one in distinct(alarm_seen(found, one) for one in sources)] == [sources[2]]


def test_evidence_of_a_large_group_is_bounded() -> None:
    many = tuple(AlarmedMachine(f"n-{index}", f"i-{index}", f"c-{index}") for index in range(500))
    evidence = About("cluster x", machines=many).evidence
    assert (evidence["node_count"], len(evidence["nodes"]), len(evidence["cells"])) == (500, LISTED_MOST, LISTED_MOST)


def test_alarms_of_a_region_are_parsed_strictly() -> None:
    assert parse_alarms([{"prefix": "a"}, {"prefix": "b", "replaces": True}])[1] == AlarmSource("b", replaces=True)
    twice = [{"prefix": "a"}, {"prefix": "a", "replaces": True}]
    many = [{"prefix": f"a{index}"} for index in range(SOURCES_MOST + 1)]
    long = [{"prefix": "x" * 256}]
    mistakes: list[Any] = [
        None, "a", ["a"], [{}], [{"prefix": ""}], long, [{"prefix": "a", "of": 1}], twice, many,
        [{"prefix": "{cell}"}], [{"prefix": "a-{cell}-{node}"}], [{"prefix": "a-{cell}", "replaces": True}],
    ]  # fmt: skip
    for wrong in mistakes:
        with pytest.raises(InvalidField, match="alarms"):
            parse_alarms(wrong)
