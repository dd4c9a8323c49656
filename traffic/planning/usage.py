"""From totals that sources report again and again to what was used since the last count, by account. Pure.

A source counts from 0 in each of its lives: a worker of HAProxy, a row of a cell proxy. Each life has a mark of its
own, so a report counts once whenever it comes: twice, late, or after one of a later life.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine_agent.protocol.ingress_messages import ADAPTER_NAME
from engine_agent.protocol.messages import OTHER_TENANTS, JsonObject
from engine_agent.protocol.states import ServingClass

Totals = Mapping[str, int]
Place = tuple[str, str, str]
"""Source, subject and life: what a mark is about."""
KEY, POOL, REFUSED = "key:", "pool:", "refused:"
"""What subjects of ingresses begin with: keys; deployments as their requests were sent to cells; deployment, key and
class of requests that no cell answered."""
INGRESS_FIELDS = ("requests", "limited", "errors")
"""In the order in which an ingress reports them for a key."""
TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}|" + re.escape(OTHER_TENANTS))
KEY_PREFIX = re.compile(r"[0-9a-f]{4,16}")
MOST = 2**53
"""No total that is meant is as large; it keeps one that is not from breaking the sums of others."""
CELL_FIELDS = (
    "requests", "cancelled", "errors", "estimated", "prompt_tokens", "cached_tokens", "completion_tokens",
)  # fmt: skip
"""What cell proxies count, here without `_total`."""
POOL_FIELDS = {"requests": "requests_total", "bytes_in": "bytes_in_total", "bytes_out": "bytes_out_total"}
CLASSES = frozenset(each.value for each in ServingClass)


class Account(NamedTuple):
    """What a row of usage is about. No tenant and no key: requests without a key. No adapter: the model itself. No
    deployment and no class: what ingresses counted of a key, before they knew either."""

    tenant: str
    key: str = ""
    deployment: str = ""
    serving_class: str = ""
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class SourceTotals:
    """Totals of one subject as a source reported them in one of its lives."""

    source: str
    subject: str
    since: str
    totals: Totals

    @property
    def place(self) -> Place:
        return self.source, self.subject, self.since


Marks = Mapping[Place, SourceTotals]


@dataclass(frozen=True, slots=True)
class CellRow:
    """What the leader of a cell says of one tenant, key, class and adapter; `totals.subject` names these four."""

    totals: SourceTotals
    tenant: str
    key: str
    serving_class: str
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class UsagePlan:
    """`used`: what is new, by place; `marks`: totals to remember. Both only of what grew."""

    used: Mapping[Place, Totals] = field(default_factory=dict)
    marks: tuple[SourceTotals, ...] = ()


def plan_usage(reported: Iterable[SourceTotals], marks: Marks) -> UsagePlan:
    """What is new in `reported`, beside the totals remembered. A total that went back is an old report: nothing."""
    used: dict[Place, Totals] = {}
    grown: dict[Place, SourceTotals] = {}
    for now in reported:
        before = grown.get(now.place) or marks.get(now.place)
        known = before.totals if before is not None else {}
        fresh = new_of(now.totals, known)
        if not any(fresh.values()):
            continue
        totals = {**known, **{name: known.get(name, 0) + count for name, count in fresh.items()}}
        grown[now.place] = SourceTotals(*now.place, totals)
        used[now.place] = summed(used.get(now.place, {}), fresh)
    return UsagePlan(used, tuple(grown.values()))


def new_of(totals: Totals, known: Totals) -> dict[str, int]:
    """How much each total grew; 0 where it went back."""
    return {name: max(0, total - known.get(name, 0)) for name, total in totals.items()}


def summed(one: Totals, other: Totals) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def pools_of_ingress(ingress: str, telemetry: JsonObject) -> list[SourceTotals]:
    """Requests and bytes that an ingress exchanged with the cells of each deployment."""
    pools = telemetry.get("pools")
    if not isinstance(pools, dict):
        return []
    life = str(telemetry.get("life") or telemetry.get("worker_pid"))[:40]
    totals = {
        name: {ours: row.get(theirs, 0) for ours, theirs in POOL_FIELDS.items()}
        for name, row in pools.items()
        if isinstance(row, dict)
    }
    return [
        SourceTotals(f"ingress:{ingress}", f"{POOL}{name}"[:120], life, counts)
        for name, counts in totals.items()
        if counts["requests"] and are_counts(counts.values())
    ]


def keys_of_ingress(ingress: str, telemetry: JsonObject) -> list[SourceTotals]:
    """What the telemetry of an ingress says of keys; nothing if it is not in the form of its agent."""
    keys = telemetry.get("keys")
    if not (isinstance(keys, dict) and isinstance(keys.get("since"), str) and isinstance(keys.get("totals"), dict)):
        return []
    source, since = f"ingress:{ingress}", keys["since"][:40]
    return [
        SourceTotals(source, f"{KEY}{prefix}", since, dict(zip(INGRESS_FIELDS, counts, strict=True)))
        for prefix, counts in keys["totals"].items()
        if KEY_PREFIX.fullmatch(prefix)
        and isinstance(counts, list)
        and len(counts) == len(INGRESS_FIELDS)
        and are_counts(counts)
    ]


def refused_of_ingress(ingress: str, telemetry: JsonObject) -> list[SourceTotals]:
    """What an ingress refused of each deployment, key and class."""
    refusals = telemetry.get("refusals")
    if not isinstance(refusals, dict) or not isinstance(refusals.get("accounts"), list):
        return []
    since = str(refusals.get("since"))[:40]
    totals = (_refused(row) for row in refusals["accounts"] if isinstance(row, dict))
    return [
        SourceTotals(f"ingress:{ingress}", f"{REFUSED}{name}", since, {"refused": total})
        for name, total in filter(None, totals)
    ]


def refused_account(subject: str, tenants: Mapping[str, str]) -> Account:
    """Whose the subject is; `tenants` of known keys. A key that is not known counts as none."""
    deployment, key, serving_class = subject.removeprefix(REFUSED).split("/")
    known = key in tenants
    return Account(tenants[key] if known else "", key if known else "", deployment, serving_class)


def _refused(row: JsonObject) -> tuple[str, int] | None:
    deployment, key, serving_class = (row.get(name, "") for name in ("deployment", "key", "serving_class"))
    total = row.get("total", 0)
    is_named = isinstance(deployment, str) and re.fullmatch(r"[A-Za-z0-9._-]{0,96}", deployment) is not None
    is_keyed = isinstance(key, str) and (not key or KEY_PREFIX.fullmatch(key) is not None)
    if not (is_named and is_keyed and are_counts([total])):
        return None
    return f"{deployment}/{key}/{serving_class if serving_class in CLASSES else ''}", total


def rows_of_cell(node: str, load: JsonObject | None) -> list[CellRow]:
    """Returns what the load of a leader reports of tenants and keys."""
    rows = (load or {}).get("usage")
    read = [_cell_row(node, row) for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return [row for row in read if row is not None]


def _cell_row(node: str, row: JsonObject) -> CellRow | None:
    tenant, key = row.get("tenant", ""), row.get("key", "")
    serving_class, adapter = row.get("serving_class", ServingClass.REALTIME.value), row.get("adapter", "")
    named = isinstance(tenant, str) and isinstance(key, str) and serving_class in CLASSES
    if not (isinstance(adapter, str) and (not adapter or ADAPTER_NAME.fullmatch(adapter))):
        return None
    if not (named and (not tenant or TENANT_NAME.fullmatch(tenant)) and (not key or KEY_PREFIX.fullmatch(key))):
        return None
    counts = {name: row.get(f"{name}_total", 0) for name in CELL_FIELDS}
    if not are_counts(counts.values(), most=None):
        return None
    totals = {name: min(count, MOST) for name, count in counts.items()}
    subject = f"{key or '@' + tenant}/{serving_class}" + (f"/{adapter}" if adapter else "")
    since = str(row.get("since"))[:40]
    return CellRow(SourceTotals(f"cell:{node}", subject, since, totals), tenant, key, serving_class, adapter)


def are_counts(values: Iterable[Any], most: int | None = MOST) -> bool:
    return all(type(value) is int and value >= 0 and (most is None or value <= most) for value in values)
