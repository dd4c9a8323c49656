"""Rollouts of agents with real rows: started, applied, repeated, cancelled, and the orders of each agent."""

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from engine_agent.protocol.machine_messages import MachineReport
from engine_agent.protocol.states import MachinePhase
from fleet.machines.models import Machine
from fleet.machines.selectors import machine_orders
from fleet.machines.services.reports import ReceivedMachineReport, machine_reports_store
from fleet.nodes.models import Node, NodeReport
from fleet.reconcile.planning.states import (
    AGENT_ROLLOUT_ACTIVE,
    AGENT_ROLLOUT_ALLOWED,
    AgentRolloutState,
    MachineState,
    NodeState,
)
from fleet.releases.models import AgentMove, AgentRelease, AgentRollout
from fleet.releases.planner import AgentRolloutSettings
from fleet.releases.selectors import agents_by_release, agents_seen
from fleet.releases.services import releases as agent_rollouts
from fleet.releases.services.releases import (
    LEASE,
    AgentRollouts,
    agent_rollout_begin,
    agent_rollout_cancel,
    agents_roll,
)
from kernel import clock
from kernel.leases import lease_take
from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from tests.fleet import rows
from tests.fleet.cloud import Cloud
from tests.fleet.rows import NOW

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

OLD, NEW = "0" * 16, "1" * 16
SETTINGS = AgentRolloutSettings(move_limit_s=20)
TAG = "cp311-x86_64"


@pytest.fixture(autouse=True)
def releases() -> None:
    for name, current in ((OLD, True), (NEW, False)):
        archives = {TAG: {"digest": name * 4, "size_bytes": 7}}
        AgentRelease.objects.create(
            id=name, version="0.1.0", protocol=2, is_current=current, archives=archives, created_at=NOW
        )


@pytest.fixture(autouse=True)
def cloud(monkeypatch: pytest.MonkeyPatch) -> Cloud:
    made = Cloud()
    monkeypatch.setattr(agent_rollouts, "provider_named", lambda name: made)
    return made


def node(name: str, **columns: Any) -> None:
    rows.node(name, report={"agent_version": f"0.1.0+{OLD}", "engine_pid": 100}, **columns)


def begin(release: str = NEW, **changes: Any) -> AgentRollout:
    return agent_rollout_begin(release=release, actor="ada", now=NOW, soak_s=2, **changes)


def roll(after_s: float) -> None:
    agents_roll(now=NOW + timedelta(seconds=after_s), settings=SETTINGS)


def runs(name: str, release: str) -> None:
    NodeReport.objects.filter(node=name).update(agent_version=f"0.1.0+{release}")


def rollout() -> AgentRollout:
    return AgentRollout.objects.get()


def test_ring_by_ring_all_go_and_the_release_is_the_current_one(cloud: Cloud) -> None:
    for number in range(3):
        node(f"n-{number}")
    begin(why="security fix")
    roll(0)
    assert cloud.moved == [{"n-0": NEW}]
    roll(1)
    assert cloud.moved == [{"n-0": NEW}] * 2  # repeated until the agent reports it
    runs("n-0", NEW)
    for second in range(2, 8):
        roll(second)
    assert cloud.moved[2:] == [{"n-1": NEW}] * 3
    runs("n-1", NEW)
    for second in range(8, 14):
        roll(second)
    runs("n-2", NEW)
    for second in range(14, 20):
        roll(second)
    assert (rollout().state, rollout().reason) == ("succeeded", f"3 agents run {NEW}")
    assert AgentRelease.objects.get(is_current=True).id == NEW
    said = list(Event.objects.order_by("id").filter(kind__startswith="agents.").values_list("message", flat=True))
    assert said == [
        f"ada upgrades 3 of 3 agents to 0.1.0+{NEW}: security fix",
        f"the upgrade of agents to 0.1.0+{NEW} continues: ring 1 of 3 is healthy",
        f"the upgrade of agents to 0.1.0+{NEW} continues: ring 2 of 3 is healthy",
        f"the upgrade of agents to 0.1.0+{NEW} has succeeded: 3 agents run {NEW}",
    ]


