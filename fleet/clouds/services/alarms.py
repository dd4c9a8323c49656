"""Reads the alarms of CloudWatch that a region names. One about a machine becomes a fault signal of its node with the
alarm as evidence, which `fleet.faults.planning` treats like any other. One about a cell, a group of machines, a service
or nothing in particular becomes an incident that names its nodes and cells. If CloudWatch or EC2 does not answer,
everything stays as it was."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from django.db import transaction

from engine_agent.protocol.signatures import CLOUD_ALARM, CLOUD_ALARM_GRAVE
from fleet.cells.models import Cell, CellMember
from fleet.clouds.aws.calls import CallFailed, Refused, call, pages
from fleet.clouds.ecs.cluster import short_id
from fleet.clouds.ecs.units import base_of, placed_of
from fleet.clouds.models import CloudRegion
from fleet.clouds.planning.alarms import (
    About,
    AlarmedMachine,
    AlarmSeen,
    AlarmSource,
    about_of,
    alarm_seen,
    distinct,
    gravest,
    groups_named,
    parse_alarms,
)
from fleet.clouds.services.notices import UNREAD
from fleet.faults.models import Incident, Signal
from fleet.faults.services.incidents import hardware_faults_settle, incident_open, incidents_close
from fleet.machines.models import Machine
from fleet.nodes.models import Node
from fleet.reconcile.planning.states import CellState, IncidentState, MachineRole, MachineState, NodeState
from fleet.regions.models import Region
from kernel import wake_ups

ALARM = "cloud-alarm"
"""Kind of the incident of an alarm that is not about one machine."""
GROUP_TAG = "aws:autoscaling:groupName"
"""The tag that EC2 Auto Scaling sets."""
GROUPS_PER_CALL = 200
"""EC2's limit for values of a filter."""
STATE = "ALARM"
PAGE, PAGES_MOST = 100, 5
SIGNATURES = (CLOUD_ALARM, CLOUD_ALARM_GRAVE)

log = logging.getLogger(__name__)


def cloud_alarms(cloud: CloudRegion, now: datetime) -> None:
    """Reads the alarms of a region in the state ALARM and follows them. Blocks as long as the cloud does."""
    sources = parse_alarms(Region.objects.values_list("alarms", flat=True).get(pk=cloud.pk))
    unread = {"kind": UNREAD, "subject": f"{cloud.pk}/alarms"}
    try:
        seen = distinct(alarm for source in sources for alarm in _alarms_of(cloud, source))
        groups = _instances_by_group(cloud, groups_named(seen))
    except CallFailed as error:
        log.warning("alarms of region %s were not read: %s", cloud.pk, error)
        if isinstance(error, Refused) and not error.is_for_now:
            summary = f"The alarms that {cloud.pk} names cannot be read: {error}"
            incident_open(**unread, summary=summary, evidence={}, now=now, region=cloud.pk)
        return
    incidents_close(**unread, resolution="they are read again", now=now)
    machines = _machines(cloud) if seen else []
    cells = Cell.objects.filter(region_id=cloud.pk).exclude(state=CellState.STOPPED) if seen else Cell.objects.none()
    known = set(cells.values_list("id", flat=True))
    cluster = cloud.base.get("cluster") or {}
    about = [(one, about_of(one, machines, known, groups, cluster.get("name", ""))) for one in seen]
    by_node: dict[str, list[AlarmSeen]] = defaultdict(list)
    for one, of in about:
        if of is not None and of.machine is not None:
            by_node[of.machine.node].append(one)
    _follow_machines(cloud, by_node, {one.node: one.instance for one in machines}, now)
    _follow_others(cloud, [(one, of) for one, of in about if of is not None and of.machine is None], now)


def _alarms_of(cloud: CloudRegion, source: AlarmSource) -> Iterable[AlarmSeen]:
    asked: dict[str, Any] = {"AlarmNamePrefix": source.literal, "StateValue": STATE, "MaxRecords": PAGE}
    for _ in range(PAGES_MOST):
        page = call("cloudwatch", "DescribeAlarms", cloud.aws_region, **asked)
        yield from (alarm_seen(found, source) for found in page["MetricAlarms"] if found["StateValue"] == STATE)
        asked["NextToken"] = page.get("NextToken") or ""
        if not asked["NextToken"]:
            return


