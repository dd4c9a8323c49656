"""Usage of this cell by tenant, key, serving class and adapter. The number of rows is bounded. A row is only dropped
when another needs its place, and never while it has requests in flight."""

from dataclasses import dataclass
from time import time

import msgspec

from engine_agent.protocol.load_messages import MAX_TENANTS_REPORTED, OTHER_TENANTS, UsageRow
from engine_agent.protocol.states import ServingClass

FORGET_AFTER_S = 60.0
"""A row without changes for this long has been reported many times."""


@dataclass(slots=True)
class UsageCounts:
    """One row. `since` and `used_at` in seconds since 1970; counts as in `UsageRow` (`engine_agent.protocol`)."""

    tenant: str
    key: str
    serving_class: ServingClass
    adapter: str
    since: float
    used_at: float
    in_flight: int = 0
    requests_total: int = 0
    cancelled_total: int = 0
    errors_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    completion_tokens_total: int = 0
    estimated_total: int = 0

    def row(self) -> UsageRow:
        return msgspec.convert(self, UsageRow, from_attributes=True)


class UsageRows:
    """At most `limit` rows by name, ordered by last use. All others share one row per class."""

    def __init__(self, limit: int = MAX_TENANTS_REPORTED) -> None:
        self._limit = limit
        self._rows: dict[tuple[str, str, ServingClass, str], UsageCounts] = {}

    def of(
        self, tenant: str, key: str, serving_class: ServingClass, now: float | None = None, adapter: str = ""
    ) -> UsageCounts:
        """The row for a new request of this tenant, key, class and adapter; `now` in seconds since 1970."""
        at = time() if now is None else now
        name = (tenant, key, serving_class, adapter)
        counts = self._rows.pop(name, None)
        if counts is None and tenant != OTHER_TENANTS and not self._has_place(at):
            return self.of(OTHER_TENANTS, "", serving_class, at)
        counts = counts or UsageCounts(*name, since=round(at, 3), used_at=at)
        counts.used_at = at
        self._rows[name] = counts
        return counts

    def rows(self) -> tuple[UsageRow, ...]:
        return tuple(counts.row() for counts in self._rows.values())

    def by_tenant(self) -> dict[str, UsageRow]:
        sums: dict[str, UsageRow] = {}
        for counts in self._rows.values():
            if counts.tenant:
                sums[counts.tenant] = _summed_row(sums.get(counts.tenant), counts.row())
        return sums

    def _has_place(self, now: float) -> bool:
        named = sum(tenant != OTHER_TENANTS for tenant, *_ in self._rows)
        if named < self._limit:
            return True
        for name, counts in self._rows.items():
            if now - counts.used_at < FORGET_AFTER_S:
                return False  # all further rows were used later
            if not counts.in_flight and counts.tenant != OTHER_TENANTS:
                del self._rows[name]
                return True
        return False


def _summed_row(so_far: UsageRow | None, row: UsageRow) -> UsageRow:
    if so_far is None:
        return row
    counted = {name: getattr(so_far, name) + getattr(row, name) for name in _COUNTED}
    return UsageRow(min(so_far.since, row.since), row.tenant, **counted)


_COUNTED = tuple(name for name in UsageRow.__struct_fields__ if name.endswith("_total") or name == "in_flight")
