"""Turns totals that sources report repeatedly into new usage by account, limits what cells may claim, and compares
budgets with usage. Pure.

A source (an HAProxy worker, a row of a cell proxy) counts from 0 in each of its lives. Each life has its own mark, so a
total counts once even if it is repeated, late, or precedes one of a later life.

Claims of a cell's leader are limited by two credits that only ingresses fill: requests of its deployment and requests
of the key. Every claim draws both, so no two cells can claim the same request. A claim beyond them waits for the
leader's next report, when ingresses may have reported. Tokens are limited per accepted request to one context of prompt
and one of completion, plus one token per byte that ingresses exchanged with the deployment, because a request may have
many prompts or answers.

A budget's plan depends on state, not on changes, so a missed pass has no effect. Each month (UTC) starts at zero."""

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any, NamedTuple

from engine_agent.protocol.ingress_messages import ADAPTER_NAME
from engine_agent.protocol.load_messages import OTHER_TENANTS
from engine_agent.protocol.messages import JsonObject
from engine_agent.protocol.states import ServingClass

Totals = Mapping[str, int]
Place = tuple[str, str, str]
"""Source, subject and life that a mark is about."""
KEY, POOL, REFUSED = "key:", "pool:", "refused:"
"""Prefixes of ingress subjects: keys; deployments by requests sent to cells; deployment, key and class of requests that
no cell answered."""
INGRESS_FIELDS = ("requests", "limited", "errors")
"""Order in an ingress's report of a key."""
TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}|" + re.escape(OTHER_TENANTS))
KEY_PREFIX = re.compile(r"[0-9a-f]{4,16}")
MOST = 2**53
"""Larger totals are ignored, so that a wrong one cannot break other sums."""
CELL_FIELDS = (
    "requests", "cancelled", "errors", "estimated", "prompt_tokens", "cached_tokens", "completion_tokens",
)  # fmt: skip
"""Counters of cell proxies without `_total`."""
POOL_FIELDS = {"requests": "requests_total", "bytes_in": "bytes_in_total", "bytes_out": "bytes_out_total"}
CLASSES = frozenset(each.value for each in ServingClass)


class Account(NamedTuple):
    """Identity of a usage row. Empty fields: requests without a key; the base model; a key's requests before their
    deployment and class were known."""

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
    """A leader's row about one tenant, key, class and adapter; `totals.subject` names these four."""

    totals: SourceTotals
    tenant: str
    key: str
    serving_class: str
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class UsagePlan:
    """`used` has new usage by place, `marks` the totals to store. Both contain only what grew."""

    used: Mapping[Place, Totals] = field(default_factory=dict)
    marks: tuple[SourceTotals, ...] = ()


def plan_usage(reported: Iterable[SourceTotals], marks: Marks) -> UsagePlan:
    """Compares reported totals with the stored ones. A total that went back is an old report and adds nothing."""
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
    """Returns the growth of each total; 0 if it went back."""
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
    """Keys in an ingress's telemetry; empty if it is malformed."""
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
    """Requests that an ingress refused, and errors that no cell counts, by deployment, key and class."""
    refusals = telemetry.get("refusals")
    if not isinstance(refusals, dict) or not isinstance(refusals.get("accounts"), list):
        return []
    since = str(refusals.get("since"))[:40]
    read = (_refused_totals(row) for row in refusals["accounts"] if isinstance(row, dict))
    return [
        SourceTotals(f"ingress:{ingress}", f"{REFUSED}{name}", since, totals) for name, totals in filter(None, read)
    ]


def refused_account(subject: str, tenants: Mapping[str, str]) -> Account:
    """Returns the subject's account; `tenants` are those of known keys. An unknown key counts as none."""
    deployment, key, serving_class = subject.removeprefix(REFUSED).split("/")
    known = key in tenants
    return Account(tenants[key] if known else "", key if known else "", deployment, serving_class)


def _refused_totals(row: JsonObject) -> tuple[str, Totals] | None:
    deployment, key, serving_class = (row.get(name, "") for name in ("deployment", "key", "serving_class"))
    total, cut = row.get("total", 0), row.get("cut", 0)
    is_named = isinstance(deployment, str) and re.fullmatch(r"[A-Za-z0-9._-]{0,96}", deployment) is not None
    is_keyed = isinstance(key, str) and (not key or KEY_PREFIX.fullmatch(key) is not None)
    if not (is_named and is_keyed and are_counts([total, cut])):
        return None
    return f"{deployment}/{key}/{serving_class if serving_class in CLASSES else ''}", {"refused": total, "errors": cut}


def rows_of_cell(node: str, load: JsonObject | None) -> list[CellRow]:
    """Returns a leader's rows about tenants and keys."""
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