def test_it_goes_back_by_itself_and_says_why(cloud: Cloud) -> None:
    node("n-0")
    begin()
    roll(0)
    long_ago = NOW - timedelta(minutes=10)
    NodeReport.objects.filter(node="n-0").update(connected=False, connection_changed_at=long_ago)
    roll(21)
    assert rollout().state == "rolling_back"
    roll(22)
    roll(22.5)
    assert cloud.moved[-1] == {"n-0": OLD}  # although it never reported leaving it
    NodeReport.objects.filter(node="n-0").update(connected=True)
    roll(23)
    roll(24)
    assert rollout().state == "rolled_back"
    assert rollout().reason == (
        f"n-0 was not healthy with {NEW} within 20 s: it is not connected; all run {OLD} as before"
    )
    assert AgentRelease.objects.get(is_current=True).id == OLD
    assert not AgentMove.objects.exclude(agent="n-0").filter(moved_at__isnull=False).exists()


def test_it_goes_back_for_a_node_that_the_fleet_gave_up_meanwhile() -> None:
    """A spare whose agent does not start is lost and replaced long before the limit."""
    for number in range(2):
        node(f"n-{number}")
    begin()
    for number in range(2):
        roll(number)
        Node.objects.filter(id=f"n-{number}").update(state=NodeState.RETIRED.value)
        roll(number + 0.5)
    assert rollout().state == "rolling_back"
    assert rollout().reason == f"n-0 was given up before it was healthy with {NEW}; and 1 other is not healthy"
    roll(2)
    assert rollout().state == "rolled_back"


def test_two_that_begin_at_once_without_a_current_release_do_not_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    node("n-0")
    AgentRelease.objects.update(is_current=False)
    begin()
    monkeypatch.setattr(agent_rollouts, "active_rollout", lambda: None)
    with pytest.raises(Conflict, match="another upgrade has just started"):
        begin()


def test_no_upgrade_leaves_its_end() -> None:
    ends = {AgentRolloutState.SUCCEEDED, AgentRolloutState.ROLLED_BACK}
    assert set(AGENT_ROLLOUT_ALLOWED) == set(AgentRolloutState)
    assert {state for state, to in AGENT_ROLLOUT_ALLOWED.items() if not to} == ends
    assert set(AgentRolloutState) - ends == AGENT_ROLLOUT_ACTIVE


def test_an_operator_takes_it_back() -> None:
    node("n-0")
    upgrade = begin()
    roll(0)
    agent_rollout_cancel(rollout_id=upgrade.pk, actor="ada", now=NOW, why="not today")
    assert (rollout().state, rollout().reason) == ("rolling_back", "cancelled by ada: not today")
    with pytest.raises(Conflict, match=r"upgrade \d+ goes back already"):
        agent_rollout_cancel(rollout_id=upgrade.pk, actor="ada", now=NOW)


def test_one_at_a_time_and_none_where_all_run_it() -> None:
    node("n-0")
    with pytest.raises(Conflict, match=f"every agent runs 0.1.0.{OLD} already"):
        begin(OLD)
    with pytest.raises(InvalidInput, match=f"there is no release '{'9' * 16}'; there are: "):
        begin("9" * 16)
    begin()
    with pytest.raises(Conflict, match="agents are moving to"):
        begin()


def test_what_a_provider_cannot_do_takes_it_back(cloud: Cloud) -> None:
    node("n-0")
    begin()
    cloud.broken = True
    roll(0)
    assert AgentMove.objects.get(agent="n-0").trouble == "no capacity"
    roll(1)
    assert (rollout().state, rollout().reason) == ("rolling_back", "n-0: no capacity")


def test_who_was_away_catches_up_at_its_return(cloud: Cloud) -> None:
    node("n-0")
    AgentRelease.objects.filter(id=OLD).update(is_current=False)
    AgentRelease.objects.filter(id=NEW).update(is_current=True)
    NodeReport.objects.update(connected=False)
    roll(0)
    assert cloud.moved == []
    NodeReport.objects.update(connected=True)
    roll(1)
    assert cloud.moved == [{"n-0": NEW}]


