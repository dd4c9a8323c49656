"""Counts the time, cost and energy of machines in the cells of each deployment, splits each past hour over its
accounts, and opens or closes incidents about implausible power meters. It runs under the lease of usage counting."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from django.db import connection, transaction
from django.db.models import Sum

from fleet.capacity.planning.rates import Offer, Source, emission, machine_price, power_rating
from fleet.capacity.selectors import rates_at
from fleet.clouds.models import CloudRegion
from fleet.faults.models import Incident
from fleet.faults.services.incidents import incident_open, incidents_close
from fleet.machines.models import Machine
from fleet.nodes.models import Node
from fleet.reconcile.planning.states import IncidentState, MachineState, NodeState
from models_registry.instance_types.selectors import instance_shapes
from traffic.routing.models import IngressReport
from traffic.usage.models import ACCOUNT_OF_SHARE, KIND, CellHour, CostShare, UsageHour, UsageMark
from traffic.usage.planning.energy import (
    POWER_METER,
    Energy,
    MeterMark,
    MeterSample,
    MeterTotals,
    Suspicion,
    meters_of,
    plan_energy,
    plan_power_meters,
    use_of,
)
from traffic.usage.planning.prices import HOUR, MICRO, Kind, cost_of, parts_of_amount, parts_of_hours, split_hour
from traffic.usage.selectors.weights import fits_at, token_prices, weighing
from traffic.usage.services.day_sums import days_reopen

CLOCK = ("clock", "machines", "")
"""Mark up to which machines were counted, in Unix milliseconds."""
METERS = "energy"
"""Source of marks about counted energy of nodes."""
OF_THIS_HOST = "local"
"""Provider whose nodes share one host: meters there cover all of them, so they are ignored."""
LOOK_EVERY = timedelta(seconds=15)
"""A pass over 2,000 nodes takes 0.2 s, with meters 0.5 s, and machines change less often than tokens are counted."""
SETTLED_AFTER = timedelta(seconds=30)
"""Time after the end of an hour until its last pass has ended."""
HOURS_SETTLED_AT_ONCE = 200
_SUMMED = (
    "machine_ms", "busy_ms", "spent", "busy_spent", "measured_uj", "rated_uj", "estimated_uj", "busy_uj", "unrated_ms",
    "refused",
)  # fmt: skip
_LATER = (
    "cost", "idle", "energy_uj", "idle_uj", "carbon_ug", "idle_carbon_ug", "energy_source", "carbon_source",
    "weights_source",
)  # fmt: skip
"""Columns that are known when the hour is settled."""
_ADD = f"""
    INSERT INTO traffic_cellhour
        (hour, {", ".join((*KIND, *_SUMMED, "cost_source", *_LATER))}, settled)
    VALUES ({", ".join(["%s"] * (2 + len(KIND) + len(_SUMMED)))}, {", ".join(["0"] * len(_LATER))}, false)
    ON CONFLICT (hour, {", ".join(KIND)}) DO UPDATE SET
    {", ".join(f"{name} = traffic_cellhour.{name} + EXCLUDED.{name}" for name in _SUMMED)},
    cost_source = greatest(traffic_cellhour.cost_source, EXCLUDED.cost_source)
    WHERE NOT traffic_cellhour.settled
