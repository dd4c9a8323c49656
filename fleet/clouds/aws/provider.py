"""Machines of EC2. Launches a unit in steps of at most one launch call or one search, as
`fleet.clouds.planning.launches` decides from rows. A step is stored before it is carried out, so that another process
can continue after a crash. Machine states come from lists (`listing`); only machines that were not listed for a while
cost an AWS call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import Q

from engine_agent.protocol.states import AgentKind
from fleet.capacity.planning.pools import LaunchOutcome, Market, PoolView
from fleet.clouds.aws import calls
from fleet.clouds.aws.actions import THROTTLED, Verdict, classify, quota_name
from fleet.clouds.aws.attempts import (
    PROVIDER,
    attempt_record,
    attempt_view,
    attempt_write,
    machines_record,
    pools_pause,
    pools_to_try,
    request_of,
    unit_close,
    unit_view,
    until_s,
)
from fleet.clouds.aws.calls import budget_spend, budget_throttled
from fleet.clouds.aws.identity import install_that_may_change
from fleet.clouds.aws.launch import TAG_ATTEMPT, TAG_INSTALL, TAG_UNIT
from fleet.clouds.aws.listing import ENDED, machines_refresh, states_store
from fleet.clouds.base import AttemptEnded, Later, LaunchSpec, NoCapacity, NoQuota, ProviderError, Unknown
from fleet.clouds.base import Machine as Found
from fleet.clouds.machines import agent_start_again, reported_status
from fleet.clouds.models import CloudRegion, LaunchAttempt, LaunchUnit
from fleet.clouds.planning.launches import (
    CancelUnit,
    EndAttempt,
    FindMachines,
    RepeatCall,
    UnitLaunched,
    WaitUntil,
    WriteAttempt,
    after_call,
    after_search,
    next_step,
)
from fleet.machines.models import Machine, ProviderCall
from fleet.machines.planner import INGRESS_TYPE
from fleet.reconcile.planning.snapshot import ProviderStatus
from fleet.reconcile.planning.states import CloudRegionState, MachineRole, MachineState, ProviderAction
from kernel import clock

READING_RETRY_S = 30.0


@dataclass(frozen=True, slots=True)
class Launched:
    """`attempt`: the launch that they belong to."""

    attempt: LaunchAttempt


@dataclass(frozen=True, slots=True)
class NothingLaunched:
    pass


@dataclass(frozen=True, slots=True)
class _Search:
    attempt: LaunchAttempt
    reason: str


def cloud_region(region: str) -> CloudRegion:
    """Returns a region whose stack has been read. Raises Later if it has not been read yet."""
    row = CloudRegion.objects.filter(region_id=region).first()
    if row is None or row.state != CloudRegionState.READY:
        why = row.reason if row is not None and row.reason else "its stack has not been read yet"
        raise Later(f"nothing is launched in {region}: {why}", READING_RETRY_S)
    return row


def unit_advance(unit_id: str, subjects: Sequence[str]) -> Launched | NothingLaunched:
    """Takes one step for a unit whose machines are wanted for `subjects`. Empty `subjects`: the unit is no longer
    wanted, and machines of earlier launches are searched for so that they can be terminated. Raises ProviderError as
    `NodeProvider.launch` does."""
    now = clock.now()
    install = install_that_may_change(now)
    with transaction.atomic():
        unit = LaunchUnit.objects.select_for_update(of=("self",)).select_related("instance_type").get(pk=unit_id)
        planned = _plan_step(unit, subjects, install.id, now)
    if isinstance(planned, ProviderError):
        raise planned
    if isinstance(planned, Launched | NothingLaunched):
        return planned
    if isinstance(planned, _Search):
        return _search_attempt(planned, install.id, wanted=bool(subjects))
    return _call_attempt(planned)


def _plan_step(
    unit: LaunchUnit, subjects: Sequence[str], install: str, now: datetime
) -> Launched | NothingLaunched | ProviderError | _Search | LaunchAttempt:
    """Decides and stores the next step. A returned attempt must be called now. Errors are returned and not raised, so
    that the stored rows stay."""
    rows = {row.number: row for row in unit.attempts.all()}
    views = [attempt_view(row) for row in rows.values()]
    view = unit_view(unit, max(1, len(subjects)), wanted=bool(subjects))
    cloud = cloud_region(unit.region_id)
    match next_step(view, views, pools_to_try(unit.region_id, now), install, now):
        case UnitLaunched(attempt):
            return Launched(rows[attempt.number])
        case CancelUnit(reason):
            unit_close(unit, reason, now)
            return ProviderError(f"{unit.id}: {reason}") if subjects else NothingLaunched()
        case WaitUntil(until, reason):
            _set_reason(unit, reason)
            return NoCapacity(reason, until_s(until, now))
        case FindMachines(attempt, reason):
            _set_reason(unit, reason)
            return _Search(rows[attempt.number], reason)
        case RepeatCall(attempt):
            row, count = rows[attempt.number], len(rows[attempt.number].subjects)
            _spend_launch_budget(cloud, count)
            row.called_at = now
            row.save(update_fields=["called_at"])
            return row
        case WriteAttempt() as step:
            _check_wanted(unit, subjects)
            _spend_launch_budget(cloud, len(subjects))
            _set_reason(unit, step.reason)
            try:
                return attempt_write(unit, step, subjects, cloud, install, now)
            except ValueError as error:
                pools_pause(step.pool.id, unit.region_id, LaunchOutcome.REFUSED, str(error), now)
                return ProviderError(f"{step.pool.name} cannot be used: {error}")


def _set_reason(unit: LaunchUnit, reason: str) -> None:
    unit.reason = reason
    unit.save(update_fields=["reason"])


def _check_wanted(unit: LaunchUnit, subjects: Sequence[str]) -> None:
    """Prevents launches for nodes that were given back while this process slept. Giving back waits for this transaction
    and then sees the attempt."""
    if unit.role != MachineRole.NODE:
        return
    orders = ProviderCall.objects.select_for_update(of=("self",)).filter(node_id__in=subjects)
    ordered = set(orders.filter(action=ProviderAction.LAUNCH).order_by("node_id").values_list("node_id", flat=True))
    if missing := sorted(set(subjects) - ordered):
        raise Later(f"{', '.join(missing)} of {unit.id} was given back in the meantime")


def _spend_launch_budget(cloud: CloudRegion, machines: int) -> None:
    """Before the attempt is written: one that was never called would be in doubt."""
    try:
        not_before = budget_spend(cloud.aws_region, "RunInstances", machines)
    except ValueError as error:
        raise ProviderError(str(error)) from error
    if not_before is not None:
        raise Later("the own call budget of launches is used up", until_s(not_before, clock.now()))


def _call_attempt(row: LaunchAttempt) -> Launched:
    """Makes the one call of a stored attempt and applies its answer."""
    region = row.base["boot"]["region"]
    instances: list[dict[str, Any]] = []
    try:
        instances = calls.send("ec2", "RunInstances", region, request_of(row))["Instances"]
        verdict = Verdict(LaunchOutcome.LAUNCHED, f"{len(instances)} machines")
    except calls.CallFailed as error:
        if error.code == THROTTLED:
            budget_throttled(region, "RunInstances")
        verdict = Verdict(LaunchOutcome.UNKNOWN, str(error))
        if error.code:
            verdict = classify(error.code, error.text, error.http_status)
    now = clock.now()
    with transaction.atomic():
        unit, row = _lock_attempt(row)
        if row.ended_at is not None:
            return _recorded_outcome(row)
        step = after_call(attempt_view(row), verdict.outcome, now)
        attempt_record(row, step, verdict.text, now, verdict.scope)
        if verdict.outcome is LaunchOutcome.LAUNCHED:
            machines_record(row, instances, now)
        is_over = isinstance(step, EndAttempt)
        if is_over and verdict.outcome in (LaunchOutcome.LAUNCHED, LaunchOutcome.REFUSED, LaunchOutcome.ATTEMPT_ENDED):
            unit_close(unit, f"attempt {row.number} in {attempt_view(row).pool.name}: {verdict.text}", now)
    if verdict.outcome is LaunchOutcome.LAUNCHED:
        return Launched(row)
    raise _provider_error(row, verdict, now, is_over=is_over)


def _provider_error(row: LaunchAttempt, verdict: Verdict, now: datetime, *, is_over: bool) -> ProviderError:
    pool = attempt_view(row).pool
    text = f"{pool.name}: {verdict.text}"
    if not is_over:
        again: ProviderError = Later(text) if verdict.outcome is LaunchOutcome.LATER else Unknown(text)
        again.retry_after_s = until_s(row.again_at, now) if row.again_at is not None else None
        return again
    match verdict.outcome:
        case LaunchOutcome.NO_CAPACITY:
            return NoCapacity(text)
        case LaunchOutcome.NO_QUOTA:
            quota = NoQuota(text, quota_name(pool.instance_type, Market(pool.market)))
            quota.retry_after_s = None  # its pools are paused; another market may have another quota
            return quota
        case LaunchOutcome.ATTEMPT_ENDED:
            return AttemptEnded(text)
    return ProviderError(text)


def _search_attempt(planned: _Search, install: str, *, wanted: bool) -> Launched | NothingLaunched:
    """Searches for an attempt's machines by their tags. An incomplete list proves nothing."""
    row, complete = planned.attempt, True
    instances: list[dict[str, Any]] = []
    try:
        instances = instances_of(row, install)
    except calls.CallFailed:
        complete = False
    now = clock.now()
    with transaction.atomic():
        unit, row = _lock_attempt(row)
        if row.ended_at is not None:
            return _recorded_outcome(row)
        step = after_search(attempt_view(row), len(instances), complete, now)
        attempt_record(row, step, f"{planned.reason}; a search found {len(instances)}", now)
        is_over = isinstance(step, EndAttempt)
        if instances:
            machines_record(row, instances, now)
        if is_over and (not wanted or step.outcome in (LaunchOutcome.LAUNCHED, LaunchOutcome.REFUSED)):
            unit_close(unit, row.text, now)
    if instances:
        return Launched(row)
    if is_over and not wanted:
        return NothingLaunched()
    if is_over and step.outcome is LaunchOutcome.REFUSED:
        raise ProviderError(row.text)
    raise Later(row.text, until_s(row.again_at, now) if not is_over and row.again_at is not None else None)


