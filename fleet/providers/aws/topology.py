"""Asks EC2 where machines are in its network, a batch at a time, and stores it with their nodes.

What it says nothing of stays as it was, and is asked for again. A place that changes changes the node's.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from django.db import transaction

from fleet.models import CapacityPool, CloudRegion, Machine, Node
from fleet.planning.call_budget import TOPOLOGY_CALL, PlacedMachine, path_of, topology_batches
from fleet.planning.placement.distance import Path
from fleet.planning.presence import ENDED
from fleet.planning.states import MachineRole, MachineState
from fleet.providers.aws import calls
from fleet.providers.aws.attempts import PROVIDER
from kernel import live, wake_ups

_INSTANCE = re.compile(r"i-[0-9a-f]{8,17}")
RESERVATIONS = 10
"""Ids of one call about reservations, at most."""


def region_places(cloud: CloudRegion, now: datetime) -> int:
    """Ask for the batch that is due first, if there is one. Returns how many machines were asked for.

    Raises:
        CallFailed: nothing was learned, also because our budget has no call left now.
    """
    nodes = dict(Node.objects.filter(region_id=cloud.pk).values_list("id", "topology"))
    rows = Machine.objects.filter(
        provider=PROVIDER, region_id=cloud.pk, role=MachineRole.NODE, state=MachineState.TAKEN
    ).exclude(cloud_state__in=ENDED)
    known = [
        PlacedMachine(row.provider_id, row.created_at, row.topology_at, tuple(nodes.get(row.runs, ()))) for row in rows
    ]
    due = topology_batches(known, now)
    if not due:
        return 0
    try:
        answer = calls.call("ec2", TOPOLOGY_CALL, cloud.aws_region, InstanceIds=list(due[0]))
    except calls.Refused as refused:
        # One that is not visible yet has the whole batch refused. It comes again later, the others with the next call.
        strangers = set(_INSTANCE.findall(refused.text)) & set(due[0])
        if strangers:
            Machine.objects.filter(provider=PROVIDER, provider_id__in=strangers).update(topology_at=now)
        raise
    places_store(due[0], {one["InstanceId"]: _path(one, cloud) for one in answer["Instances"]}, now)
    return len(due[0])


def _path(instance: Mapping[str, Any], cloud: CloudRegion) -> Path:
    """Zones by the ids that the region's stack states, as for its pools; EC2 says the same."""
    zone = cloud.base["zones"].get(instance["AvailabilityZone"], {})
    zone_id = zone.get("zone_id") or instance.get("ZoneId") or instance["AvailabilityZone"]
    return path_of(zone_id, instance.get("NetworkNodes") or (), instance.get("CapacityBlockId") or "")


def places_store(asked: Sequence[str], paths: Mapping[str, Path], now: datetime) -> None:
    """What was said of the machines that were asked for, by their provider's ids."""
    with transaction.atomic():
        rows = Machine.objects.filter(provider=PROVIDER, provider_id__in=asked)
        rows.update(topology_at=now)
        nodes = {runs: paths[name] for name, runs in rows.values_list("provider_id", "runs") if name in paths}
        changed = [
            node
            for node in Node.objects.select_for_update().filter(id__in=nodes).order_by("id")
            if tuple(node.topology) != nodes[node.id]
        ]
        for node in changed:
            node.topology = list(nodes[node.id])
        Node.objects.bulk_update(changed, ["topology"])
        for node in changed:
            live.push("nodes", node.id)
    if changed:
        wake_ups.send("fleet.reconcile")


def reservation_places(cloud: CloudRegion) -> None:
    """Where the machines of reservations will be: so the one nearest to a cell is chosen before anything is launched.

    Raises:
        CallFailed: what came before it is stored.
    """
    pools = list(CapacityPool.objects.filter(region_id=cloud.pk).exclude(reservation=""))
    ids = sorted({pool.reservation for pool in pools})
    for at in range(0, len(ids), RESERVATIONS):
        answer = calls.call(
            "ec2",
            "DescribeCapacityReservationTopology",
            cloud.aws_region,
            CapacityReservationIds=ids[at : at + RESERVATIONS],
        )
        for one in answer["CapacityReservations"]:
            rows = CapacityPool.objects.filter(region_id=cloud.pk, reservation=one["CapacityReservationId"])
            rows.update(network_nodes=one.get("NetworkNodes") or [])
