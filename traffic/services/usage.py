"""Adds up what tenants and keys used, from what ingresses and cells report, into rows by the hour. Each total that was
reported counts once, however often it is read: the rows and how far they go are written in one transaction."""

from datetime import datetime, timedelta

from django.db import connection, transaction
from django.db.models import Q

from fleet.models import NodeReport
from kernel import live
from kernel.leases import lease_release, lease_take, this_holder
from traffic.models import ApplicationKey, IngressReport, UsageHour, UsageMark
from traffic.planning.usage import (
    CREDIT,
    KEY,
    POOL,
    TENANT,
    CellBounds,
    SourceTotals,
    UsagePlan,
    bound_claims,
    credit_marks,
    plan_usage,
    pools_of_ingress,
    totals_of_cell,
    totals_of_ingress,
    unclaimed_requests,
)

LEASE = "traffic:usage"
COUNT_LIMIT_S = 60.0
"""After this another worker may count; one look takes well below a second."""
HOURS_KEPT = timedelta(days=90)
MARKS_KEPT = timedelta(days=30)
"""Longer than HAProxy and cell proxies remember an idle subject."""
MARKS_RENEWED = timedelta(days=1)
FIELDS = ("requests", "limited", "errors", "prompt_tokens", "completion_tokens")
ADD = f"""
    INSERT INTO traffic_usagehour (tenant, key, hour, {", ".join(FIELDS)})
    VALUES (%s, %s, %s, {", ".join(["%s"] * len(FIELDS))})
    ON CONFLICT (tenant, key, hour) DO UPDATE SET
    {", ".join(f"{name} = traffic_usagehour.{name} + EXCLUDED.{name}" for name in FIELDS)}
"""  # noqa: S608 - only names from above


def usage_count(*, now: datetime) -> int:
    """Count what is new. Returns how many rows got something; 0 also while another worker counts."""
    holder = this_holder()
    if lease_take(name=LEASE, holder=holder, ttl_s=COUNT_LIMIT_S, now=now) is None:
        return 0
    try:
        return _count(now)
    finally:
        lease_release(name=LEASE, holder=holder, now=now)


def usage_trim(*, now: datetime) -> None:
    """Forget hours and marks that are too old to matter."""
    UsageHour.objects.filter(hour__lt=now - HOURS_KEPT).delete()
    UsageMark.objects.filter(at__lt=now - MARKS_KEPT).delete()


def _count(now: datetime) -> int:
    sent, claimed = _sent(), _claimed()
    sources = {each.source for each in sent} | {claim.source for claim, _ in claimed} | {CREDIT}
    with transaction.atomic():
        rows = {(mark.source, mark.subject): mark for mark in UsageMark.objects.filter(source__in=sources)}
        marks = {place: SourceTotals(*place, mark.since, mark.totals) for place, mark in rows.items()}
        seen = plan_usage(sent, marks)
        allowed, credit = bound_claims(claimed, marks, unclaimed_requests(seen, marks))
        plan = plan_usage([*sent, *allowed], marks)
        _remember(UsagePlan(marks=(*plan.marks, *credit_marks(credit, marks))), now)
        stale = [row.pk for place, row in rows.items() if row.at < now - MARKS_RENEWED]
        UsageMark.objects.filter(pk__in=stale).update(at=now)
        added = _add(plan, now)
    if added:
        live.push("usage")
    return added


def _sent() -> list[SourceTotals]:
    """What ingresses counted, by key and by deployment."""
    ingresses = IngressReport.objects.exclude(telemetry={}).values_list("ingress_id", "telemetry")
    return [
        each
        for ingress, telemetry in ingresses
        for each in (*totals_of_ingress(ingress, telemetry), *pools_of_ingress(ingress, telemetry))
    ]


def _claimed() -> list[tuple[SourceTotals, CellBounds]]:
    """What leaders count of tenants, each about its own cell. Other nodes have nothing to count."""
    cell = "node__member__cell__"
    fields = ("node_id", "load", f"{cell}deployment_id", f"{cell}model_version__context_length")
    says = ~Q(load__usage=[]) & Q(load__has_key="usage") | ~Q(load__tenants={}) & Q(load__has_key="tenants")
    leaders = NodeReport.objects.filter(says, node__member__rank=0)
    keys = list(ApplicationKey.objects.values_list("tenant", "deployments").distinct())
    claimed = []
    for node, load, deployment, context_length in leaders.values_list(*fields):
        tenants = frozenset(tenant for tenant, scope in keys if not scope or deployment in scope)
        bounds = CellBounds(deployment, tenants, context_length)
        claimed += [(claim, bounds) for claim in totals_of_cell(node, load)]
    return claimed


def _remember(plan: UsagePlan, now: datetime) -> None:
    UsageMark.objects.bulk_create(
        [
            UsageMark(source=m.source, subject=m.subject, since=m.since, totals=dict(m.totals), at=now)
            for m in plan.marks
        ],
        update_conflicts=True,
        unique_fields=["source", "subject"],
        update_fields=["since", "totals", "at"],
    )


def _add(plan: UsagePlan, now: datetime) -> int:
    prefixes = [subject.removeprefix(KEY) for subject in plan.used if subject.startswith(KEY)]
    tenants = dict(ApplicationKey.objects.filter(prefix__in=prefixes).values_list("prefix", "tenant"))
    ApplicationKey.objects.filter(prefix__in=prefixes).update(last_used_at=now)
    hour = now.replace(minute=0, second=0, microsecond=0)
    rows: list[tuple[str | int | datetime, ...]] = []
    for subject, counts in sorted(plan.used.items()):  # in one order, so that no two writers wait for each other
        key = subject.removeprefix(KEY) if subject.startswith(KEY) else ""
        if subject.startswith(POOL):
            continue
        tenant = tenants.get(key) if key else subject.removeprefix(TENANT)
        if tenant is not None:
            rows.append((tenant, key, hour, *(counts.get(name, 0) for name in FIELDS)))
    with connection.cursor() as cursor:
        cursor.executemany(ADD, rows)
    return len(rows)
