"""Counts how long machines are in the cells of each deployment, and splits what an hour of them cost once it is over.
It belongs to the counting of usage and runs under its lease."""

from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime, timedelta
from decimal import Decimal

from django.db import connection, transaction

from fleet.models import CellMember
from traffic.models import CellHour, IngressReport, UsageHour, UsageMark
from traffic.planning.machine_cost import HOUR, MachineHour, micros, parts_of_hours, split_hour

CLOCK = ("clock", "machines", "")
"""The mark that says until when machines were counted, in milliseconds since 1970."""
SETTLED_AFTER = timedelta(seconds=30)
"""Of the end of an hour: whoever began to count in it has ended."""
HOURS_SETTLED_AT_ONCE = 200
_ADD = """
    INSERT INTO traffic_cellhour
        (deployment, instance_type, hour, machine_ms, busy_ms, price, cost, idle, settled)
    VALUES (%s, %s, %s, %s, %s, %s, 0, 0, false)
    ON CONFLICT (hour, deployment, instance_type) DO UPDATE SET
        machine_ms = traffic_cellhour.machine_ms + EXCLUDED.machine_ms,
        busy_ms = traffic_cellhour.busy_ms + EXCLUDED.busy_ms,
        price = EXCLUDED.price
    WHERE NOT traffic_cellhour.settled
"""


def machine_hours_count(*, now: datetime) -> None:
    """Add the time since the last look to the machines that are in cells now, and settle the hours that are over."""
    with transaction.atomic():
        since = _since(now)
        if since is not None and since < now:
            _add(since, now)
    hours = CellHour.objects.filter(settled=False, hour__lt=now - HOUR - SETTLED_AFTER)
    for hour, deployment in hours.order_by("hour").values_list("hour", "deployment").distinct()[:HOURS_SETTLED_AT_ONCE]:
        _settle(hour, deployment)


def _since(now: datetime) -> datetime | None:
    """Until when was counted; None at the first time. From now on it is `now`."""
    source, subject, life = CLOCK
    at_ms = round(now.timestamp() * 1000)
    mark, is_first = UsageMark.objects.get_or_create(
        source=source, subject=subject, since=life, defaults={"totals": {"at_ms": at_ms}, "at": now}
    )
    if is_first:
        return None
    since = datetime.fromtimestamp(mark.totals["at_ms"] / 1000, now.tzinfo)
    if since < now:
        UsageMark.objects.filter(pk=mark.pk).update(totals={"at_ms": at_ms}, at=now)
    return since


def _add(since: datetime, now: datetime) -> None:
    machines, busy, prices = _machines_in_cells()
    rows = [
        (deployment, kind, hour, ms * count, ms * busy[deployment, kind], prices[kind])
        for hour, ms in parts_of_hours(since, now)
        for (deployment, kind), count in sorted(machines.items())
        if ms
    ]
    with connection.cursor() as cursor:
        cursor.executemany(_ADD, rows)


Kind = tuple[str, str]


def _machines_in_cells() -> tuple[dict[Kind, int], dict[Kind, int], dict[str, Decimal]]:
    """Deployment and instance type -> machines in its cells, and those whose cell has requests in flight; instance type
    -> price."""
    in_flight = _cells_in_flight()
    machines: dict[Kind, int] = defaultdict(int)
    busy: dict[Kind, int] = defaultdict(int)
    prices: dict[str, Decimal] = {}
    kind = "node__instance_type__"
    columns = ("cell_id", "cell__deployment_id", f"{kind}name", f"{kind}price_per_hour")
    for cell, deployment, name, price in CellMember.objects.values_list(*columns):
        machines[deployment, name] += 1
        busy[deployment, name] += cell in in_flight
        prices[name] = micros(Decimal(str(price)))
    return dict(machines), busy, prices


def _cells_in_flight() -> set[str]:
    """As ingresses see it: what a cell says of itself would be its node's word."""
    reported: Iterable[object] = IngressReport.objects.filter(connected=True).values_list("telemetry__cells", flat=True)
    return {
        cell
        for cells in reported
        if isinstance(cells, dict)
        for cell, row in cells.items()
        if isinstance(row, dict) and row.get("in_flight")
    }


@transaction.atomic
def _settle(hour: datetime, deployment: str) -> None:
    """Split an hour of a deployment over those who used it."""
    machines = list(CellHour.objects.select_for_update().filter(hour=hour, deployment=deployment, settled=False))
    used = list(UsageHour.objects.select_for_update().filter(hour=hour, deployment=deployment).order_by("id"))
    told = [MachineHour(row.machine_ms, row.busy_ms, row.price) for row in machines]
    split = split_hour(told, {row.pk: row.prompt_tokens + row.completion_tokens for row in used})
    for usage in used:
        usage.machine_cost = split.of_accounts.get(usage.pk, Decimal(0))
    UsageHour.objects.bulk_update(used, ["machine_cost"])
    for row, part in zip(machines, told, strict=True):
        row.cost, row.settled = part.cost, True
        row.idle = part.idle if split.of_accounts else part.cost
    CellHour.objects.bulk_update(machines, ["cost", "idle", "settled"])
