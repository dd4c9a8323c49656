"""Nodes as tasks of an ECS cluster: one task on a whole container instance, which placement chooses. A unit is written
as an attempt before `StartTask`, whose answer may be lost, and is started as a whole or stopped
(`fleet.clouds.planning.tasks`). A task is a `Machine` whose `provider_id` is the task's ID: its agent proves itself by
the task's role, whose session AWS names after the task. The container instances belong to the cluster's Auto Scaling
group or its operator; this provider starts and stops only tasks."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta

from django.db.models import Q

from engine_agent.protocol.states import AgentKind
from fleet.clouds.aws import calls
from fleet.clouds.aws.identity import install_that_may_change
from fleet.clouds.aws.provider import cloud_region
from fleet.clouds.base import AttemptEnded, Later, LaunchSpec, ProviderError, Unknown
from fleet.clouds.base import Machine as Found
from fleet.clouds.ecs.cluster import (
    task_stop,
    tasks_describe,
)
from fleet.clouds.ecs.units import IN_DOUBT_RETRY_S, PROVIDER, Placed, base_of, cluster_of, unit_advance
from fleet.clouds.machines import agent_start_again, reported_status
from fleet.clouds.models import CloudRegion, LaunchAttempt, LaunchUnit
from fleet.clouds.planning.tasks import (
    TaskSeen,
    task_status,
)
from fleet.machines.models import Machine, ProviderCall
from fleet.machines.planner import ENDED, INGRESS_TYPE, KnownMachine, Listed, plan_listed_states
from fleet.nodes.services.nodes import launch_failed
from fleet.reconcile.planning.snapshot import ProviderStatus
from fleet.reconcile.planning.states import MachineRole, MachineState, ProviderAction
from kernel import clock, live, wake_ups
from models_registry.instance_types.services import instance_type_ensure

REDESCRIBED_AFTER_S = 20.0
"""After this long, a task in doubt is described by its own call."""


class EcsProvider:
    """Covers every region that is an ECS cluster."""

    name = PROVIDER

    @classmethod
    def from_settings(cls) -> "EcsProvider":
        return cls()

    def launch(self, specs: Sequence[LaunchSpec]) -> tuple[Found, ...]:
        unit = _unit_of(specs)
        attempt = unit_advance(unit.pk, [spec.id for spec in specs])
        if attempt is None:
            raise ProviderError(f"{unit}: it is no longer wanted")
        machines = {row.runs: row for row in attempt.machines.all()}
        if machines and all(row.cloud_state in ENDED for row in machines.values()):
            raise AttemptEnded(f"every task of {attempt} has stopped")
        places = dict(zip(attempt.subjects, base_of(attempt).placed, strict=True))
        return tuple(_found_machine(machines.get(spec.id), places.get(spec.id)) for spec in specs)

    def restart_agent(self, node_id: str) -> None:
        agent_start_again(_running_machines([node_id]).get(node_id), node_id)

    def move_agents(self, releases: Mapping[str, str]) -> dict[str, str]:
        """Does nothing: a machine's orders name its release (`fleet.machines.selectors.machine_orders`)."""
        return {}

    def reboot(self, node_id: str) -> None:
        raise ProviderError(f"the container instance of {node_id} belongs to its cluster and is not rebooted from here")

    def describe(self, node_ids: Sequence[str]) -> dict[str, ProviderStatus]:
        now = clock.now()
        old = Q(cloud_seen_at=None) | Q(cloud_seen_at__lt=now - timedelta(seconds=REDESCRIBED_AFTER_S))
        mine = Machine.objects.filter(provider=PROVIDER, runs__in=node_ids).exclude(state=MachineState.GONE)
        machines_refresh(list(mine.filter(old).exclude(cloud_state__in=ENDED).select_related("launched_by")), now)
        rows = _running_machines(node_ids)
        return {node: _provider_status(rows.get(node)) for node in node_ids}

    def terminate(self, node_id: str) -> None:
        _settle_launches(node_id)
        machine = _running_machines([node_id]).get(node_id)
        if machine is None or machine.cloud_state in ENDED:
            return
        install = install_that_may_change(clock.now()).id
        cluster = cluster_of(cloud_region(machine.region_id), install, clock.now())
        why = f"switchyard: {node_id} is given back"
        try:
            seen = task_stop(cluster.aws_region, cluster_name(machine, cluster.name), machine.provider_id, why)
        except calls.Refused as error:
            raise _not_stopped(machine, error) from error
        except calls.CallFailed as error:
            raise Unknown(f"whether {machine.provider_id} was stopped is not known: {error}") from error
        tasks_store([machine], [seen], clock.now())

    def describe_all(self) -> dict[str, ProviderStatus]:
        """Covers recorded tasks. Garbage collection of the cloud finds the others."""
        rows = Machine.objects.filter(provider=PROVIDER, role=MachineRole.NODE.value, state=MachineState.TAKEN.value)
        return {row.runs: _provider_status(row) for row in rows}