def instances_of(row: LaunchAttempt, install: str) -> list[dict[str, Any]]:
    """Returns what EC2 lists with the tags of an attempt, including terminated machines. Raises CallFailed if the list
    is not complete."""
    wanted = {TAG_INSTALL: install, TAG_UNIT: row.unit_id, TAG_ATTEMPT: str(row.number)}
    filters = [{"Name": f"tag:{key}", "Values": [value]} for key, value in wanted.items()]
    answers = calls.pages("DescribeInstances", row.base["boot"]["region"], Filters=filters, MaxResults=1000)
    return [instance for page in answers for one in page["Reservations"] for instance in one["Instances"]]


def _lock_attempt(row: LaunchAttempt) -> tuple[LaunchUnit, LaunchAttempt]:
    unit = LaunchUnit.objects.select_for_update().get(pk=row.unit_id)
    return unit, LaunchAttempt.objects.select_related("unit").get(pk=row.pk)


def _recorded_outcome(row: LaunchAttempt) -> Launched:
    """Another process took this step in the meantime."""
    if row.outcome == LaunchOutcome.LAUNCHED:
        return Launched(row)
    raise Later(f"attempt {row.number} of {row.unit_id} has ended in the meantime: {row.text}")


RELIST_AFTER_S = 20.0
"""After this long, a machine in doubt is listed by its own call."""
IN_DOUBT_RETRY_S = 5.0