CREDIT = "credit"
"""Source of marks about unclaimed requests."""
BYTES_KEPT = 64 * 2**20
"""Limit of a deployment's unclaimed bytes: more than ingresses exchange between two reports."""
WITHIN_REQUESTS = ("cancelled", "errors", "estimated")
BYTES_OF = {"prompt_tokens": "bytes_in", "completion_tokens": "bytes_out"}


@dataclass(frozen=True, slots=True)
class Claim:
    """A leader's row and its possible accounts: it draws the credit of `keys` in this order. No keys: requests without
    a key, or of more tenants than have rows."""

    row: CellRow
    account: Account
    tokens_per_request: int
    keys: tuple[str, ...] = ()


@dataclass(slots=True)
class Credit:
    """Work that ingresses counted and no cell has claimed: requests and bytes by deployment, requests by key."""

    deployments: dict[str, dict[str, int]] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KeyScope:
    tenant: str
    deployments: frozenset[str] = frozenset()

    def opens(self, deployment: str) -> bool:
        return not self.deployments or deployment in self.deployments


def plan_claims(
    rows: Iterable[CellRow],
    deployment: str,
    context_length: int,
    keys: Mapping[str, KeyScope],
    adapters: Container[str] = (),
) -> list[Claim]:
    """Returns one leader's plausible rows, each for the tenant of its key regardless of the stated tenant. A row with a
    tenant but no key, as older agents send it, may be about any of the tenant's keys for the deployment. `adapters` are
    the version's; rows of unknown ones count for the base model."""
    claims = []
    for row in rows:
        adapter = row.adapter if row.adapter in adapters else ""
        if row.key:
            drawn: tuple[str, ...] = (row.key,) if row.key in keys and keys[row.key].opens(deployment) else ()
        elif row.tenant in ("", OTHER_TENANTS):
            account = Account(row.tenant, "", deployment, row.serving_class, adapter)
            claims.append(Claim(row, account, context_length))
            continue
        else:
            drawn = tuple(
                sorted(key for key, of in keys.items() if of.tenant == row.tenant and of.opens(deployment))
            )  # fmt: skip
        if drawn:
            account = Account(keys[drawn[0]].tenant, row.key, deployment, row.serving_class, adapter)
            claims.append(Claim(row, account, context_length, drawn))
    return claims


def credit_of(seen: UsagePlan, marks: Marks) -> Credit:
    """Returns the previous credit plus what ingresses have counted since."""
    credit = Credit()
    for (source, subject, _), mark in marks.items():
        if source == CREDIT and subject.startswith(KEY):
            credit.keys[subject.removeprefix(KEY)] = mark.totals["requests"]
        elif source == CREDIT:
            credit.deployments[subject] = dict(mark.totals)
    for (_, subject, _), counts in seen.used.items():
        if subject.startswith(POOL):
            deployment = subject.removeprefix(POOL)
            credit.deployments[deployment] = summed(credit.deployments.get(deployment, {}), counts)
        elif subject.startswith(KEY):
            key = subject.removeprefix(KEY)
            passed = max(0, counts["requests"] - counts["limited"])
            credit.keys[key] = min(MOST, credit.keys.get(key, 0) + passed)
    return credit


def bound_claims(claims: Iterable[Claim], marks: Marks, credit: Credit) -> list[SourceTotals]:
    """Returns the accepted part of each claim as totals, and draws `credit`."""
    return [_accepted_totals(claim, marks, credit) for claim in claims]


def _accepted_totals(claim: Claim, marks: Marks, credit: Credit) -> SourceTotals:
    stated = claim.row.totals
    before = marks.get(stated.place)
    known = before.totals if before is not None else {}
    requests = known.get("requests", 0) + _draw_requests(claim, new_of(stated.totals, known)["requests"], credit)
    totals = {"requests": requests}
    for name in WITHIN_REQUESTS:
        totals[name] = min(stated.totals[name], requests)
    left = credit.deployments.get(claim.account.deployment, {})
    for name, bytes_name in BYTES_OF.items():
        most = max(known.get(name, 0), requests * claim.tokens_per_request)
        beyond = min(max(0, stated.totals[name] - most), left.get(bytes_name, 0))
        if beyond:
            left[bytes_name] -= beyond
        totals[name] = min(stated.totals[name], most + beyond)
    totals["cached_tokens"] = min(stated.totals["cached_tokens"], totals["prompt_tokens"])
    return SourceTotals(*stated.place, {name: totals[name] for name in CELL_FIELDS})


def _draw_requests(claim: Claim, wanted: int, credit: Credit) -> int:
    left = credit.deployments.setdefault(claim.account.deployment, {})
    allowed = min(wanted, left.get("requests", 0))
    if claim.keys:
        allowed = min(allowed, sum(credit.keys.get(key, 0) for key in claim.keys))
    left["requests"] = left.get("requests", 0) - allowed
    owed = allowed
    for key in claim.keys:
        part = min(owed, credit.keys.get(key, 0))
        if part:
            credit.keys[key] -= part
            owed -= part
    return allowed


