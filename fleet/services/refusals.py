"""Stores what ingresses counted of requests that no cell answered: once, however often and late it is reported."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.db import transaction

from fleet.models import Deployment, RefusedRequests
from fleet.planning.load.counters import MAX_COUNT

MOST_CODES = 50
"""Of one deployment; there are fewer."""


def refusals_store(*, ingress: str, region: str, refusals: Any, now: datetime) -> None:
    """Add what grew since the last report. `refusals`: as an ingress reports them
    (`engine_agent.protocol.ingress_messages.Refusals`); what is not in that form counts nothing."""
    if not isinstance(refusals, dict) or not isinstance(refusals.get("codes"), dict):
        return
    since = str(refusals.get("since"))[:40]
    reported = {str(name)[:96]: _counts(codes) for name, codes in refusals["codes"].items()}
    with transaction.atomic():
        rows = {row.deployment: row for row in RefusedRequests.objects.select_for_update().filter(ingress=ingress)}
        grown = {
            name: (codes, added)
            for name, codes in reported.items()
            if (added := _added(rows.get(name), since, codes)) > 0
        }
        if not grown:
            return
        known = set(Deployment.objects.filter(name__in=grown).values_list("name", flat=True))
        for name, (codes, added) in sorted(grown.items()):
            row = rows.get(name)
            if row is None and name and name not in known:
                continue
            row = row or RefusedRequests(ingress=ingress, deployment=name)
            row.region, row.since, row.codes, row.at = region, since, codes, now
            row.total = min(MAX_COUNT, row.total + added)
            row.save()


def refusals_forget(*, ingress: str) -> None:
    RefusedRequests.objects.filter(ingress=ingress).delete()


def _counts(codes: Any) -> dict[str, int]:
    if not isinstance(codes, Mapping):
        return {}
    return {
        str(code)[:40]: count
        for code, count in list(codes.items())[:MOST_CODES]
        if type(count) is int and 0 <= count <= MAX_COUNT
    }


def _added(row: RefusedRequests | None, since: str, codes: Mapping[str, int]) -> int:
    before = row.codes if row is not None and row.since == since else {}
    return sum(max(0, count - before.get(code, 0)) for code, count in codes.items())
