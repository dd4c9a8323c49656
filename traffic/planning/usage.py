"""From totals that sources report again and again to what was used since the last count. Pure.

A source counts from 0 in each of its lives: a worker of HAProxy, a cell proxy. What it counts in a new life is all new.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine_agent.protocol.messages import OTHER_TENANTS, JsonObject

Totals = Mapping[str, int]
KEY, TENANT, POOL = "key:", "tenant:", "pool:"
"""What subjects begin with."""
INGRESS_FIELDS = ("requests", "limited", "errors")
"""In the order in which an ingress reports them for a key."""
TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}|" + re.escape(OTHER_TENANTS))
MOST = 2**53
"""No total that is meant is as large; it keeps one that is not from breaking the sums of others."""
TOKENS = ("prompt_tokens", "completion_tokens")
CELL_FIELDS = {
    "requests_total": "requests",
    "prompt_tokens_total": "prompt_tokens",
    "completion_tokens_total": "completion_tokens",
}
"""What a cell proxy reports of a tenant -> what it is here."""
CREDIT = "credit"
"""The source of the marks that say how many requests of a deployment no cell has claimed yet."""


@dataclass(frozen=True, slots=True)
class SourceTotals:
    """Totals of one subject as a source reported them in one of its lives."""

    source: str
    subject: str
    since: str
    totals: Totals

    @property
    def place(self) -> tuple[str, str]:
        return self.source, self.subject


@dataclass(frozen=True, slots=True)
class UsagePlan:
    """`used`: subject -> what is new; `marks`: the totals to remember, of those that changed."""

    used: Mapping[str, Totals] = field(default_factory=dict)
    marks: tuple[SourceTotals, ...] = ()


def plan_usage(reported: Iterable[SourceTotals], marks: Mapping[tuple[str, str], SourceTotals]) -> UsagePlan:
    """What is new in `reported`, beside the totals remembered by source and subject."""
    used: dict[str, dict[str, int]] = {}
    changed = []
    for now in reported:
        before = marks.get(now.place)
        if before is not None and (before.since, before.totals) == (now.since, now.totals):
            continue
        changed.append(now)
        of_subject = used.setdefault(now.subject, {})
        for name, count in _new(before, now).items():
            of_subject[name] = of_subject.get(name, 0) + count
    return UsagePlan({subject: counts for subject, counts in used.items() if any(counts.values())}, tuple(changed))


def _new(before: SourceTotals | None, now: SourceTotals) -> dict[str, int]:
    known = before.totals if before is not None and before.since == now.since else {}
    # A total that went back within one life is no use at all, rather than a second time.
    return {name: max(0, total - known.get(name, 0)) for name, total in now.totals.items()}


@dataclass(frozen=True, slots=True)
class CellBounds:
    """What the leader of a cell can have counted at most: for these tenants (and for nobody in particular), so many
    tokens a request, and together with the deployment's other cells so many requests as ingresses sent."""

    deployment: str
    tenants: frozenset[str]
    tokens_per_request: int


def bound_claims(
    claimed: Iterable[tuple[SourceTotals, CellBounds]],
    marks: Mapping[tuple[str, str], SourceTotals],
    credits: Mapping[str, int],
) -> tuple[list[SourceTotals], dict[str, int]]:
    """What of the claims of leaders can be so, and what is left of each deployment's credit: requests that ingresses
    sent and no cell has claimed yet. A claim beyond it waits: their next report may be about the same requests.
    """
    left, allowed = dict(credits), []
    for claim, bounds in claimed:
        tenant = claim.subject.removeprefix(TENANT)
        if tenant not in bounds.tenants and tenant != OTHER_TENANTS:
            continue
        before = marks.get(claim.place)
        known = before.totals if before is not None and before.since == claim.since else {}
        requests = min(_new(before, claim).get("requests", 0), left.get(bounds.deployment, 0))
        left[bounds.deployment] = left.get(bounds.deployment, 0) - requests
        total = known.get("requests", 0) + requests
        most = {"requests": total} | dict.fromkeys(TOKENS, total * bounds.tokens_per_request)
        totals = {name: min(count, most.get(name, 0)) for name, count in claim.totals.items()}
        allowed.append(SourceTotals(claim.source, claim.subject, claim.since, totals))
    return allowed, left


