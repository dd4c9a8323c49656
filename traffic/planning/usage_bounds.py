"""What of the claims of cells can be so: no more than ingresses sent to the deployment and counted of the key. Pure.

A leader is believed within two credits that only ingresses fill: requests of its deployment, and requests of the key
that a row names. Both are drawn by every claim, so what one cell has claimed no other can claim again. A claim beyond
them waits: its next report is about the same requests, and ingresses may have reported by then.

Tokens are bounded by the requests that are believed: a context of prompt and one of completion each, and beyond that a
token for each byte that ingresses exchanged with the deployment, because one request may hold many prompts or answers.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from engine_agent.protocol.messages import OTHER_TENANTS
from traffic.planning.usage import (
    CELL_FIELDS,
    KEY,
    MOST,
    POOL,
    Account,
    CellRow,
    Marks,
    SourceTotals,
    Totals,
    UsagePlan,
    new_of,
    summed,
)

CREDIT = "credit"
"""The source of the marks that say what no cell has claimed yet."""
BYTES_KEPT = 64 * 2**20
"""Most bytes of a deployment's credit that are kept for later claims: more than passes between two reports."""
WITHIN_REQUESTS = ("cancelled", "errors", "estimated")
BYTES_OF = {"prompt_tokens": "bytes_in", "completion_tokens": "bytes_out"}


@dataclass(frozen=True, slots=True)
class Claim:
    """A row of a leader, and whom it may be about: `keys` are those whose credit it draws, in this order; none: its
    requests came without a key, or of more tenants than have rows."""

    row: CellRow
    account: Account
    tokens_per_request: int
    keys: tuple[str, ...] = ()


@dataclass(slots=True)
class Credit:
    """What ingresses counted and no cell has claimed: by deployment requests and bytes, by key requests."""

    deployments: dict[str, dict[str, int]] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KeyScope:
    """Whose a key is, and what it opens. No deployments: all."""

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
    """The rows of one leader that can be meant, each for whom its key is, whatever tenant the leader names. A row of a
    tenant without a key, as older agents send them, is about any of the tenant's keys that open the deployment.
    `adapters`: of the cell's version; a row of another one is the model's own."""
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
    """What is not claimed: what was left, and what ingresses have counted since."""
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
    """What of the claims is believed, as totals. `credit` is drawn."""
    return [_believed(claim, marks, credit) for claim in claims]


def _believed(claim: Claim, marks: Marks, credit: Credit) -> SourceTotals:
    stated = claim.row.totals
    before = marks.get(stated.place)
    known = before.totals if before is not None else {}
    requests = known.get("requests", 0) + _drawn(claim, new_of(stated.totals, known)["requests"], credit)
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


def _drawn(claim: Claim, wanted: int, credit: Credit) -> int:
    """How many of the requests are believed."""
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
    """Marks to write, of what changed."""
    fresh = [
        SourceTotals(CREDIT, deployment, "", _kept(left)) for deployment, left in sorted(credit.deployments.items())
    ]  # fmt: skip
    fresh += [SourceTotals(CREDIT, f"{KEY}{key}", "", {"requests": left}) for key, left in sorted(credit.keys.items())]
    return [mark for mark in fresh if marks.get(mark.place) != mark]


def _kept(left: Totals) -> Totals:
    most = {"requests": MOST, "bytes_in": BYTES_KEPT, "bytes_out": BYTES_KEPT}
    return {name: min(left.get(name, 0), limit) for name, limit in most.items()}
