"""Adds usage of tenants and keys, as ingresses and cells report it, to hourly rows. Rows and marks are written in one
transaction, so each reported total counts once."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from typing import NamedTuple

from django.conf import settings
from django.db import connection, transaction
from django.db.models import F, Q
from django.db.models.expressions import RawSQL

from fleet.nodes.models import NodeReport
from kernel import live
from kernel.leases import lease_during
from models_registry.versions.planning.spec import adapter_names
from traffic.keys.models import ApplicationKey
from traffic.keys.planner import playground_key
from traffic.routing.models import IngressReport
from traffic.usage.models import (
    ACCOUNT,
    ACCOUNT_OF_SHARE,
    COUNTS,
    KIND,
    UsageMark,
)
from traffic.usage.planning.counting import (
    CREDIT,
    KEY,
    REFUSED,
    Account,
    CellRow,
    Claim,
    KeyScope,
    SourceTotals,
    UsagePlan,
    bound_claims,
    credit_marks,
    credit_of,
    keys_of_ingress,
    month_of,
    plan_claims,
    plan_usage,
    pools_of_ingress,
    refused_account,
    refused_of_ingress,
    rows_of_cell,
    summed,
)
from traffic.usage.planning.prices import Kind, charge
from traffic.usage.selectors.weights import token_prices
from traffic.usage.services.day_sums import days_reopen, days_sum, days_trim
from traffic.usage.services.machine_hours import machine_hours_count
from traffic.usage.services.token_fit import token_work_count

LEASE = "traffic:usage"
COUNT_LIMIT_S = 60.0
"""After this time another worker may count; a pass takes well below 1 s."""
MARKS_KEPT = timedelta(days=30)
"""Longer than HAProxy and cell proxies keep an idle subject."""
MARKS_RENEWED = timedelta(days=1)
OF_INGRESS = {"requests": "arrived", "limited": "limited", "errors": "failed"}
"""Column of each counter that ingresses keep for a key."""
_COLUMNS = (*COUNTS, "charged")
_ADD = f"""
    INSERT INTO traffic_usagehour ({", ".join((*ACCOUNT, "hour", *_COLUMNS))}, machine_cost)
    VALUES ({", ".join(["%s"] * (len(ACCOUNT) + 1 + len(_COLUMNS)))}, 0)
    ON CONFLICT ({", ".join(ACCOUNT)}, hour) DO UPDATE SET
    {", ".join(f"{name} = traffic_usagehour.{name} + EXCLUDED.{name}" for name in _COLUMNS)}
"""  # noqa: S608 - only names from above
_ADD_TO_MONTH = """
    INSERT INTO traffic_usagemonth (tenant, month, tokens, charged) VALUES (%s, %s, %s, %s)
    ON CONFLICT (tenant, month) DO UPDATE SET
    tokens = traffic_usagemonth.tokens + EXCLUDED.tokens, charged = traffic_usagemonth.charged + EXCLUDED.charged
"""
_WRITTEN = RawSQL("fleet_nodereport.xmin::text || fleet_nodereport.ctid::text", ())
"""The writer of a report's row and its place, which differ after each write, also within one transaction."""
_TOKENS = ("prompt_tokens", "cached_tokens", "completion_tokens")
_PLACE = (*KIND, *ACCOUNT_OF_SHARE)
_SHARE_SOURCES = ("cost_source", "energy_source", "carbon_source")
_SHARE_LATER = ("cost", "energy_uj", "carbon_ug", *_SHARE_SOURCES)
_ADD_TO_SHARES = f"""
    INSERT INTO traffic_costshare
        ({", ".join((*_PLACE, "hour", *_TOKENS, *_SHARE_LATER))})
    VALUES ({", ".join(["%s"] * (len(_PLACE) + 1 + len(_TOKENS)))}, {", ".join(["0"] * len(_SHARE_LATER))})
    ON CONFLICT (hour, {", ".join(_PLACE)}) DO UPDATE SET
    {", ".join(f"{name} = traffic_costshare.{name} + EXCLUDED.{name}" for name in _TOKENS)}
"""  # noqa: S608 - only names from above