"""  # noqa: S608 - only names from above


@dataclass(slots=True)
class _Taken:
    """Work of machines of one kind since the last pass. `price` is their total per hour in millionths of a dollar."""

    machines: int = 0
    busy: int = 0
    price: int = 0
    busy_price: int = 0
    source: Source = Source.MEASURED
    energy: Energy = field(default_factory=Energy)
    busy_uj: int = 0


def machine_hours_count(*, now: datetime) -> None:
    """Adds the time since the last pass to the current machines, and settles past hours."""
    with transaction.atomic():
        since = _move_clock(now)
        if since is not None:
            _add_hours(since, now)
    hours = CellHour.objects.filter(settled=False, hour__lt=now - HOUR - SETTLED_AFTER)
    for hour, deployment in hours.order_by("hour").values_list("hour", "deployment").distinct()[:HOURS_SETTLED_AT_ONCE]:
        _settle_hour(hour, deployment)


def _move_clock(now: datetime) -> datetime | None:
    """Moves the mark to `now` and returns its previous value, or None if no pass is due."""
    source, subject, life = CLOCK
    at_ms = round(now.timestamp() * 1000)
    mark, is_first = UsageMark.objects.get_or_create(
        source=source, subject=subject, since=life, defaults={"totals": {"at_ms": at_ms}, "at": now}
    )
    if is_first:
        return None
    since = datetime.fromtimestamp(mark.totals["at_ms"] / 1000, now.tzinfo)
    if now - since < LOOK_EVERY:
        return None
    UsageMark.objects.filter(pk=mark.pk).update(totals={"at_ms": at_ms}, at=now)
    return since


def _add_hours(since: datetime, now: datetime) -> None:
    parts = parts_of_hours(since, now)
    days_reopen(hour for hour, _ in parts)
    taken = _taken_since(sum(ms for _, ms in parts), now)
    rows = [row for kind in sorted(taken) for row in _rows_of(kind, taken[kind], parts)]
    with connection.cursor() as cursor:
        cursor.executemany(_ADD, rows)


def _rows_of(kind: Kind, taken: _Taken, parts: list[tuple[datetime, int]]) -> Iterable[tuple[Any, ...]]:
    """Energy covers the whole time, so it is spread evenly over its hours."""
    energy = taken.energy
    amounts = (energy.measured, energy.rated, energy.estimated, taken.busy_uj, energy.unrated_ms, energy.refused)
    of_hours = [parts_of_amount(amount, parts) for amount in amounts]
    for hour, ms in parts:
        if ms:
            sums = (ms * taken.machines, ms * taken.busy, ms * taken.price, ms * taken.busy_price)
            yield (hour, *kind, *sums, *(of_hour[hour] for of_hour in of_hours), taken.source.value)


def _taken_since(elapsed_ms: int, now: datetime) -> dict[Kind, _Taken]:
    """Returns the work of the current machines by kind, and moves the marks of their meters."""
    in_flight = _cells_in_flight()
    rates = rates_at(now)
    shapes = instance_shapes()
    bought = {
        node: Offer(market, usd)
        for node, market, usd in Machine.objects.exclude(state=MachineState.GONE)
        .exclude(runs="")
        .values_list("runs", "market", "price_per_hour")
    }
    marks = _meter_marks()
    kept: dict[str, dict[str, MeterMark]] = {}
    looks: dict[str, MeterSample] = {}
    found: dict[Kind, _Taken] = defaultdict(_Taken)
    report, member = "report__telemetry__", "member__cell__"
    columns = (
        "id", "region_id", "region__provider", "instance_type_id", "report__connected", f"{report}energy",
        f"{report}accelerators", f"{report}host_cpu_percent", "member__cell_id", f"{member}deployment_id",
        f"{member}model_version__model_id", f"{member}model_version__version",
    )  # fmt: skip
    nodes = Node.objects.exclude(state=NodeState.RETIRED).order_by()
    for row in nodes.values_list(*columns).iterator(chunk_size=2000):
        node, region, provider, instance_type, connected, meters, devices, cpu, cell, deployment, model, version = row
        shape = shapes[instance_type]
        is_busy = cell is not None and cell in in_flight
        offer = bought.get(node, Offer())
        price = machine_price(rates, shape, region, offer.usd, offer.market)
        believed = {} if provider == OF_THIS_HOST else meters_of(meters)
        use = use_of(devices, cpu, is_busy) if connected else use_of(None, None, is_busy)
        energy, node_marks = plan_energy(
            believed, marks.get(node, {}), elapsed_ms, power_rating(rates, shape, region), use
        )
        if node_marks:
            kept[node] = node_marks
        looks[node] = MeterSample(energy.refused, energy.measured + energy.rated > 0, bool(believed))
        reference = f"{model}@{version}" if cell is not None else ""
        taken = found[Kind(deployment or "", reference, region, instance_type)]
        taken.machines += 1
        taken.price += price.micro_usd
        taken.source = max(taken.source, price.source)
        taken.energy += energy
        if is_busy:
            taken.busy += 1
            taken.busy_price += price.micro_usd
            taken.busy_uj += energy.total
    _store_meter_marks(kept, marks, now)
    power_meters_check(looks=looks, now=now)
    return dict(found)


def _meter_marks() -> dict[str, dict[str, MeterMark]]:
    found: dict[str, dict[str, MeterMark]] = defaultdict(dict)
    for subject, totals in UsageMark.objects.filter(source=METERS).values_list("subject", "totals"):
        for part, mark in totals.items():
            found[subject][part] = MeterMark(MeterTotals(**mark["totals"]), mark["gap_ms"])
    return dict(found)


def _store_meter_marks(
    kept: dict[str, dict[str, MeterMark]], before: dict[str, dict[str, MeterMark]], now: datetime
) -> None:
    UsageMark.objects.filter(source=METERS, subject__in=before.keys() - kept.keys()).delete()
    UsageMark.objects.bulk_create(
        [
            UsageMark(
                source=METERS, subject=node, since="", at=now,
                totals={part: asdict(mark) for part, mark in kept[node].items()},
            )
            for node in sorted(kept)
        ],
        update_conflicts=True,
        unique_fields=["source", "subject", "since"],
        update_fields=["totals", "at"],
    )  # fmt: skip


def _cells_in_flight() -> set[str]:
    """Ingress counts are used because a node's own could be wrong."""
    reported: Iterable[object] = IngressReport.objects.filter(connected=True).values_list("telemetry__cells", flat=True)
    return {
        cell
        for cells in reported
        if isinstance(cells, dict)
        for cell, row in cells.items()
        if isinstance(row, dict) and row.get("in_flight")
    }


