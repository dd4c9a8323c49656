"""Adds the streams that ingresses report to hourly rows. A report that comes twice or late adds nothing."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.db import transaction

from engine_agent.protocol.stream_counts import PoolStreams, StreamTotals, growth_of, sum_of
from fleet.deployments.models import Deployment
from traffic.routing.models import Ingress
from traffic.streams.models import StreamHour, StreamTotal

MOST_POOLS = 256
"""Of one report; ingresses send fewer."""
MOST_REASONS = 32
HOURS_KEPT = timedelta(days=14)


def streams_store(*, ingress: str, region: str, streams: Any, now: datetime) -> None:
    """Adds the growth since the last report of the ingress. `streams`: as it reports them
    (`engine_agent.protocol.ingress_messages.IngressTelemetry`); other forms are ignored."""
    try:
        reported = msgspec.convert(streams, StreamTotals, strict=False)
    except msgspec.ValidationError:
        return
    since = reported.since[:40]
    pools = dict(list(reported.pools.items())[:MOST_POOLS])
    if not _grown(_known(ingress), since, pools):
        return
    with transaction.atomic():
        Ingress.objects.select_for_update().filter(id=ingress).first()  # two connections of it must not both add
        known = _known(ingress)
        grown = _grown(known, since, pools)
        for name in Deployment.objects.filter(name__in=grown).order_by("name").values_list("name", flat=True):
            total = known.get(name) or StreamTotal(ingress=ingress, deployment_id=name)
            total.since, total.totals = since, msgspec.to_builtins(pools[name], str_keys=True)
            total.save()
            _add_to_hour(name, region, now, grown[name])


def streams_forget(*, ingress: str) -> None:
    StreamTotal.objects.filter(ingress=ingress).delete()


def streams_trim(*, now: datetime) -> None:
    """Deletes hours that no page shows."""
    StreamHour.objects.filter(at__lt=now - HOURS_KEPT).delete()


def counts_of(stored: Any) -> PoolStreams:
    """Counts as a row has them."""
    return msgspec.convert(stored, PoolStreams, strict=False)


def _known(ingress: str) -> dict[str, StreamTotal]:
    return {row.deployment_id: row for row in StreamTotal.objects.filter(ingress=ingress)}


def _grown(known: Mapping[str, StreamTotal], since: str, pools: Mapping[str, PoolStreams]) -> dict[str, PoolStreams]:
    """The growth by deployment, without deployments that did not change."""
    grown = {}
    for name, now in pools.items():
        row = known.get(name)
        before = counts_of(row.totals) if row is not None and row.since == since else PoolStreams()
        growth = growth_of(now, before)
        if growth != PoolStreams() and _is_plausible(now):
            grown[name] = growth
    return grown


def _is_plausible(counts: PoolStreams) -> bool:
    """Whether it has no more reasons than relays know."""
    return max(map(len, (counts.continued_total, counts.cut_total, counts.unable_total))) <= MOST_REASONS


def _add_to_hour(deployment: str, region: str, now: datetime, growth: PoolStreams) -> None:
    at = now.replace(minute=0, second=0, microsecond=0)
    StreamHour.objects.get_or_create(deployment_id=deployment, region_id=region, at=at, defaults={"counts": {}})
    row = StreamHour.objects.select_for_update().get(deployment_id=deployment, region_id=region, at=at)
    total = sum_of(counts_of(row.counts), growth)
    if _is_plausible(total):
        row.counts = msgspec.to_builtins(total, str_keys=True)
        row.save(update_fields=["counts"])