class LeaderRows:
    """Usage in the reports of cell leaders, kept between passes of a process: only reports that were written since the
    last read are read again. A leader at rest writes one a minute, and has a row for each tenant and key."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, list[CellRow]]] = {}

    def read(self, versions: Mapping[str, str]) -> dict[str, list[CellRow]]:
        """Returns the rows of these nodes. `versions`: by node, a text that differs after each write of its report."""
        unread = [node for node, version in versions.items() if self._known.get(node, ("", []))[0] != version]
        stated = NodeReport.objects.filter(node_id__in=unread).values_list("node_id", "load__usage")
        fresh = {node: rows_of_cell(node, {"usage": usage}) for node, usage in stated}
        self._known = {
            node: (version, fresh[node]) if node in fresh else self._known.get(node, ("", []))
            for node, version in versions.items()
        }
        return {node: rows for node, (_, rows) in self._known.items()}


def usage_count(*, now: datetime, leader_rows: LeaderRows | None = None) -> int:
    """Counts new usage. Returns the number of changed rows; 0 while another worker counts. `leader_rows`: of earlier
    passes."""
    with lease_during(name=LEASE, ttl_s=COUNT_LIMIT_S, now=now) as is_ours:
        if not is_ours:
            return 0
        added = _count_usage(now, leader_rows or LeaderRows())
        token_work_count(now=now)
        machine_hours_count(now=now)
        return added


def usage_trim(*, now: datetime) -> None:
    """Sums past days, and deletes expired hours, days and marks."""
    days_sum(now=now)
    days_trim(now=now)
    UsageMark.objects.filter(at__lt=now - MARKS_KEPT).delete()


def _count_usage(now: datetime, leader_rows: LeaderRows) -> int:
    sent, leaders = _ingress_totals(), _leader_totals(leader_rows)
    keys = _keys_of(sent, (row for leader in leaders for row in leader.rows))
    kinds = {leader.source: leader.kind for leader in leaders}
    claims = [
        claim
        for leader in leaders
        for claim in plan_claims(leader.rows, leader.kind.deployment, leader.context_length, keys, leader.adapters)
    ]
    sources = {each.source for each in sent} | {claim.row.totals.source for claim in claims} | {CREDIT}
    with transaction.atomic():
        days_reopen([now])
        stored = list(UsageMark.objects.filter(source__in=sources))
        marks = {each.place: each for each in (SourceTotals(m.source, m.subject, m.since, m.totals) for m in stored)}
        seen = plan_usage(sent, marks)
        credit = credit_of(seen, marks)
        believed = plan_usage(bound_claims(claims, marks, credit), marks)
        _store_marks([*seen.marks, *believed.marks, *credit_marks(credit, marks)], now)
        _renew_marks(stored, {*(each.place for each in sent), *(claim.row.totals.place for claim in claims)}, now)
        used = _by_account(seen, believed, claims, keys)
        _note_use(seen, now)
        _add_usage(used, now)
        _add_to_shares(_by_machines(believed, claims, kinds), now)
    if used:
        live.push("usage")
    return len(used)


def _ingress_totals() -> list[SourceTotals]:
    ingresses = IngressReport.objects.exclude(telemetry={}).values_list("ingress_id", "telemetry")
    readers = (keys_of_ingress, pools_of_ingress, refused_of_ingress)
    return [each for ingress, telemetry in ingresses for read in readers for each in read(ingress, telemetry)]


class _Leader(NamedTuple):
    source: str
    kind: Kind
    context_length: int
    adapters: tuple[str, ...]
    rows: list[CellRow]


def _leader_totals(leader_rows: LeaderRows) -> list[_Leader]:
    """Returns counters of leaders about their own cells. Reports of other nodes, and about a cell that the node has
    left, are ignored."""
    cell = "node__member__cell__"
    leaders = NodeReport.objects.filter(load__isnull=False, node__member__rank=0, cell=F("node__member__cell_id"))
    version = f"{cell}model_version__"
    fields = (
        "node_id", "written", f"{cell}deployment_id", f"{version}context_length", f"{version}adapters",
        f"{version}model_id", f"{version}version", f"{cell}region_id", "node__instance_type_id",
    )  # fmt: skip
    found = list(leaders.annotate(written=_WRITTEN).values_list(*fields))
    rows_of = leader_rows.read({node: written for node, written, *_ in found})
    read = []
    for node, _, deployment, context, adapters, model, name, region, kind in found:
        if rows := rows_of[node]:
            place = Kind(deployment, f"{model}@{name}", region, kind)
            read.append(_Leader(rows[0].totals.source, place, context, adapter_names(adapters), rows))
    return read


def _keys_of(sent: Iterable[SourceTotals], rows: Iterable[CellRow]) -> dict[str, KeyScope]:
    prefixes = {each.subject.removeprefix(KEY) for each in sent if each.subject.startswith(KEY)}
    prefixes |= {each.subject.split("/")[1] for each in sent if each.subject.startswith(REFUSED)}
    tenants = set()
    for row in rows:
        prefixes.add(row.key)
        if not row.key:
            tenants.add(row.tenant)
    known = ApplicationKey.objects.filter(Q(prefix__in=prefixes) | Q(tenant__in=tenants))
    columns = known.values_list("prefix", "tenant", "deployments")
    keys = {prefix: KeyScope(tenant, frozenset(scope)) for prefix, tenant, scope in columns}
    own = playground_key(settings.SECRET_KEY)
    return {**keys, own.prefix: KeyScope(own.tenant)}


def _by_account(
    seen: UsagePlan, believed: UsagePlan, claims: Iterable[Claim], keys: Mapping[str, KeyScope]
) -> dict[Account, dict[str, int]]:
    used: dict[Account, dict[str, int]] = defaultdict(dict)
    tenants = {prefix: scope.tenant for prefix, scope in keys.items()}
    for (_, subject, _), counts in seen.used.items():
        if subject.startswith(REFUSED):
            account = refused_account(subject, tenants)
            used[account] = summed(used[account], counts)
        key = subject.removeprefix(KEY)
        if subject.startswith(KEY) and key in keys:
            columns = {OF_INGRESS[name]: count for name, count in counts.items()}
            account = Account(keys[key].tenant, key)
            used[account] = summed(used[account], columns)
    accounts = {claim.row.totals.place: claim.account for claim in claims}
    for place, counts in believed.used.items():
        used[accounts[place]] = summed(used[accounts[place]], counts)
    return dict(used)


def _by_machines(
    believed: UsagePlan, claims: Iterable[Claim], kinds: Mapping[str, Kind]
) -> dict[tuple[Kind, Account], dict[str, int]]:
    accounts = {claim.row.totals.place: claim.account for claim in claims}
    used: dict[tuple[Kind, Account], dict[str, int]] = defaultdict(dict)
    for place, counts in believed.used.items():
        tokens = {name: counts[name] for name in _TOKENS if counts.get(name)}
        if tokens:
            where = kinds[place[0]], accounts[place]
            used[where] = summed(used[where], tokens)
    return dict(used)


def _note_use(seen: UsagePlan, now: datetime) -> None:
    prefixes = [subject.removeprefix(KEY) for _, subject, _ in seen.used if subject.startswith(KEY)]
    ApplicationKey.objects.filter(prefix__in=prefixes).update(last_used_at=now)


def _store_marks(marks: Iterable[SourceTotals], now: datetime) -> None:
    UsageMark.objects.bulk_create(
        [UsageMark(source=m.source, subject=m.subject, since=m.since, totals=dict(m.totals), at=now) for m in marks],
        update_conflicts=True,
        unique_fields=["source", "subject", "since"],
        update_fields=["totals", "at"],
    )


def _renew_marks(stored: Iterable[UsageMark], spoken_of: set[tuple[str, str, str]], now: datetime) -> None:
    """Renews marks of subjects that are still reported without growth; others expire."""
    stale = [
        mark.pk
        for mark in stored
        if mark.at < now - MARKS_RENEWED
        and (mark.source == CREDIT or (mark.source, mark.subject, mark.since) in spoken_of)
    ]
    UsageMark.objects.filter(pk__in=stale).update(at=now)


def _add_usage(used: Mapping[Account, Mapping[str, int]], now: datetime) -> None:
    prices = token_prices(now)
    hour, month = now.replace(minute=0, second=0, microsecond=0), month_of(now)
    rows: list[tuple[str | int | Decimal | datetime, ...]] = []
    months: dict[str, tuple[int, Decimal]] = defaultdict(lambda: (0, Decimal(0)))
    for account in sorted(used):  # fixed order, so that writers cannot deadlock
        counts = used[account]
        charged = charge(counts, prices.get(account.deployment))
        rows.append((*account, hour, *(counts.get(name, 0) for name in COUNTS), charged))
        tokens, money = months[account.tenant]
        new_tokens = counts.get("prompt_tokens", 0) + counts.get("completion_tokens", 0)
        months[account.tenant] = (tokens + new_tokens, money + charged)
    with connection.cursor() as cursor:
        cursor.executemany(_ADD, rows)
        cursor.executemany(
            _ADD_TO_MONTH, [(tenant, month, *use) for tenant, use in sorted(months.items()) if tenant and any(use)]
        )


def _add_to_shares(used: Mapping[tuple[Kind, Account], Mapping[str, int]], now: datetime) -> None:
    hour = now.replace(minute=0, second=0, microsecond=0)
    rows: list[tuple[str | int | datetime, ...]] = [
        (
            *kind,
            account.tenant,
            account.key,
            account.serving_class,
            account.adapter,
            hour,
            *(counts.get(name, 0) for name in _TOKENS),
        )
        for (kind, account), counts in sorted(used.items())
    ]
    with connection.cursor() as cursor:
        cursor.executemany(_ADD_TO_SHARES, rows)