class AwsProvider:
    """Covers every region of EC2 that has a stack."""

    name = PROVIDER

    @classmethod
    def from_settings(cls) -> "AwsProvider":
        return cls()

    def launch(self, specs: Sequence[LaunchSpec]) -> tuple[Found, ...]:
        unit = _unit_of(specs)
        launched = unit_advance(unit.pk, [spec.id for spec in specs])
        if not isinstance(launched, Launched):
            raise ProviderError(f"{unit}: it is no longer wanted")
        pool = attempt_view(launched.attempt).pool
        rows = {row.runs: row for row in launched.attempt.machines.all()}
        return tuple(_found_machine(rows.get(spec.id), pool) for spec in specs)

    def restart_agent(self, node_id: str) -> None:
        agent_start_again(_running_machines([node_id]).get(node_id), node_id)

    def move_agents(self, releases: Mapping[str, str]) -> dict[str, str]:
        """Does nothing: a machine's orders name its release (`fleet.machines.selectors.machine_orders`)."""
        return {}

    def describe(self, node_ids: Sequence[str]) -> dict[str, ProviderStatus]:
        now = clock.now()
        old = Q(cloud_seen_at=None) | Q(cloud_seen_at__lt=now - timedelta(seconds=RELIST_AFTER_S))
        mine = Machine.objects.filter(provider=PROVIDER, runs__in=node_ids).exclude(state=MachineState.GONE)
        machines_refresh(list(mine.filter(old).exclude(cloud_state__in=ENDED)), now)
        rows = _running_machines(node_ids)
        return {node: _provider_status(rows.get(node)) for node in node_ids}

    def reboot(self, node_id: str) -> None:
        machine = _running_machines([node_id]).get(node_id)
        if machine is None or machine.cloud_state in ENDED:
            raise ProviderError(f"{node_id} has no machine to reboot")
        install_that_may_change(clock.now())
        region = cloud_region(machine.region_id).aws_region
        try:
            calls.call("ec2", "RebootInstances", region, InstanceIds=[machine.provider_id])
        except calls.Refused as error:
            if error.is_for_now:
                raise Later(f"{machine.provider_id} is not rebooted yet: {error}") from error
            raise ProviderError(f"{machine.provider_id} cannot be rebooted: {error}") from error
        except calls.Unanswered as error:
            raise Unknown(f"whether {machine.provider_id} was rebooted is not known: {error}") from error

    def terminate(self, node_id: str) -> None:
        _settle_launches(node_id)
        machine = _running_machines([node_id]).get(node_id)
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
            raise Unknown(f"whether {machine.provider_id} was terminated is not known: {error}") from error
        states_store({one["InstanceId"]: one["CurrentState"]["Name"] for one in answer["TerminatingInstances"]}, now)

    def describe_all(self) -> dict[str, ProviderStatus]:
        """Covers recorded machines. Garbage collection of the cloud (`cloud_machine_garbage`) finds the others."""
        rows = Machine.objects.filter(provider=PROVIDER, role=MachineRole.NODE.value, state=MachineState.TAKEN.value)
        return {row.runs: _provider_status(row) for row in rows}


