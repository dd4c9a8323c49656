"""Units with the real services, PostgreSQL and the test cloud: crashes at every step, lost answers, zones without
capacity or answers, lagging lists, refused calls. No unit is launched twice, no machine is lost, and no other install's
machine is touched.

`CLOUD_MACHINE_EXAMPLES=120 CLOUD_MACHINE_STEPS=100` plays 10,000 steps.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from typing import Any
from unittest import mock

import pytest
from django.db import transaction
from django.test import override_settings
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from fleet.clouds.aws import attempts, calls
from fleet.clouds.base import provider_named
from fleet.clouds.models import CloudRegion, Install, LaunchAttempt
from fleet.clouds.services.garbage import cloud_list
from fleet.machines.models import Machine
from fleet.machines.services import orders as provider_call
from fleet.nodes.models import Node
from fleet.reconcile.planning.snapshot import ProviderStatus
from fleet.reconcile.planning.states import NodeState
from kernel import clock
from lab.cloud.machines import Machine as Instance
from lab.cloud.server import World, serve
from lab.cloud.world import Clock, Ending, Fault, When
from tests.fleet.clouds.aws.cloud_fleet import ZONES, make_fleet, moment
from tests.lab.cloud.conftest import BEGAN, IMAGE

pytestmark = pytest.mark.cloud

KIND = "trn1.2xlarge"
"""With one network card, so that its machines are created quickly."""
MOST_NODES = 8
SETTLED_S = 900.0
EXAMPLES = int(os.environ.get("CLOUD_MACHINE_EXAMPLES", "4"))
STEPS = int(os.environ.get("CLOUD_MACHINE_STEPS", "25"))
LEAST_STEPS = int(os.environ.get("CLOUD_MACHINE_LEAST_STEPS", "1"))
"""Over all examples: some end before `STEPS`."""

CRASHES = ("", "before the row", "after the row", "after the call", "in the note", "after the note")
# AWS may check those with a code before the token, so in a repeated call they prove nothing about the first.
FAULTS = (
    Fault("RunInstances", when=When.AFTER, ending=Ending.RESET),
    Fault("RunInstances", when=When.BEFORE, ending=Ending.RESET),
    Fault("RunInstances", "InternalError", When.AFTER),
    Fault("RunInstances", "RequestLimitExceeded"),
    Fault("RunInstances", "InsufficientInstanceCapacity"),
    Fault("RunInstances", "VcpuLimitExceeded"),
    Fault("RunInstances", "UnauthorizedOperation"),
    Fault("TerminateInstances", when=When.AFTER, ending=Ending.CUT),
    Fault("TerminateInstances", "RequestLimitExceeded"),
    Fault("TerminateInstances", "InternalError"),
    Fault("DescribeInstances", "InternalError"),
    Fault("DescribeInstances", when=When.AFTER, ending=Ending.CUT),
)

played: Counter[str] = Counter()
"""Of all runs in this process; the bench prints it."""


class Killed(BaseException):
    pass


class CrashingCloud(RuleBasedStateMachine):
    """One example. `_crash`: the point at which the process crashes next."""

    def __init__(self) -> None:
        super().__init__()
        self._stack = ExitStack()
        self._crash = ""
        self.strangers: set[str] = set()
        self.world = World(Clock(BEGAN))
        self._stack.enter_context(serve(self.world))
        self._stack.enter_context(_rolled_back())
        self._stack.enter_context(override_settings(AGENT_URLS=["https://control.example:8000"]))
        self._patch()
        self.fleet = make_fleet(self.world, KIND)
        played["examples"] += 1

    def _patch(self) -> None:
        clients, send = cache(self.world.client), calls.send

        def sent(service: str, operation: str, *rest: Any) -> Any:
            self._die_at("after the row", operation == "RunInstances")
            answer = send(service, operation, *rest)
            self._die_at("after the call", operation != "DescribeInstances")
            return answer

        patches: dict[str, Any] = {
            "kernel.clock.now": lambda: moment(self.world),
            "fleet.clouds.aws.calls.client": lambda service, region, once: clients(service, region),
            "fleet.clouds.aws.calls.send": sent,
            "fleet.clouds.aws.provider.attempt_write": self._dying("before the row", attempts.attempt_write),
            "fleet.clouds.aws.provider.attempt_record": self._dying("in the note", attempts.attempt_record),
            "fleet.machines.services.provisioning.call_end": self._dying("after the note", provider_call.call_end),
        }
        for name, new in patches.items():
            self._stack.enter_context(mock.patch(name, new))

    def _dying(self, where: str, function: Any) -> Any:
        def dies(*args: Any, **named: Any) -> Any:
            self._die_at(where, True)
            return function(*args, **named)

        return dies

    def _die_at(self, where: str, is_there: bool) -> None:
        if is_there and self._crash == where:
            self._crash = ""
            played[f"crashes {where}"] += 1
            raise Killed

    # --- what happens -------------------------------------------------------------------------------------------------

    @initialize()
    def others_have_machines_in_this_account(self) -> None:
        base = CloudRegion.objects.get().stated_base()
        for tags in ({}, {"switchyard:install": "sw-ffffffffffff", "switchyard:unit": "u-1"}):
            specified = [{"Key": key, "Value": value} for key, value in tags.items()]
            interface = {"DeviceIndex": 0, "SubnetId": base.zones["us-east-1a"].subnet, "Groups": [base.node_group]}
            self.world.client("ec2").run_instances(
                ImageId=IMAGE, InstanceType=KIND, MinCount=1, MaxCount=1, NetworkInterfaces=[interface],
                **({"TagSpecifications": [{"ResourceType": "instance", "Tags": specified}]} if tags else {}),
            )  # fmt: skip
        self.strangers = set(self.fleet.live())

    @rule(count=st.integers(1, 3), fault=st.none() | st.sampled_from(FAULTS), crash=st.sampled_from(CRASHES))
    def order(self, count: int, fault: Fault | None, crash: str) -> None:
        if Node.objects.exclude(state=NodeState.RETIRED).count() + count > MOST_NODES:
            self.give_back(0, None, "")
            return
        self.fleet.order(count)
        self._provision(fault, crash)

    @rule(
        at=st.integers(0, MOST_NODES - 1),
        fault=st.none() | st.sampled_from(FAULTS),
        crash=st.sampled_from(CRASHES),
    )
    def give_back(self, at: int, fault: Fault | None, crash: str) -> None:
        nodes = Node.objects.exclude(state=NodeState.RETIRED).order_by("created_at", "id").values_list("id", flat=True)
        self.fleet.give_back(*nodes[at : at + 1])
        self._provision(fault, crash)

    @rule(crash=st.sampled_from(CRASHES), later_s=st.sampled_from([1, 10, 30]))
    def provision(self, crash: str, later_s: int) -> None:
        self.world.clock.advance(later_s)
        self._provision(None, crash)

    def _provision(self, fault: Fault | None, crash: str) -> None:
        if fault is not None:
            self._let_fail(fault, 1)
        self._crash = crash
        with suppress(Killed):
            self.fleet.provision()
        self._crash = ""

    @rule(seconds=st.sampled_from([1, 5, 20, 60, 200, 700, 3700]))
    def time_passes(self, seconds: int) -> None:
        self.world.clock.advance(seconds)

    @rule(zone=st.sampled_from(sorted(ZONES)), left=st.sampled_from([0, 1, 2, 100]))
    def capacity_changes(self, zone: str, left: int) -> None:
        self.fleet.limit(zone=zone, left=left)

    def _let_fail(self, fault: Fault, times: int) -> None:
        played[f"fault {fault.operation} {fault.code or fault.ending} {fault.when}"] += 1
        self.world.faults.append(Fault(fault.operation, fault.code, fault.when, times, ending=fault.ending))

    @rule(zone=st.sampled_from([*sorted(ZONES), ""]))
    def a_zone_falls_silent(self, zone: str) -> None:
        self.world.silent_zones = {zone} if zone else set()

    @rule(seconds=st.sampled_from([0.0, 20.0, 120.0]))
    def lists_lag(self, seconds: float) -> None:
        self.world.delays.visible_s = seconds

    @rule(at=st.integers(0, MOST_NODES))
    def a_machine_ends_by_itself(self, at: int) -> None:
        ours = [one for one in self.world.machines.live() if one.id not in self.strangers]
        if at < len(ours):
            self.world.machines.end(ours[at], "Server.SpotInstanceTermination", "reclaimed")

    @rule()
    def the_region_is_listed(self) -> None:
        cloud_list(CloudRegion.objects.get(), clock.now())

    @rule()
    def the_reconciler_asks(self) -> None:
        nodes = list(Node.objects.exclude(state=NodeState.RETIRED).values_list("id", flat=True))
        said = provider_named("aws").describe(nodes)
        live = set(self.fleet.live())
        gone = [node for node, status in said.items() if status is ProviderStatus.GONE]
        assert not live & set(Machine.objects.filter(runs__in=gone).values_list("provider_id", flat=True))

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_launched_that_nobody_wanted(self) -> None:
        played["steps"] += 1
        by_node: dict[str, list[Instance]] = {}
        for machine, node in self._ours():
            by_node.setdefault(node, []).append(machine)
        twice = {node: [one.id for one in found] for node, found in by_node.items() if len(found) > 1}
        assert not twice, "a node has one machine, lost answers or not"
        ended = set(Node.objects.filter(terminated_at__isnull=False).values_list("id", flat=True))
        assert not ended & set(by_node), "whose end was confirmed costs nothing more"

    @invariant()
    def a_unit_is_in_one_zone(self) -> None:
        zones: dict[str, set[str]] = {}
        for machine in self._live():
            zones.setdefault(_tags(machine)["unit"], set()).add(machine.zone)
        assert all(len(found) == 1 for found in zones.values()), zones

    @invariant()
    def what_others_have_runs_on(self) -> None:
        assert self.strangers <= set(self.fleet.live())

    @invariant()
    def the_cloud_had_no_bug(self) -> None:
        assert self.world.bugs == []

    def _live(self) -> list[Instance]:
        return [one for one in self.world.machines.live() if one.id not in self.strangers]

    def _ours(self) -> Iterator[tuple[Instance, str]]:
        """Each machine with its node. Every machine has a recorded attempt."""
        install = Install.objects.first()
        rows = {(row.unit_id, str(row.number)): row for row in LaunchAttempt.objects.all()}
        for machine in self._live():
            tags = _tags(machine)
            assert install is not None
            assert tags["install"] == install.id
            row = rows[tags["unit"], tags["attempt"]]
            yield machine, row.subjects[int(machine.moto.ami_launch_index)]

    def _retire_the_lost(self) -> None:
        """As the reconciler does with nodes without a machine; their termination still finds launched machines."""
        self.fleet.give_back(*Node.objects.filter(state=NodeState.LOST).values_list("id", flat=True))

    def teardown(self) -> None:
        """With a healthy cloud, every running machine is assigned or terminated within a quarter of an hour."""
        try:
            self.world.faults.clear()
            self.world.silent_zones = set()
            for _ in range(int(SETTLED_S / 30.0)):
                self._retire_the_lost()
                self.fleet.provision_for(30.0, step_s=30.0)
            self.world.settle()
            wanted = set(Node.objects.exclude(state=NodeState.RETIRED).values_list("id", flat=True))
            for machine, node in self._ours():
                row = Machine.objects.filter(provider_id=machine.id).first()
                assert row is not None, f"{machine.id} is recorded nowhere"
                assert row.runs == node
                assert node in wanted, f"{machine.id} runs for {node}, which was given back"
            played["machines at the end"] += len(self.world.machines.live()) - len(self.strangers)
            played["attempts"] += LaunchAttempt.objects.count()
            for outcome in self.fleet.outcomes():
                played[f"outcome {outcome or 'open'}"] += 1
        finally:
            self._stack.close()


def _tags(machine: Instance) -> dict[str, str]:
    """Our tags, without their prefix."""
    return {tag["key"].removeprefix("switchyard:"): str(tag["value"]) for tag in machine.moto.get_tags()}


@contextmanager
def _rolled_back() -> Iterator[None]:
    """Deletes the rows of an example after it."""
    block = transaction.atomic()
    block._from_testcase = True  # type: ignore[attr-defined]  # none of the code: that calls nothing inside of one
    with block:
        yield
        transaction.set_rollback(True)


# Without shrinking, which exceeds the test's time-out.
@pytest.mark.django_db
def test_whatever_dies_or_is_lost_no_machine_is_launched_twice_forgotten_or_taken_from_others() -> None:
    run_state_machine_as_test(
        CrashingCloud,
        settings=settings(max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None, phases=[Phase.generate]),
    )
    print("\n".join(f"{count:8,} {what}" for what, count in sorted(played.items())))  # noqa: T201 (what the bench shows)
    assert played["steps"] >= LEAST_STEPS