def _unit_of(specs: Sequence[LaunchSpec]) -> LaunchUnit:
    """The row of the unit of these nodes; a node that is launched alone is its own unit."""
    first = specs[0]
    kind = first.instance_type or INGRESS_TYPE
    instance_type_ensure(kind)
    columns = {
        "region_id": first.region,
        "instance_type_id": kind,
        "role": (MachineRole.NODE if first.kind is AgentKind.NODE else MachineRole.INGRESS).value,
        "near": list(first.near),
        "created_at": clock.now(),
    }
    return LaunchUnit.objects.get_or_create(id=first.unit or first.id, defaults=columns)[0]


def _found_machine(row: Machine | None, placed: Placed | None) -> Found:
    """Ports are stated by the agent. A task that was stopped before it was found has no row."""
    return Found(address=row.address if row is not None else None, topology=placed.path if placed is not None else None)


def _running_machines(node_ids: Sequence[str]) -> dict[str, Machine]:
    rows = Machine.objects.filter(provider=PROVIDER, runs__in=node_ids).exclude(state=MachineState.GONE)
    return {row.runs: row for row in rows}


def _provider_status(row: Machine | None) -> ProviderStatus:
    if row is None:
        return ProviderStatus.UNKNOWN
    return task_status(
        row.cloud_state,
        connected=row.connected,
        reported=reported_status(row.phase),
        was_connected=row.last_seen_at is not None,
    )


def _settle_launches(node_id: str) -> None:
    """Finds and stops the tasks of launches in doubt for a node that is given back. Raises Later or Unknown if it is
    not known yet."""
    for attempt in LaunchAttempt.objects.filter(ended_at=None, subjects__contains=[node_id]).select_related("unit"):
        unit = attempt.unit
        orders = ProviderCall.objects.filter(Q(unit=unit.pk) | Q(node_id=unit.pk), action=ProviderAction.LAUNCH)
        if orders.exists():
            raise Later(f"the launch of {unit} is in doubt, and other nodes of it still wait", IN_DOUBT_RETRY_S)
        unit_advance(unit.pk, [])


def _not_stopped(machine: Machine, error: calls.Refused) -> ProviderError:
    if error.is_for_now:
        return Later(f"{machine.provider_id} is not stopped yet: {error}")
    if error.code == "InvalidParameterException":
        # Not found proves nothing: a new task is not listed yet. Two describes without it do (`machines_refresh`).
        return Unknown(f"{machine.provider_id} is not found; it counts as gone once it stays so: {error.text}")
    return ProviderError(f"{machine.provider_id} could not be stopped: {error}")


def machines_refresh(rows: Sequence[Machine], now: datetime) -> None:
    """Describes single tasks and stores their states. A task that ECS does not have counts as gone after two answers
    without it, long after its start."""
    clouds = CloudRegion.objects.in_bulk({row.region_id for row in rows})
    by_cluster: dict[tuple[str, str], list[Machine]] = defaultdict(list)
    for row in rows:
        cloud = clouds.get(row.region_id)
        stated = cloud.stated_base().cluster if cloud is not None else None
        if cloud is not None and stated is not None:
            by_cluster[cloud.aws_region, cluster_name(row, stated.name)].append(row)
    for (region, cluster), here in by_cluster.items():
        try:
            found, missing = tasks_describe(region, cluster, [row.provider_id for row in here])
        except calls.CallFailed:
            continue
        tasks_store(here, found, now, missing)


def cluster_name(machine: Machine, stated: str) -> str:
    """Returns the cluster that a task was started in. The stack may state another one by now."""
    return base_of(machine.launched_by).cluster if machine.launched_by is not None else stated


def tasks_store(
    rows: Sequence[Machine], found: Sequence[TaskSeen], now: datetime, missing: Collection[str] = ()
) -> None:
    """Applies what ECS said of `rows`; those in neither `found` nor `missing` keep their state. One that has ended
    keeps its state, although a late answer may show it running. A node whose task ended before its agent joined is lost
    immediately, with ECS's reason."""
    seen = {task.id: task for task in found}
    about = {row.provider_id: row for row in rows if row.provider_id in seen or row.provider_id in missing}
    known = [KnownMachine(one.provider_id, one.zone, one.cloud_state, one.created_at, one.absent_lists)
             for one in about.values()]  # fmt: skip
    changes = plan_listed_states(known, Listed({name: task.status for name, task in seen.items()}, now, complete=True))
    ended = []
    for change in changes:
        row, task = about[change.provider_id], seen.get(change.provider_id)
        mine = Machine.objects.filter(pk=row.pk)
        if change.state not in ENDED:
            mine = mine.exclude(cloud_state__in=ENDED)
        is_seen = {"cloud_seen_at": now} if task is not None else {}
        mine.update(cloud_state=change.state, absent_lists=change.absent_lists, **is_seen)
        if change.state in ENDED and row.cloud_ended_at is None:
            why = task.why if task is not None else "ECS has forgotten it"
            if mine.filter(cloud_ended_at=None).update(cloud_ended_at=now, cloud_reason=why):
                ended.append((row, why))
    for row, why in ended:
        if row.role == MachineRole.NODE:
            launch_failed(
                node=row.runs, reason=f"its task ended before it joined: {why or 'without a reason'}", now=now
            )
    if ended:
        wake_ups.send("fleet.reconcile")
    if any(about[change.provider_id].cloud_state != change.state for change in changes):
        live.push("machines")
