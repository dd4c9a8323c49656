"""API calls a minute for an idle AWS region, and time until all machines are placed.

    .venv/bin/python -m bench cloud_calls [--machines 100 1000 10000] [--minutes 15]

Runs the loop `fleet.cloud` on its own clock and database: a pass a second until all machines are placed, then one every
15 s. Only boto3's client is a stub, which counts calls and returns pages of running machines. Hourly and daily reads
are not included, nor is the SQS queue, which is read every second."""

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from fleet.clouds.planning.call_budget import OWN_SHARE, PAGE, RATES, TOPOLOGY_PAGE, bucket_of, steady_calls

PORT = 24390
REGION = "us-east-1"
BEGAN = datetime(2026, 11, 23, tzinfo=UTC)
MINUTES = 15
"""After which all machines' places were asked for again: the longest of the intervals."""
TICK_S = 15.0
"""Of the steady time. All intervals but the queue's are multiples of it."""
LONGEST_S = 900.0
"""Of the intervals that are counted: what is read each hour or day is left out."""
NEAR = 0.2
"""How far a count may be from what the intervals promise, and how much of EC2's own rate all may take."""


@dataclass
class MadeUpAws:
    """Machines that run, in pages as AWS gives them. `calls` counts by operation; `placed` are those whose place was
    asked for, all of them at `all_placed_at`. `upkeep`: whose rounds are made."""

    machines: int
    reservation: str = "cr-0123456789abcdef0"
    calls: Counter[str] = field(default_factory=Counter)
    now: datetime = BEGAN
    placed: set[str] = field(default_factory=set)
    all_placed_at: datetime | None = None
    upkeep: Any = None

    def __getattr__(self, name: str) -> Any:
        operation = "".join(part.capitalize() for part in name.split("_"))
        answer = getattr(type(self), f"_{name}", None)
        if answer is None:
            raise AttributeError(name)

        def call(**params: Any) -> dict[str, Any]:
            self.calls[operation] += 1
            answered: dict[str, Any] = answer(self, **params)
            return answered

        return call

    def _describe_instances(self, *, NextToken: str = "0", **_: Any) -> dict[str, Any]:  # noqa: N803  # boto3's
        numbers, rest = self._page(NextToken)
        tags = [{"Key": "switchyard:install", "Value": "sw-0123456789ab"}]
        return rest | {
            "Reservations": [
                {
                    "Instances": [
                        {
                            "InstanceId": instance_id(number), "State": {"Name": "running"}, "Tags": tags,
                            "LaunchTime": BEGAN, "Placement": {"AvailabilityZone": f"{REGION}a"},
                        }
                    ]
                }
                for number in numbers
            ]
        }  # fmt: skip

    def _describe_instance_status(self, *, NextToken: str = "0", **_: Any) -> dict[str, Any]:  # noqa: N803
        numbers, rest = self._page(NextToken)
        well = {"Status": "ok"}
        return rest | {
            "InstanceStatuses": [
                {
                    "InstanceId": instance_id(number), "InstanceState": {"Name": "running"}, "SystemStatus": well,
                    "InstanceStatus": well, "Events": [],
                }
                for number in numbers
            ]
        }  # fmt: skip

    def _describe_instance_topology(self, *, InstanceIds: Sequence[str]) -> dict[str, Any]:  # noqa: N803
        if len(InstanceIds) > TOPOLOGY_PAGE:
            raise ValueError(f"{len(InstanceIds)} ids in one call")
        self.placed.update(InstanceIds)
        if len(self.placed) == self.machines and self.all_placed_at is None:
            self.all_placed_at = self.now
        return {
            "Instances": [
                {"InstanceId": one, "AvailabilityZone": f"{REGION}a", "NetworkNodes": ["nn-1", f"nn-{one[-3:]}"]}
                for one in InstanceIds
            ]
        }

    def _describe_capacity_reservations(self, **_: Any) -> dict[str, Any]:
        row = {"CapacityReservationId": self.reservation, "AvailableInstanceCount": 4, "State": "active"}
        return {"CapacityReservations": [row]}

    def _describe_capacity_reservation_topology(self, **_: Any) -> dict[str, Any]:
        return {"CapacityReservations": [{"CapacityReservationId": self.reservation, "NetworkNodes": ["nn-1"]}]}

    def _describe_volumes(self, **_: Any) -> dict[str, Any]:
        return {"Volumes": []}

    def _describe_network_interfaces(self, **_: Any) -> dict[str, Any]:
        return {"NetworkInterfaces": []}

    def _describe_spot_instance_requests(self, **_: Any) -> dict[str, Any]:
        return {"SpotInstanceRequests": []}

    def _receive_message(self, **_: Any) -> dict[str, Any]:
        return {}

    def _put_object(self, **_: Any) -> dict[str, Any]:
        return {"ETag": f'"{self.calls["PutObject"]}"'}

    def _page(self, token: str) -> tuple[range, dict[str, str]]:
        first = int(token)
        after = min(first + PAGE, self.machines)
        return range(first, after), {"NextToken": str(after)} if after < self.machines else {}


def instance_id(number: int) -> str:
    return f"i-{number:017x}"


