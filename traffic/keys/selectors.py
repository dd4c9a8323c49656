"""Reads application keys for routing tables, lists and pages. It never writes."""

import functools
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db.models import BigIntegerField, OuterRef, Q, QuerySet, Subquery, Sum, Value
from django.db.models.fields.json import KT
from django.db.models.functions import Cast, Coalesce

from engine_agent.protocol.ingress_messages import ApiKey
from fleet.requests.models import RequestSample
from fleet.requests.planner import FAILED_KEPT_S
from fleet.requests.selectors import failed_requests_of_keys, refused_requests_named
from traffic.keys.models import ApplicationKey, KeyPolicy
from traffic.keys.planner import LIMITS, KeyRingVersion, KeyState, playground_key, with_sender
from traffic.routing.models import Ingress, RoutingTable
from traffic.usage.models import Budget, UsageHour

COUNT: "BigIntegerField[int, int]" = BigIntegerField()
KEY_RING = "key_ring"
"""Key in the body of a stored routing table: the version of its application keys. The keys are not stored there,
because thousands would be copied with every change of a cell."""
USAGE_SHOWN = timedelta(hours=24)
SAMPLES_USED = timedelta(seconds=FAILED_KEPT_S) + timedelta(hours=1)
"""The time of samples, and the hour in which it began."""


def key_policy() -> KeyPolicy:
    """Returns the policy, with defaults before the first change."""
    return KeyPolicy.objects.first() or KeyPolicy()


def key_ring_version() -> KeyRingVersion:
    policy = KeyPolicy.objects.first()
    return KeyRingVersion(policy.version, policy.required) if policy else KeyRingVersion()


def keys_for_ingresses() -> tuple[ApiKey, ...]:
    """Returns the current keys; they are loaded only if one has changed. They may be newer than the table that they
    accompany, and never include a key that was revoked before it."""
    change = KeyPolicy.objects.values_list("change", flat=True).first()
    return _unrevoked_keys(change) if change else ()


@functools.lru_cache(maxsize=1)
def _unrevoked_keys(change: str) -> tuple[ApiKey, ...]:
    rows = ApplicationKey.objects.filter(revoked_at=None).order_by("id")
    columns = rows.values_list(
        "prefix", "digest", "tenant", "serving_class", "deployments", "expires_at", "allowed_origins", *LIMITS
    )  # fmt: skip
    keys = tuple(
        ApiKey(
            prefix,
            digest,
            tenant,
            serving_class,
            tuple(pools),
            expires.timestamp() if expires else None,
            origins=tuple(origins),
            **dict(zip(LIMITS, limits, strict=True)),
        )
        for prefix, digest, tenant, serving_class, pools, expires, origins, *limits in columns.iterator(chunk_size=5000)
    )
    secret = settings.SECRET_KEY
    return (*(with_sender(key, secret) for key in keys), playground_key(secret))


def tenants_stopped() -> tuple[str, ...]:
    """Returns the tenants whose budget is used up; their keys are refused."""
    return _stopped("tenant")


def keys_stopped() -> tuple[str, ...]:
    """Returns the prefixes of keys whose own budget is used up, with the keys that replaced them."""
    stopped = _stopped("key")
    replaced = ApplicationKey.objects.filter(first_prefix__in=stopped, revoked_at=None) if stopped else ()
    return tuple(sorted({*stopped, *(key.prefix for key in replaced)}))


def _stopped(subject: str) -> tuple[str, ...]:
    rows = Budget.objects.filter(stopped=True).exclude(**{subject: ""})
    return tuple(rows.order_by(subject).values_list(subject, flat=True).distinct())


MOST_PLACES = 200
"""Pairs of key and deployment whose failed requests are read."""


def failed_requests_of(now: datetime, *, request: str = "", **whose: str) -> QuerySet[RequestSample]:
    """The sampled failed requests of a `tenant` or a `key`, newest first; with `request`, only the one of this id, also
    if it had no valid key. A node names the key of each sample, so only samples count whose key is known to have used
    their deployment: usage counts no more than ingresses saw of the key. Ingresses check keys themselves."""
    used = UsageHour.objects.filter(hour__gte=now - SAMPLES_USED, requests__gt=0, **whose).exclude(deployment="")
    places = used.exclude(key="").order_by().values_list("key", "deployment").distinct()[:MOST_PLACES]
    found = failed_requests_of_keys(places, now, **whose)
    if not request:
        return found
    own = found.filter(request=request)
    return own if own.exists() else refused_requests_named(request)


def ingresses_with_keys() -> QuerySet[Ingress]:
    """Returns ingresses with their enforced and expected `version` of keys. An ingress that never reported, or whose
    table is no longer stored, counts as version 0, since it may be serving."""
    in_force = RoutingTable.objects.filter(region_id=OuterRef("region_id"), revision=OuterRef("report__revision"))
    newest = RoutingTable.objects.filter(region_id=OuterRef("region_id")).order_by("-revision")
    return Ingress.objects.annotate(
        version=Coalesce(_version_of(in_force), Value(0)),
        wanted_version=Coalesce(_version_of(newest), Value(0)),
        connected=Coalesce("report__connected", Value(False)),
    )


def _version_of(tables: QuerySet[RoutingTable]) -> Subquery:
    version = Cast(KT(f"body__{KEY_RING}__version"), BigIntegerField())
    return Subquery(tables.annotate(keys_version=version).values("keys_version")[:1])


def keys_in_force() -> dict[str, int]:
    rows: QuerySet[Any] = ingresses_with_keys()
    return {row.id: row.version for row in rows}


def ingresses_waited_for(version: int) -> tuple[str, ...]:
    return tuple(sorted(ingress for ingress, there in keys_in_force().items() if there < version))


def keys_described(now: datetime) -> QuerySet[ApplicationKey]:
    """Returns keys with `requests_24h`, `limited_24h` and `errors_24h`, as ingresses counted."""
    hours = UsageHour.objects.filter(key=OuterRef("prefix"), hour__gte=now - USAGE_SHOWN).order_by().values("key")
    used = {
        f"{name}_24h": Coalesce(
            Subquery(hours.annotate(total=Sum(column)).values("total")), Value(0), output_field=COUNT
        )
        for name, column in (("requests", "arrived"), ("limited", "limited"), ("errors", "failed"))
    }
    return ApplicationKey.objects.annotate(**used)


def keys_in_state(keys: QuerySet[ApplicationKey], state: KeyState, now: datetime) -> QuerySet[ApplicationKey]:
    if state is KeyState.REVOKED:
        return keys.filter(revoked_at__isnull=False)
    expired = Q(expires_at__isnull=False, expires_at__lte=now)
    return keys.filter(expired if state is KeyState.EXPIRED else ~expired, revoked_at=None)