@transaction.atomic
def _settle_hour(hour: datetime, deployment: str) -> None:
    days_reopen([hour])
    machines = list(CellHour.objects.select_for_update().filter(hour=hour, deployment=deployment, settled=False))
    shares = list(CostShare.objects.select_for_update().filter(hour=hour, deployment=deployment).order_by("id"))
    price, fits = token_prices(hour + HOUR).get(deployment), fits_at(hour + HOUR)
    rates = rates_at(hour + HOUR)
    clouds = dict(CloudRegion.objects.values_list("region_id", "aws_region"))
    for row in machines:
        own = [share for share in shares if share.kind() == row.kind()]
        weighed = weighing(fits, row.version, row.instance_type, price)
        weights, row.weights_source = weighed.weights, weighed.source.value
        weigh = {
            share.pk: weights.of(share.prompt_tokens, share.cached_tokens, share.completion_tokens) for share in own
        }
        emitted = emission(rates, row.region, clouds.get(row.region, ""))
        _settle_row(row, own, weigh, emitted.ug_per_joule, emitted.source)
    CellHour.objects.bulk_update(machines, [*_LATER, "settled"])
    CostShare.objects.bulk_update(
        shares, ["cost", "energy_uj", "carbon_ug", "cost_source", "energy_source", "carbon_source"]
    )
    _add_to_usage(hour, deployment)


