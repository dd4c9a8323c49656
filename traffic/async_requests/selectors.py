"""Reads near-real-time requests and the regions and ingresses that serve them. It never writes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

from django.db.models import Count, Min, Q

from traffic.async_requests.models import AsyncRequest
from traffic.async_requests.planner import ERROR_CODES, AsyncSettings, AsyncState
from traffic.routing.models import Ingress, RoutingTable
from traffic.routing.planning.tables import IngressAddress
from traffic.routing.selectors import UnreadableTable, ingress_addresses, table_message
from traffic.tenants.planner import unix_seconds
from traffic.tenants.selectors import Application


def async_request_of(application: Application, request_id: str) -> AsyncRequest | None:
    """Returns the request if it belongs to the application's tenant, else None (I15)."""
    return AsyncRequest.objects.select_related("delivery").filter(id=request_id, tenant=application.tenant).first()


def accepted_since(application: Application, now: datetime, seconds: float) -> int:
    since = now - timedelta(seconds=seconds)
    of_tenant = AsyncRequest.objects.filter(tenant=application.tenant, created_at__gt=since)
    return of_tenant.filter(key=application.key).count()


def open_requests(tenant: str) -> int:
    return AsyncRequest.objects.filter(tenant=tenant, ended_at=None).count()


RATE_OVER_S = 60.0


@dataclass(frozen=True, slots=True)
class ModelQueue:
    """Requests for one model in one region. `oldest_at`: when the oldest open one was accepted. Rate and `failed`
    (failed or expired) are those of the last minute."""

    region: str
    model: str
    waiting: int
    sending: int
    oldest_at: datetime | None
    ended_per_s: float
    failed: int


def model_queues(now: datetime) -> list[ModelQueue]:
    """Returns the queues with open or recently ended requests, the longest first, in one query."""
    is_open = Q(ended_at=None)
    recent = AsyncRequest.objects.filter(is_open | Q(ended_at__gt=now - timedelta(seconds=RATE_OVER_S)))
    groups = (
        recent.order_by()
        .values_list("region_id", "model")
        .annotate(
            waiting=Count("id", filter=Q(state=AsyncState.QUEUED.value)),
            sending=Count("id", filter=Q(state=AsyncState.SENDING.value)),
            oldest=Min("created_at", filter=is_open),
            ended=Count("id", filter=~is_open),
            failed=Count("id", filter=Q(state__in=[AsyncState.FAILED.value, AsyncState.EXPIRED.value])),
        )
    )
    queues = [
        ModelQueue(region, model, waiting, sending, oldest, ended / RATE_OVER_S, failed)
        for region, model, waiting, sending, oldest, ended, failed in groups
    ]
    return sorted(queues, key=lambda each: (-each.waiting, each.region, each.model))


def serving_region(named: str) -> str | None:
    """Returns the region of a request's ingress, or else any region with an ingress; None without ingresses."""
    regions = Ingress.objects.order_by("region_id").values_list("region_id", flat=True)
    return named if named in regions else regions.first()


def deployments_of_model(region: str, model: str) -> frozenset[str] | None:
    """Returns deployments that answer a model name, by the region's newest table; None if there is none or it is
    unreadable."""
    newest = RoutingTable.objects.filter(region_id=region).order_by("-revision").values_list("pk", "created_at").first()
    models = _models_of_table(*newest) if newest else None
    return None if models is None else models.get(model, frozenset())


@lru_cache(maxsize=16)
def _models_of_table(pk: int, created_at: datetime) -> Mapping[str, frozenset[str]] | None:
    """Returns the deployments of each model name of a table, which never changes; None if it is unreadable or gone. A
    large table takes milliseconds to read, and every group of requests needs it."""
    table = RoutingTable.objects.filter(pk=pk).first()
    try:
        message = table_message(table) if table else None
    except UnreadableTable:
        message = None
    if message is None:
        return None
    found: dict[str, set[str]] = {}
    for split in message.splits:
        found.setdefault(split.model, set()).update(split.shares)
    for pool in message.pools:
        for name in pool.models:
            found.setdefault(name, set()).add(pool.name)
    return {model: frozenset(names) for model, names in found.items()}


def ingress_addresses_by_region() -> dict[str, list[IngressAddress]]:
    addresses: dict[str, list[IngressAddress]] = {}
    for ingress in ingress_addresses():
        addresses.setdefault(ingress.region, []).append(ingress)
    return addresses


def async_request_json(request: AsyncRequest, settings: AsyncSettings) -> dict[str, Any]:
    """Returns a request in the application's format; times are Unix seconds."""
    ended_at = request.ended_at
    return {
        "id": request.id,
        "object": "async.request",
        "idempotency_key": request.idempotency_key or None,
        "status": request.state,
        "endpoint": request.path,
        "model": request.model,
        "created_at": unix_seconds(request.created_at),
        "deadline_at": unix_seconds(request.deadline_at),
        "ended_at": unix_seconds(ended_at),
        "expires_at": unix_seconds(ended_at + timedelta(seconds=settings.kept_s)) if ended_at else None,
        "attempts": request.attempts,
        "sink": _sink_json(request),
        "response": _answer_json(request),
        "error": _error_json(request),
    }


def _sink_json(request: AsyncRequest) -> dict[str, str] | None:
    if request.sink_id is None:
        return None
    return {"name": request.sink_id, "state": request.delivery.state if request.delivery else "pending"}


def _answer_json(request: AsyncRequest) -> dict[str, Any] | None:
    if request.answer is None or request.status is None:
        return None
    try:
        body = json.loads(bytes(request.answer))
    except (ValueError, RecursionError):
        body = None
    return {"status_code": request.status, "body": body}


def _error_json(request: AsyncRequest) -> dict[str, Any] | None:
    code = ERROR_CODES.get(AsyncState(request.state))
    return {"message": request.reason, "type": "server_error", "param": None, "code": code} if code else None
