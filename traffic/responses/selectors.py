"""Reads stored responses. Tenants see only their own (I15). It never writes."""

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connection
from django.db.models import Count, Min, Sum

from traffic.async_requests.planner import AsyncState
from traffic.responses.models import StoredResponse
from traffic.responses.planner import (
    OPEN_RESPONSES,
    RESPONSE_ID,
    JsonObject,
    ResponseState,
    StoreSettings,
    Turn,
    output_of,
)

_CHAIN = """
WITH RECURSIVE chain AS (
    SELECT id, previous, input, response, 1 AS place, length(input) + length(response) AS total
    FROM traffic_storedresponse WHERE id = %(id)s AND tenant = %(tenant)s AND created_at > %(since)s
    UNION ALL
    SELECT before.id, before.previous, before.input, before.response, place + 1,
        total + length(before.input) + length(before.response)
    FROM traffic_storedresponse before JOIN chain ON before.id = chain.previous
    WHERE before.tenant = %(tenant)s AND before.created_at > %(since)s
        AND place < %(turns)s AND total <= %(bytes)s
)
SELECT previous, input, response FROM chain ORDER BY place DESC
"""
"""Bounded by turns and bytes, whatever the rows contain."""


CHAIN_BYTES = 8
"""Limit for reading a chain, as a multiple of the longest request."""


def kept_since(now: datetime, settings: StoreSettings) -> datetime:
    return now - timedelta(seconds=settings.kept_s)


def stored_response_of(tenant: str, response_id: str, now: datetime, settings: StoreSettings) -> StoredResponse | None:
    if not RESPONSE_ID.fullmatch(response_id):
        return None
    rows = StoredResponse.objects.select_related("request").defer("request__body", "request__answer")
    return rows.filter(id=response_id, tenant=tenant, created_at__gt=kept_since(now, settings)).first()


def chain_of(last: StoredResponse, now: datetime, settings: StoreSettings) -> tuple[Turn, ...] | None:
    """Returns all turns up to this one, oldest first; None if one is deleted or they exceed `CHAIN_BYTES` requests,
    which is more than a request may have since stored turns are larger than sent ones."""
    arguments: dict[str, Any] = {
        "id": last.id,
        "tenant": last.tenant,
        "since": kept_since(now, settings),
        "turns": settings.max_turns,
        "bytes": CHAIN_BYTES * settings.max_body_bytes,
    }
    with connection.cursor() as cursor:
        cursor.execute(_CHAIN, arguments)
        rows = cursor.fetchall()
    if not rows or rows[0][0] or len(rows) != last.turns:
        return None
    return tuple(Turn(tuple(_parsed_json(items)), output_of(_parsed_json(response))) for _, items, response in rows)


def shown_response(stored: StoredResponse) -> JsonObject:
    shown: JsonObject = _parsed_json(stored.response)
    request = stored.request
    if ResponseState(stored.state) in OPEN_RESPONSES and request is not None:
        has_begun = request.attempts > 0 or request.state == AsyncState.SENDING.value
        state = ResponseState.IN_PROGRESS if has_begun else ResponseState.QUEUED
        return {**shown, "status": state.value}
    return shown


def items_of(stored: StoredResponse) -> tuple[JsonObject, ...]:
    return tuple(_parsed_json(stored.input))


def kept_of_tenant(tenant: str) -> tuple[int, int]:
    """Returns a tenant's number of responses and their bytes, from an index only."""
    totals = StoredResponse.objects.filter(tenant=tenant).order_by().aggregate(n=Count("pk"), size=Sum("bytes"))
    return totals["n"], totals["size"] or 0


def kept_in_all() -> tuple[int, int]:
    totals = StoredResponse.objects.order_by().aggregate(n=Count("pk"), size=Sum("bytes"))
    return totals["n"], totals["size"] or 0


@dataclass(frozen=True, slots=True)
class KeptOfTenant:
    """Stored responses of one tenant (empty: requests without a key), `size` in bytes, and the oldest creation time."""

    tenant: str
    responses: int
    size: int
    oldest_at: datetime


def kept_by_tenant(*, most: int, tenant: str = "") -> list[KeptOfTenant]:
    """Returns tenants, most bytes first, or one tenant, in one query."""
    rows = StoredResponse.objects.filter(tenant=tenant) if tenant else StoredResponse.objects.all()
    sums = rows.order_by().values("tenant").annotate(n=Count("pk"), size=Sum("bytes"), oldest_at=Min("created_at"))
    found = sums.order_by("-size", "tenant")[:most]
    return [KeptOfTenant(row["tenant"], row["n"], row["size"], row["oldest_at"]) for row in found]


def _parsed_json(column: Any) -> Any:
    return json.loads(bytes(column))