def _unit_of(specs: Sequence[LaunchSpec]) -> LaunchUnit:
    """The row of the unit of these machines; a machine that is launched alone is its own unit."""
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


def _found_machine(row: Machine | None, pool: PoolView) -> Found:
    """Ports are stated by the agent. A machine that was terminated before it was found has no row."""
    address = row.address if row is not None else None
    return Found(address=address, topology=pool.path, market=pool.market.value)


def _running_machines(node_ids: Sequence[str]) -> dict[str, Machine]:
    rows = Machine.objects.filter(provider=PROVIDER, runs__in=node_ids).exclude(state=MachineState.GONE)
    return {row.runs: row for row in rows}


def _provider_status(row: Machine | None) -> ProviderStatus:
    """`gone` only if its end was seen. Whether its agent is dead is known from the machine's agent while connected."""
    if row is None or not row.cloud_state:
        return ProviderStatus.UNKNOWN
    if row.cloud_state in ENDED:
        return ProviderStatus.GONE
    if row.connected:
        return reported_status(row.phase)
    return ProviderStatus.SILENT if row.last_seen_at is not None else ProviderStatus.RUNNING


def _settle_launches(node_id: str) -> None:
    """Finds the machines of earlier launches for a node that is given back, so that they can be terminated. Raises
    Later or Unknown if it is not known yet."""
    for attempt in LaunchAttempt.objects.filter(ended_at=None, subjects__contains=[node_id]).select_related("unit"):
        unit = attempt.unit
        orders = ProviderCall.objects.filter(Q(unit=unit.pk) | Q(node_id=unit.pk), action=ProviderAction.LAUNCH)
        if orders.exists():
            raise Later(f"the launch of {unit} is in doubt, and other nodes of it still wait", IN_DOUBT_RETRY_S)
        unit_advance(unit.pk, [])


def _not_ended(machine: Machine, error: calls.Refused) -> ProviderError:
    if error.not_before is not None:
        return Later(str(error), (error.not_before - clock.now()).total_seconds())
    if error.code == "InvalidInstanceID.NotFound":
        # Not found proves nothing: new machines are not listed yet. Two complete lists do (`listing_store`).
        return Unknown(f"{machine.provider_id} is not found; it counts as gone once two complete lists lack it")
    return ProviderError(f"{machine.provider_id} could not be terminated: {error}")