def _instances_by_group(cloud: CloudRegion, groups: Sequence[str]) -> Mapping[str, set[str]]:
    """EC2 instances of Auto Scaling groups."""
    found: dict[str, set[str]] = {name: set() for name in groups}
    for first in range(0, len(groups), GROUPS_PER_CALL):
        named = [{"Name": f"tag:{GROUP_TAG}", "Values": list(groups[first : first + GROUPS_PER_CALL])}]
        for page in pages("DescribeInstances", cloud.aws_region, Filters=named):
            for one in (each for reservation in page["Reservations"] for each in reservation["Instances"]):
                tags = {tag["Key"]: tag["Value"] for tag in one.get("Tags") or ()}
                found.setdefault(tags.get(GROUP_TAG, ""), set()).add(one["InstanceId"])
    return found


def _follow_machines(
    cloud: CloudRegion, found: Mapping[str, Sequence[AlarmSeen]], instances: Mapping[str, str], now: datetime
) -> None:
    """`found`: alarms by node. `instances`: EC2 instance of each node."""
    graves = {instances[node]: gravest(there).name for node, there in found.items() if any(a.replaces for a in there)}
    CloudRegion.objects.filter(pk=cloud.pk).exclude(alarmed=graves).update(alarmed=graves)
    open_signals = Signal.objects.filter(node__region_id=cloud.pk, signature__in=SIGNATURES, settled_at=None)
    if not found and not open_signals.exists():
        return
    with transaction.atomic():
        nodes = {row.pk: row for row in Node.objects.filter(id__in=found).exclude(state=NodeState.RETIRED)}
        for name, node in nodes.items():
            _signal_store(node, found[name], now)
        for signal in open_signals:
            there = found.get(signal.node_id, ())
            if not there or signal.signature != _signature_of(there):
                hardware_faults_settle(node=signal.node_id, signature=signal.signature, now=now)
        wake_ups.send("fleet.reconcile")


def _machines(cloud: CloudRegion) -> list[AlarmedMachine]:
    """Machines of nodes. Two queries."""
    rows = Machine.objects.filter(region_id=cloud.pk, role=MachineRole.NODE.value).exclude(state=MachineState.GONE)
    cells = dict(CellMember.objects.filter(cell__region_id=cloud.pk).values_list("node_id", "cell_id"))
    return [_alarmed(row, cells.get(row.runs, "")) for row in rows.exclude(runs="").select_related("launched_by")]


def _alarmed(row: Machine, cell: str) -> AlarmedMachine:
    placed = placed_of(row) if row.provider == "ecs" else None
    if placed is None or row.launched_by is None:
        return AlarmedMachine(row.runs, row.provider_id, cell)
    container, family = short_id(placed.arn), base_of(row.launched_by).definition.partition(":")[0]
    return AlarmedMachine(row.runs, placed.machine, cell, row.provider_id, container, family)


def _signature_of(alarms: Iterable[AlarmSeen]) -> str:
    return CLOUD_ALARM_GRAVE if any(one.replaces for one in alarms) else CLOUD_ALARM


def _signal_store(node: Node, alarms: Sequence[AlarmSeen], now: datetime) -> None:
    """Counts no repair: an alarm that comes and goes must not replace a machine that it only warns about."""
    first = gravest(alarms)
    columns = {
        "summary": f"alarm {first.name}: {first.reason}",
        "evidence": {"alarms": [one.evidence for one in alarms]},
        "last_at": now,
    }
    row, created = Signal.objects.get_or_create(
        node=node,
        signature=_signature_of(alarms),
        settled_at=None,
        defaults={**columns, "instance_type": node.instance_type_id, "first_at": now},
    )
    if not created:
        Signal.objects.filter(pk=row.pk).update(**columns)


def _follow_others(cloud: CloudRegion, alarms: Iterable[tuple[AlarmSeen, About]], now: datetime) -> None:
    subjects = {f"{cloud.pk}/{one.name}"[:160]: (one, about) for one, about in alarms}
    there = Incident.objects.filter(kind=ALARM, region=cloud.pk, state=IncidentState.OPEN.value)
    for subject in set(there.values_list("subject", flat=True)) - set(subjects):
        incidents_close(kind=ALARM, subject=subject, resolution="the alarm is over", now=now)
    named = {about.cell for _, about in subjects.values()} - {""}
    deployments = dict(Cell.objects.filter(id__in=named).values_list("id", "deployment_id")) if named else {}
    for subject, (one, about) in subjects.items():
        of = f", about {about.words}" if about.words else ""
        incident_open(
            kind=ALARM,
            subject=subject,
            summary=f"Alarm {one.name} of CloudWatch in {cloud.pk}{of}: {one.reason}",
            evidence=one.evidence | about.evidence,
            now=now,
            region=cloud.pk,
            cell=about.cell,
            deployment=deployments.get(about.cell, ""),
        )
