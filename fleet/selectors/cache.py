"""How well requests are sent by what cells have in their prefix caches, by region and deployment."""

from collections import Counter
from datetime import datetime, timedelta

from django.db.models import F
from msgspec import convert

from engine_agent.protocol.messages import CacheLoad
from fleet.models import CellMember
from fleet.planning.states import CellState

HEARD_WITHIN = timedelta(seconds=15)
"""As old as a report may be that counts."""


def cache_totals(now: datetime) -> dict[tuple[str, str], Counter[str]]:
    """Tokens of prompts, by region and deployment: what the leaders of ready cells reported of late. `asked`: of
    requests that were sent by a cell's list; `predicted` and `found`: of those; `other` and `other_found`: of all the
    rest."""
    leaders = CellMember.objects.filter(
        rank=0, cell__state=CellState.READY.value, node__report__last_seen_at__gt=now - HEARD_WITHIN
    ).filter(node__report__cell=F("cell_id"))
    totals: dict[tuple[str, str], Counter[str]] = {}
    for region, deployment, stored in leaders.values_list(
        "cell__region_id", "cell__deployment_id", "node__report__load__cache"
    ):
        each = convert(stored or {}, CacheLoad)
        totals.setdefault((region, deployment), Counter()).update(
            asked=each.asked_tokens_total,
            predicted=each.predicted_tokens_total,
            found=each.found_tokens_total,
            other=each.other_tokens_total,
            other_found=each.other_found_tokens_total,
        )
    return totals
