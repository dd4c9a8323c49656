"""Reads the alarms of CloudWatch that a region names. One about a machine becomes a fault signal of its node with the
alarm as evidence, which `fleet.faults.planning` treats like any other; one without a machine becomes an incident. If
CloudWatch does not answer, everything stays as it was."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from django.db import transaction

from engine_agent.protocol.signatures import CLOUD_ALARM, CLOUD_ALARM_GRAVE
from fleet.clouds.aws.calls import CallFailed, Refused, call
from fleet.clouds.ecs.units import placed_of
from fleet.clouds.models import CloudRegion
from fleet.clouds.planning.alarms import AlarmSeen, AlarmSource, alarm_seen, gravest, parse_alarms
from fleet.clouds.services.notices import UNREAD
from fleet.faults.models import Incident, Signal
from fleet.faults.services.incidents import hardware_faults_settle, incident_open, incidents_close
from fleet.machines.models import Machine
from fleet.nodes.models import Node
from fleet.reconcile.planning.states import IncidentState, MachineRole, MachineState, NodeState
from fleet.regions.models import Region
from kernel import wake_ups

ALARM = "cloud-alarm"
"""Kind of the incident of an alarm that names no machine."""
STATE = "ALARM"
PAGE, PAGES_MOST = 100, 5
SIGNATURES = (CLOUD_ALARM, CLOUD_ALARM_GRAVE)

log = logging.getLogger(__name__)


def cloud_alarms(cloud: CloudRegion, now: datetime) -> None:
    """Reads the alarms of a region in the state ALARM and follows them. Blocks as long as the cloud does."""
    sources = parse_alarms(Region.objects.values_list("alarms", flat=True).get(pk=cloud.pk))
    unread = {"kind": UNREAD, "subject": f"{cloud.pk}/alarms"}
    try:
        seen = [alarm for source in sources for alarm in _alarms_of(cloud, source)]
    except CallFailed as error:
        log.warning("alarms of region %s were not read: %s", cloud.pk, error)
        if isinstance(error, Refused) and not error.is_for_now:
            summary = f"The alarms that {cloud.pk} names cannot be read: {error}"
            incident_open(**unread, summary=summary, evidence={}, now=now, region=cloud.pk)
        return
    incidents_close(**unread, resolution="they are read again", now=now)
    _follow_machines(cloud, seen, now)
    _follow_others(cloud, [one for one in seen if not one.machine], now)


def _alarms_of(cloud: CloudRegion, source: AlarmSource) -> Iterable[AlarmSeen]:
    asked: dict[str, Any] = {"AlarmNamePrefix": source.prefix, "StateValue": STATE, "MaxRecords": PAGE}
    for _ in range(PAGES_MOST):
        page = call("cloudwatch", "DescribeAlarms", cloud.aws_region, **asked)
        yield from (alarm_seen(found, source) for found in page["MetricAlarms"] if found["StateValue"] == STATE)
        asked["NextToken"] = page.get("NextToken") or ""
        if not asked["NextToken"]:
            return


def _follow_machines(cloud: CloudRegion, seen: Sequence[AlarmSeen], now: datetime) -> None:
    by_machine: dict[str, list[AlarmSeen]] = defaultdict(list)
    for one in seen:
        by_machine[one.machine].append(one)
    graves = {machine: gravest(there).name for machine, there in by_machine.items() if any(a.replaces for a in there)}
    graves.pop("", None)
    CloudRegion.objects.filter(pk=cloud.pk).exclude(alarmed=graves).update(alarmed=graves)
    open_signals = Signal.objects.filter(node__region_id=cloud.pk, signature__in=SIGNATURES, settled_at=None)
    if not any(by_machine) and not open_signals.exists():
        return
    machines = _machines_by_instance(cloud)
    found = {machines[name].runs: there for name, there in by_machine.items() if name in machines}
    with transaction.atomic():
        nodes = {row.pk: row for row in Node.objects.filter(id__in=found).exclude(state=NodeState.RETIRED)}
        for name, node in nodes.items():
            _signal_store(node, found[name], now)
        for signal in open_signals:
            there = found.get(signal.node_id, ())
            if not there or signal.signature != _signature_of(there):
                hardware_faults_settle(node=signal.node_id, signature=signal.signature, now=now)
        wake_ups.send("fleet.reconcile")


def _machines_by_instance(cloud: CloudRegion) -> Mapping[str, Machine]:
    """Machines of nodes by ID of the EC2 instance; of tasks, by that of their container instance."""
    rows = Machine.objects.filter(region_id=cloud.pk, role=MachineRole.NODE.value).exclude(state=MachineState.GONE)
    found = {}
    for row in rows.exclude(runs="").select_related("launched_by"):
        placed = placed_of(row) if row.provider == "ecs" else None
        found[placed.machine if placed else row.provider_id] = row
    return found


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


def _follow_others(cloud: CloudRegion, alarms: Sequence[AlarmSeen], now: datetime) -> None:
    subjects = {f"{cloud.pk}/{one.name}"[:160]: one for one in alarms}
    there = Incident.objects.filter(kind=ALARM, region=cloud.pk, state=IncidentState.OPEN.value)
    for subject in set(there.values_list("subject", flat=True)) - set(subjects):
        incidents_close(kind=ALARM, subject=subject, resolution="the alarm is over", now=now)
    for subject, one in subjects.items():
        summary = f"Alarm {one.name} of CloudWatch in {cloud.pk}: {one.reason}"
        incident_open(kind=ALARM, subject=subject, summary=summary, evidence=one.evidence, now=now, region=cloud.pk)
