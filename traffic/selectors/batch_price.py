"""What batches cost: their share of what ran, and what more of them would."""

from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal

from engine_agent.protocol.states import ServingClass
from traffic.planning.cost_figures import OF_ACCOUNTS, BatchHour, CostRow, CostSums, MarginalPrice, marginal_price
from traffic.planning.usage_query import By, UsageQuery
from traffic.selectors.cost import cost_rows

BATCH = ServingClass.BATCH.value


@dataclass(frozen=True, slots=True)
class BatchPrice:
    """`sums`: of batches; `average`: US dollars for a million of their tokens by their share of what ran, None:
    unknown. `usd` and `joules`: of a million tokens more; None: hours do not tell."""

    sums: CostSums
    average: Decimal | None
    usd: MarginalPrice | None
    joules: MarginalPrice | None


def batch_price(query: UsageQuery) -> BatchPrice | None:
    """Out of the hours of a query that filters no accounts; None: no batches in them, or such a filter."""
    if OF_ACCOUNTS & {name for name, _ in query.where}:
        return None
    by_class = cost_rows(replace(query, by=By.HOUR, group=("class",)))
    batches = [row for row in by_class if row.group["class"] == BATCH]
    if not any(row.sums.tokens for row in batches):
        return None
    sums = sum((row.sums for row in batches), CostSums())
    cells = {row.start: row.sums for row in cost_rows(replace(query, by=By.HOUR, group=()))}
    own = _tokens(batches)
    others = _tokens([row for row in by_class if row.group["class"] != BATCH])
    usd = [BatchHour(float(hour.cells_cost), others.get(at, 0), own.get(at, 0)) for at, hour in cells.items()]
    joules = [BatchHour(hour.cells_uj / 1e6, others.get(at, 0), own.get(at, 0)) for at, hour in cells.items()]
    return BatchPrice(
        sums, sums.figures(with_idle=False)["usd_per_mtoken"], marginal_price(usd), marginal_price(joules)
    )


def _tokens(rows: list[CostRow]) -> dict[datetime | None, int]:
    found: dict[datetime | None, int] = {}
    for row in rows:
        found[row.start] = found.get(row.start, 0) + row.sums.tokens
    return found