def make_region(machines: int) -> None:
    from fleet.clouds.models import CallBucket, CapacityPool, CloudRegion
    from fleet.machines.models import Machine
    from fleet.nodes.models import Node
    from fleet.reconcile.planning.states import CloudRegionState, MachineState, NodeState
    from fleet.regions.models import Region
    from models_registry.instance_types.models import InstanceType

    for model in (CallBucket, Machine, Node, Region):
        model.objects.all().delete()
    kind, _ = InstanceType.objects.get_or_create(name="trn1.32xlarge", defaults={"accelerator": "trainium"})
    region = Region.objects.create(name=REGION, provider="aws")
    base = {
        "account": "123456789012", "zones": {f"{REGION}a": {"subnet": "subnet-1", "zone_id": "use1-az1"}},
        "node_group": "sg-1", "node_profile": "node", "node_role": "node", "bucket": "artifacts",
        "queue_url": "https://sqs.example/notices",
    }  # fmt: skip
    columns = {"aws_region": REGION, "stack": "switchyard", "state": CloudRegionState.READY, "base": base}
    CloudRegion.objects.create(region=region, **columns)
    CapacityPool.objects.create(
        region=region, instance_type=kind, position=0, market="reserved", zone=f"{REGION}a", subnet="subnet-1",
        image="ami-1", reservation=MadeUpAws.reservation,
    )  # fmt: skip
    alike = {"region": region, "instance_type": kind, "created_at": BEGAN, "state_since": BEGAN}
    Node.objects.bulk_create(
        Node(id=f"n-{number:08x}", state=NodeState.READY, topology=["use1-az1"], **alike) for number in range(machines)
    )
    Machine.objects.bulk_create(
        Machine(
            id=f"m-{number:08x}", provider="aws", provider_id=instance_id(number), runs=f"n-{number:08x}",
            state=MachineState.TAKEN, zone=f"{REGION}a", cloud_state="running", **alike,
        )
        for number in range(machines)
    )  # fmt: skip


def run_loop(aws: MadeUpAws, minutes: float, tick_s: float) -> None:
    from fleet.clouds.services.upkeep import STEPS, CloudUpkeep

    steps = {name: step for name, step in STEPS.items() if step.every_s <= LONGEST_S}

    def now_s() -> float:
        return (aws.now - BEGAN).total_seconds()

    upkeep = aws.upkeep = aws.upkeep or CloudUpkeep(now_s, steps)
    with (
        patch("kernel.clock.now", lambda: aws.now),
        patch("fleet.clouds.aws.calls.client", lambda *_, **__: aws),
    ):
        for _ in range(round(minutes * 60 / tick_s)):
            upkeep.run_pass()
            upkeep.wait()
            aws.now += timedelta(seconds=tick_s)


def by_bucket(calls: Mapping[str, int]) -> Counter[str]:
    found: Counter[str] = Counter()
    for operation, count in calls.items():
        if operation.startswith("Describe"):
            found[bucket_of(operation)] += count
    return found


def faults(aws: MadeUpAws, minutes: int) -> list[str]:
    wrong, promised = [], steady_calls(aws.machines)
    for bucket, count in by_bucket(aws.calls).items():
        a_minute = count / minutes
        if abs(a_minute - promised[bucket]) > NEAR * promised[bucket]:
            wrong.append(f"{bucket}: {a_minute:.2f} calls a minute instead of {promised[bucket]:.2f}")
        if a_minute > NEAR * RATES[bucket].per_s * 60:
            wrong.append(f"{bucket}: {a_minute:.1f} calls a minute, of {RATES[bucket].per_s * 60:.0f} that EC2 allows")
    return wrong


def main(parser: argparse.ArgumentParser) -> int:
    parser.add_argument("--machines", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--minutes", type=int, default=MINUTES)
    args = parser.parse_args()

    from bench.fleet.own_control_plane import database

    wrong: list[str] = []
    with TemporaryDirectory(prefix="sy-calls-") as folder, database(Path(folder), PORT):
        from django.core.management import call_command

        call_command("migrate", verbosity=0)
        print("| machines | bucket | calls a minute | promised | EC2 allows | share | all places, s |")
        print("| ---: | --- | ---: | ---: | ---: | ---: | ---: |")
        for machines in args.machines:
            wrong += _report_row(machines, args.minutes)
    print("\n".join(wrong) or f"all within {NEAR:.0%}; our own buckets hold {OWN_SHARE:.0%} of what EC2 allows")
    return int(bool(wrong))


def _report_row(machines: int, minutes: int) -> list[str]:
    """Of the steady time: what comes before every place is known is not counted."""
    make_region(machines)
    aws = MadeUpAws(machines)
    while aws.all_placed_at is None:
        run_loop(aws, 1 / 60, 1.0)
    first_s = (aws.all_placed_at - BEGAN).total_seconds()
    run_loop(aws, minutes, TICK_S)
    aws.calls.clear()
    run_loop(aws, minutes, TICK_S)
    promised = steady_calls(machines)
    for bucket, count in sorted(by_bucket(aws.calls).items()):
        allowed = RATES[bucket].per_s * 60
        print(
            f"| {machines:,} | `{bucket}` | {count / minutes:.2f} | {promised[bucket]:.2f} | {allowed:.0f} "
            f"| {count / minutes / allowed:.2%} | {first_s:.0f} |",
            flush=True,
        )
    print(f"{machines:,} machines, {minutes} minutes: {dict(aws.calls)}", file=sys.stderr)
    return [f"{machines:,} machines: {text}" for text in faults(aws, minutes)]