def test_only_one_controller_rolls_and_it_looks_seldom_while_nothing_is_to_be_done(
    django_assert_num_queries: Any,
) -> None:
    node("n-0")
    loop = AgentRollouts()
    assert loop.run_pass()
    with django_assert_num_queries(1):
        assert loop.run_pass()


def test_a_pass_leaves_its_lease_to_whoever_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    node("n-0")
    assert AgentRollouts().run_pass()
    monkeypatch.setattr(agent_rollouts, "this_holder", lambda: "another controller")
    assert AgentRollouts().run_pass()


def test_whoever_loses_its_lease_says_nothing_more(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    node("n-0")
    begin()
    lease_take(name=LEASE, holder="another controller", ttl_s=60, now=clock.now())
    roll(0)
    assert cloud.moved == []
    assert not AgentRollouts().run_pass()


# --- hosts ------------------------------------------------------------------------------------------------------------


def host(name: str = "m-00000001", **columns: Any) -> Machine:
    facts = msgspec.structs.replace(rows.FACTS, python="3.11.7", system="Linux 6.8.0 x86_64")
    stated = {"facts": msgspec.to_builtins(facts), "agent_version": f"0.1.0+{OLD}", **columns}
    return rows.machine(name, **stated)


def test_a_host_and_its_node_are_one_agent_and_its_order_names_the_release(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_rollouts, "archives_note", lambda row: None)
    host(state=MachineState.TAKEN.value, runs="n-1")
    node("n-1", where="pool")
    [seen] = agents_seen(NOW)
    assert (seen.id, seen.release, seen.standing.pid) == ("m-00000001", OLD, 100)
    begin()
    roll(0)
    order = machine_orders({"m-00000001": 1})["m-00000001"]
    assert order.release is not None
    assert (order.release.id, order.release.digest, order.release.attempt) == (NEW, NEW * 4, 1)
    Machine.objects.update(agent_version=f"0.1.0+{NEW}")
    [seen] = agents_seen(NOW)
    assert seen.release == f"{NEW} and {OLD}"
    assert agents_by_release() == {seen.release: ["m-00000001"]}
    runs("n-1", NEW)
    [seen] = agents_seen(NOW)
    assert seen.release == NEW


def test_a_host_that_could_not_says_why_and_all_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_rollouts, "archives_note", lambda row: None)
    host()
    begin()
    roll(0)
    for attempt, state in ((0, "running"), (1, "rolling_back")):  # reports about another attempt are ignored
        report = MachineReport(1, 2, MachinePhase.IDLE, release_trouble="the disk is full", attempt=attempt)
        machine_reports_store([ReceivedMachineReport("m-00000001", "k", True, NOW, report)])
        roll(1)
        assert rollout().state == state
    assert rollout().reason == "m-00000001: the disk is full"
    assert AgentRolloutState(rollout().state) is AgentRolloutState.ROLLING_BACK


def test_a_host_without_an_archive_is_named_before_anything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_rollouts, "archives_note", lambda row: None)
    facts = msgspec.structs.replace(rows.FACTS, python="3.12.1", system="Linux 6.8.0 aarch64")
    rows.machine("m-00000002", facts=msgspec.to_builtins(facts))
    with pytest.raises(InvalidInput, match="has no archive for cp312-aarch64"):
        begin()


def test_hosts_must_be_able_to_go_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that a controller registered at its start has no archive."""
    AgentRelease.objects.filter(id=OLD).update(archives={})
    monkeypatch.setattr(agent_rollouts, "archives_note", lambda row: None)
    host()
    with pytest.raises(InvalidInput, match=f"release 0.1.0.{OLD}, needed to roll back, has no archive for"):
        begin()
    assert not AgentRollout.objects.exists()

    def packed(row: AgentRelease) -> None:
        row.archives = {TAG: {"digest": row.id * 4, "size_bytes": 7}}
        row.save()

    monkeypatch.setattr(agent_rollouts, "archives_note", packed)
    begin()
    roll(0)
    agent_rollout_cancel(rollout_id=rollout().pk, actor="ada", now=NOW)
    roll(1)
    order = machine_orders({"m-00000001": 0})["m-00000001"]
    assert order.release is not None
    assert (order.release.id, order.release.digest) == (OLD, OLD * 4)
