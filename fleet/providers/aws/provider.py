"""Machines of EC2. Launches are rows first (`units`), and what runs is known from lists (`listing`): what the
reconciler asks becomes no call of its own, but for machines that nobody has looked at for a while.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta

from django.db.models import Q

from engine_agent.protocol.states import AgentKind
from fleet.models import LaunchAttempt, LaunchUnit, Machine, ProviderCall
from fleet.planning.pools import PoolView
from fleet.planning.snapshot import ProviderStatus
from fleet.planning.states import MachineRole, MachineState, ProviderAction
from fleet.providers.aws import calls
from fleet.providers.aws.attempts import PROVIDER, attempt_view
from fleet.providers.aws.install import install_that_may_change
from fleet.providers.aws.listing import ENDED, machines_look, seen_store
from fleet.providers.aws.units import Launched, cloud_region, unit_advance
from fleet.providers.base import Later, LaunchSpec, ProviderError, Unknown
from fleet.providers.base import Machine as Found
from fleet.providers.hosts import agent_start_again, heard_status
from kernel import clock

INGRESS_TYPE = "c7i.2xlarge"
LOOKED_AT_AGAIN_S = 20.0
"""After which a machine in doubt is looked at by a call, instead of waiting for the next list."""
IN_DOUBT_RETRY_S = 5.0


class AwsProvider:
    """Every region of EC2 that has a stack."""

    name = PROVIDER

    @classmethod
    def from_settings(cls) -> "AwsProvider":
        return cls()

    def launch(self, specs: Sequence[LaunchSpec]) -> tuple[Found, ...]:
        unit = _unit(specs)
        launched = unit_advance(unit.pk, [spec.id for spec in specs])
        if not isinstance(launched, Launched):
            raise ProviderError(f"{unit}: it is no longer wanted")
        pool = attempt_view(launched.attempt).pool
        rows = {row.runs: row for row in launched.attempt.machines.all()}
        return tuple(_found(rows.get(spec.id), pool) for spec in specs)

    def restart_agent(self, node_id: str) -> None:
        agent_start_again(_running([node_id]).get(node_id), node_id)

    def move_agents(self, releases: Mapping[str, str]) -> dict[str, str]:
        """A machine's order names its release already (`fleet.selectors.machine.machine_orders`)."""
        return {}

    def describe(self, node_ids: Sequence[str]) -> dict[str, ProviderStatus]:
        now = clock.now()
        old = Q(cloud_seen_at=None) | Q(cloud_seen_at__lt=now - timedelta(seconds=LOOKED_AT_AGAIN_S))
        mine = Machine.objects.filter(provider=PROVIDER, runs__in=node_ids).exclude(state=MachineState.GONE)
        machines_look(list(mine.filter(old).exclude(cloud_state__in=ENDED)), now)
        rows = _running(node_ids)
        return {node: _status(rows.get(node)) for node in node_ids}

    def terminate(self, node_id: str) -> None:
        _settle_launches(node_id)
        machine = _running([node_id]).get(node_id)
        if machine is None or machine.cloud_state in ENDED:
            return
        now = clock.now()
        install_that_may_change(now)
        region = cloud_region(machine.region_id).aws_region
        try:
            answer = calls.call("ec2", "TerminateInstances", region, machines=1, InstanceIds=[machine.provider_id])
        except calls.Refused as error:
            raise _not_ended(machine, error) from error
        except calls.Unanswered as error:
            raise Unknown(f"whether {machine.provider_id} was ended is not known: {error}") from error
        seen_store({one["InstanceId"]: one["CurrentState"]["Name"] for one in answer["TerminatingInstances"]}, now)

    def describe_all(self) -> dict[str, ProviderStatus]:
        """Covers recorded machines. Garbage collection of the cloud (`cloud_machine_garbage`) finds the others."""
        rows = Machine.objects.filter(provider=PROVIDER, role=MachineRole.NODE.value, state=MachineState.TAKEN.value)
        return {row.runs: _status(row) for row in rows}


def _unit(specs: Sequence[LaunchSpec]) -> LaunchUnit:
    """The row of the unit that these machines are of; one that is launched alone is a unit of its own."""
    first = specs[0]
    is_node = first.kind is AgentKind.NODE
    columns = {
        "region_id": first.region,
        "instance_type_id": first.instance_type or INGRESS_TYPE,
        "role": (MachineRole.NODE if is_node else MachineRole.INGRESS).value,
        "near": list(first.near),
        "markets": list(first.markets),
        "created_at": clock.now(),
    }
    return LaunchUnit.objects.get_or_create(id=first.unit or first.id, defaults=columns)[0]


def _found(row: Machine | None, pool: PoolView) -> Found:
    """Its ports are stated by its agent. One that ended before it was found has no row."""
    address = row.address if row is not None else None
    return Found(address=address, topology=pool.path, market=pool.market.value)


def _running(node_ids: Sequence[str]) -> dict[str, Machine]:
    rows = Machine.objects.filter(provider=PROVIDER, runs__in=node_ids).exclude(state=MachineState.GONE)
    return {row.runs: row for row in rows}


def _status(row: Machine | None) -> ProviderStatus:
    """Only what was seen to end is gone. Whether its node's agent is dead is said by its own, while that is heard."""
    if row is None or not row.cloud_state:
        return ProviderStatus.UNKNOWN
    if row.cloud_state in ENDED:
        return ProviderStatus.GONE
    if row.connected:
        return heard_status(row)
    return ProviderStatus.SILENT if row.last_seen_at is not None else ProviderStatus.RUNNING


def _settle_launches(node_id: str) -> None:
    """What an attempt may have launched for a node that is given back is found first, so that it can be ended.

    Raises:
        Later, Unknown: that is not known yet.
    """
    for attempt in LaunchAttempt.objects.filter(ended_at=None, subjects__contains=[node_id]).select_related("unit"):
        unit = attempt.unit
        orders = ProviderCall.objects.filter(Q(unit=unit.pk) | Q(node_id=unit.pk), action=ProviderAction.LAUNCH)
        if orders.exists():
            raise Later(f"the launch of {unit} is in doubt, and others of it still wait", IN_DOUBT_RETRY_S)
        unit_advance(unit.pk, [])


def _not_ended(machine: Machine, error: calls.Refused) -> ProviderError:
    if error.not_before is not None:
        return Later(str(error), (error.not_before - clock.now()).total_seconds())
    if error.code == "InvalidInstanceID.NotFound":
        # That it is not found is no proof: a young one is not listed yet. Two complete lists are (`presence`).
        return Unknown(f"{machine.provider_id} is not found; it counts as gone once lists prove it")
    return ProviderError(f"{machine.provider_id} could not be ended: {error}")