def credit_marks(credit: Credit, marks: Marks) -> list[SourceTotals]:
    fresh = [
        SourceTotals(CREDIT, deployment, "", _limited_credit(left))
        for deployment, left in sorted(credit.deployments.items())
    ]
    fresh += [SourceTotals(CREDIT, f"{KEY}{key}", "", {"requests": left}) for key, left in sorted(credit.keys.items())]
    return [mark for mark in fresh if marks.get(mark.place) != mark]


def _limited_credit(left: Totals) -> Totals:
    most = {"requests": MOST, "bytes_in": BYTES_KEPT, "bytes_out": BYTES_KEPT}
    return {name: min(left.get(name, 0), limit) for name, limit in most.items()}


DEFAULT_ALERT_AT = (50, 80, 100)
MOST_ALERTS = 10
MOST_PERCENT = 1000
FULL = 100
"""Per cent of a budget at which a hard stop applies, regardless of alerts."""


class BudgetUnit(StrEnum):
    """Prompt and completion tokens, or US dollars."""

    TOKENS = "tokens"
    USD = "usd"


@dataclass(frozen=True, slots=True)
class BudgetRules:
    """An admin's rules. `alert_at` are rising per cents of `limit`."""

    unit: BudgetUnit
    limit: Decimal
    alert_at: tuple[int, ...] = DEFAULT_ALERT_AT
    hard_stop: bool = False


@dataclass(frozen=True, slots=True)
class BudgetStanding:
    """The last announced state: month, alert in per cent (0 for none), and whether keys are refused."""

    month: date
    level: int = 0
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """Present state of a budget. `changes` are sentences about differences from the announced state."""

    standing: BudgetStanding
    used_percent: Decimal
    changes: tuple[str, ...] = field(default=())


def month_of(now: datetime) -> date:
    return now.astimezone(UTC).date().replace(day=1)


def check_limit(unit: BudgetUnit, limit: Decimal) -> None:
    """Raises ValueError for an invalid limit."""
    if limit <= 0:
        raise ValueError("a budget must be more than 0; to block a tenant, revoke its keys")
    if unit is BudgetUnit.TOKENS and limit != limit.to_integral_value():
        raise ValueError("a budget of tokens must be a whole number")


def check_alert_at(alert_at: Sequence[int]) -> None:
    """Raises ValueError for invalid alerts."""
    if len(alert_at) > MOST_ALERTS:
        raise ValueError(f"at most {MOST_ALERTS} alerts, not {len(alert_at)}")
    if any(not 0 < each <= MOST_PERCENT for each in alert_at):
        raise ValueError(f"alerts must be whole per cents from 1 to {MOST_PERCENT}")
    if list(alert_at) != sorted(set(alert_at)):
        raise ValueError("alerts must rise")


def used_percent(rules: BudgetRules, used: Decimal) -> Decimal:
    return used * 100 / rules.limit


def plan_budget(rules: BudgetRules, used: Decimal, was: BudgetStanding, now: datetime) -> BudgetPlan:
    month, percent = month_of(now), used_percent(rules, used)
    level = max((each for each in rules.alert_at if percent >= each), default=0)
    standing = BudgetStanding(month, level, stopped=rules.hard_stop and percent >= FULL)
    return BudgetPlan(standing, percent, tuple(_budget_changes(rules, used, was, standing)))


def describe_limit(rules: BudgetRules) -> str:
    """Returns "2,000,000 tokens" or "10.00 USD"."""
    return f"{rules.limit:,.0f} tokens" if rules.unit is BudgetUnit.TOKENS else f"{rules.limit:,.2f} USD"


def describe_use(rules: BudgetRules, used: Decimal) -> str:
    """Returns "1,200,000 of 2,000,000 tokens" or "3.50 of 10.00 USD"."""
    places = 0 if rules.unit is BudgetUnit.TOKENS else 2
    return f"{used:,.{places}f} of {describe_limit(rules)}"


def _budget_changes(rules: BudgetRules, used: Decimal, was: BudgetStanding, now: BudgetStanding) -> list[str]:
    use, is_new = describe_use(rules, used), was.month != now.month
    changes = [f"{now.month:%B %Y} began"] if is_new and (was.level or was.stopped) else []
    before = 0 if is_new else was.level
    if now.level > before:
        changes.append(f"reached {now.level} % of its budget: {use}")
    elif now.level < before:
        changes.append(f"is below {before} % of its budget: {use}")
    if now.stopped and not was.stopped:
        changes.append(f"its keys are refused: {use}")
    elif was.stopped and not now.stopped:
        changes.append("its keys are accepted again")
    return changes