def unclaimed_requests(seen: UsagePlan, marks: Mapping[tuple[str, str], SourceTotals]) -> dict[str, int]:
    """Deployment -> requests that ingresses sent and no cell has claimed yet."""
    credit = {subject: mark.totals["requests"] for (source, subject), mark in marks.items() if source == CREDIT}
    for subject, counts in seen.used.items():
        if subject.startswith(POOL):
            deployment = subject.removeprefix(POOL)
            credit[deployment] = credit.get(deployment, 0) + counts["requests"]
    return {deployment: min(left, MOST) for deployment, left in credit.items()}


def credit_marks(credit: Mapping[str, int], marks: Mapping[tuple[str, str], SourceTotals]) -> list[SourceTotals]:
    """Marks to write, of what changed."""
    fresh = [SourceTotals(CREDIT, deployment, "", {"requests": left}) for deployment, left in sorted(credit.items())]
    return [mark for mark in fresh if marks.get(mark.place) != mark]


def pools_of_ingress(ingress: str, telemetry: JsonObject) -> list[SourceTotals]:
    """Requests that an ingress sent to the cells of each deployment."""
    pools = telemetry.get("pools")
    if not isinstance(pools, dict):
        return []
    return [
        SourceTotals(
            f"ingress:{ingress}", f"{POOL}{name}"[:80], str(telemetry.get("worker_pid"))[:40], {"requests": sent}
        )
        for name, row in pools.items()
        if isinstance(row, dict) and isinstance(sent := row.get("requests_total"), int) and 0 < sent <= MOST
    ]


def totals_of_ingress(ingress: str, telemetry: JsonObject) -> list[SourceTotals]:
    """What the telemetry of an ingress says of keys; nothing if it is not in the form of its agent."""
    keys = telemetry.get("keys")
    if not (isinstance(keys, dict) and isinstance(keys.get("since"), str) and isinstance(keys.get("totals"), dict)):
        return []
    source, since = f"ingress:{ingress}", keys["since"][:40]
    return [
        SourceTotals(source, f"{KEY}{prefix}"[:80], since, dict(zip(INGRESS_FIELDS, counts, strict=True)))
        for prefix, counts in keys["totals"].items()
        if _are_counts(counts)
    ]


def totals_of_cell(node: str, load: JsonObject | None) -> list[SourceTotals]:
    """What the load of a leader says of tenants: in a row for each key and class, or, from a proxy of the release
    before, in one for all."""
    source = f"cell:{node}"
    rows = (load or {}).get("usage")
    if isinstance(rows, (list, tuple)) and rows:
        return [
            _totals_of_row(f"{source}:{row.get('key', '')[:16]}:{row.get('serving_class', '')[:16]}", tenant, row)
            for row in rows
            if TENANT_NAME.fullmatch(tenant := row.get("tenant", ""))
        ]
    tenants = (load or {}).get("tenants")
    if not isinstance(tenants, dict):
        return []
    return [_totals_of_row(source, tenant, row) for tenant, row in tenants.items() if TENANT_NAME.fullmatch(tenant)]


def _totals_of_row(source: str, tenant: str, row: JsonObject) -> SourceTotals:
    counts = {ours: min(int(row.get(theirs, 0)), MOST) for theirs, ours in CELL_FIELDS.items()}
    return SourceTotals(source, f"{TENANT}{tenant}", str(row["since"])[:40], counts)


def _are_counts(counts: Any) -> bool:
    return (
        isinstance(counts, list)
        and len(counts) == len(INGRESS_FIELDS)
        and all(isinstance(count, int) and 0 <= count <= MOST for count in counts)
    )