def _settle_row(
    row: CellHour, own: list[CostShare], weights: dict[int, int], ug_per_joule: Decimal, grid: Source
) -> None:
    energy = row.measured_uj + row.rated_uj + row.estimated_uj
    busy_ug = round(row.busy_uj * ug_per_joule / 1_000_000)
    cost = split_hour(cost_of(int(row.spent)), cost_of(int(row.busy_spent)), weights)
    joules = split_hour(energy, row.busy_uj, weights)
    carbon = split_hour(round(energy * ug_per_joule / 1_000_000), busy_ug, weights)
    row.cost, row.idle = cost.whole * MICRO, cost.idle * MICRO
    row.energy_uj, row.idle_uj = joules.whole, joules.idle
    row.carbon_ug, row.idle_carbon_ug = carbon.whole, carbon.idle
    row.energy_source = energy_source(row.rated_uj, row.estimated_uj, row.unrated_ms).value
    row.carbon_source, row.settled = max(row.energy_source, grid.value), True
    for share in own:
        share.cost = cost.of_accounts.get(share.pk, 0) * MICRO
        share.energy_uj = joules.of_accounts.get(share.pk, 0)
        share.carbon_ug = carbon.of_accounts.get(share.pk, 0)
        share.cost_source, share.energy_source = row.cost_source, row.energy_source
        share.carbon_source = row.carbon_source


def energy_source(rated_uj: int, estimated_uj: int, unrated_ms: int) -> Source:
    if unrated_ms:
        return Source.UNKNOWN
    return Source.ESTIMATED if estimated_uj else Source.RATED if rated_uj else Source.MEASURED


def _add_to_usage(hour: datetime, deployment: str) -> None:
    """Adds the accounts' costs on all machines to their usage rows."""
    sums = CostShare.objects.filter(hour=hour, deployment=deployment).order_by()
    by_account = {
        tuple(row[name] for name in ACCOUNT_OF_SHARE): row["total"]
        for row in sums.values(*ACCOUNT_OF_SHARE).annotate(total=Sum("cost"))
    }
    used = list(UsageHour.objects.select_for_update().filter(hour=hour, deployment=deployment).order_by("id"))
    for usage in used:
        account = tuple(getattr(usage, name) for name in ACCOUNT_OF_SHARE)
        usage.machine_cost = by_account.get(account, Decimal(0))
    UsageHour.objects.bulk_update(used, ["machine_cost"])


# Incidents about implausible power meters, within the pass that counts energy.

SUSPICIONS = "power-meter"
"""Source of marks about refused readings of a node."""


def power_meters_check(*, looks: Mapping[str, MeterSample], now: datetime) -> None:
    there = UsageMark.objects.filter(source=SUSPICIONS)
    before = {node: Suspicion(**totals) for node, totals in there.values_list("subject", "totals")}
    open_now = Incident.objects.filter(kind=POWER_METER, state=IncidentState.OPEN.value)
    open_about = frozenset(open_now.values_list("subject", flat=True))
    plan = plan_power_meters(looks, before, open_about, round(now.timestamp() * 1000))
    _remember_suspects(plan.suspicions, before, now)
    muted = set(Incident.objects.filter(kind=POWER_METER, muted_until__gt=now).values_list("subject", flat=True))
    for node, summary in plan.opened:
        if node in muted:
            continue
        one = plan.suspicions[node]
        row = Node.objects.select_related("member__cell").get(pk=node)
        cell = row.member.cell if hasattr(row, "member") else None
        incident_open(
            kind=POWER_METER,
            subject=node,
            summary=summary,
            evidence={"refused": one.refused, "since": _utc_text(one.first_ms), "until": _utc_text(one.last_ms)},
            now=now,
            region=row.region_id,
            node=node,
            cell=cell.pk if cell else "",
            deployment=cell.deployment_id if cell else "",
        )
    for node, why in plan.closed:
        incidents_close(kind=POWER_METER, subject=node, resolution=why, now=now)


def _remember_suspects(kept: Mapping[str, Suspicion], before: Mapping[str, Suspicion], now: datetime) -> None:
    UsageMark.objects.filter(source=SUSPICIONS, subject__in=before.keys() - kept.keys()).delete()
    UsageMark.objects.bulk_create(
        [
            UsageMark(source=SUSPICIONS, subject=node, since="", totals=asdict(one), at=now)
            for node, one in sorted(kept.items())
        ],
        update_conflicts=True,
        unique_fields=["source", "subject", "since"],
        update_fields=["totals", "at"],
    )


def _utc_text(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds")
