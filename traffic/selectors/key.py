"""Application keys as routing tables, lists and pages need them."""

import functools

from django.db.models import BigIntegerField, F, OuterRef, QuerySet, Subquery, Value
from django.db.models.fields.json import KT
from django.db.models.functions import Cast, Coalesce

from engine_agent.protocol.messages import ApiKey
from traffic.models import ApplicationKey, Ingress, KeyPolicy, RoutingTable
from traffic.planning.key import KeyStanding

KEY_RING = "key_ring"
"""In the body of a stored routing table: which version of the keys goes with it. The keys themselves do not, because
thousands of them would be stored again with every change of a cell."""


def key_standing() -> KeyStanding:
    policy = KeyPolicy.objects.first()
    return KeyStanding(policy.version, policy.required) if policy else KeyStanding()


def keys_to_tell() -> tuple[ApiKey, ...]:
    """The keys that ingresses must know now; thousands are loaded only when one of them has changed.

    They may be newer than the table that they go with, which is right, too: they never have what was revoked before it.
    """
    change = KeyPolicy.objects.values_list("change", flat=True).first()
    return _unrevoked_keys(change) if change else ()


@functools.lru_cache(maxsize=1)
def _unrevoked_keys(change: str) -> tuple[ApiKey, ...]:
    rows = ApplicationKey.objects.filter(revoked_at=None).order_by("id")
    columns = rows.values_list(
        "prefix", "digest", "tenant", "serving_class", "deployments", "expires_at",
        "requests_per_min", "tokens_per_min", "max_concurrent",
    )  # fmt: skip
    return tuple(
        ApiKey(prefix, digest, tenant, serving_class, tuple(pools), expires.timestamp() if expires else None, *limits)
        for prefix, digest, tenant, serving_class, pools, expires, *limits in columns.iterator(chunk_size=5000)
    )


def ingresses_with_keys() -> QuerySet[Ingress]:
    """Ingresses that have ever served, with the `version` of keys that each enforces and the one it should.

    An ingress whose table is so old that it is no longer kept counts as one that knows nothing of any change.
    """
    in_force = RoutingTable.objects.filter(region_id=OuterRef("region_id"), revision=OuterRef("report__revision"))
    newest = RoutingTable.objects.filter(region_id=OuterRef("region_id")).order_by("-revision")
    return Ingress.objects.filter(report__revision__gt=0).annotate(
        version=Coalesce(_version_of(in_force), Value(0)),
        wanted_version=Coalesce(_version_of(newest), Value(0)),
        connected=F("report__connected"),
    )


def _version_of(tables: QuerySet[RoutingTable]) -> Subquery:
    version = Cast(KT(f"body__{KEY_RING}__version"), BigIntegerField())
    return Subquery(tables.annotate(keys_version=version).values("keys_version")[:1])


def keys_in_force() -> dict[str, int]:
    """Ingress -> the version of keys that it enforces."""
    return dict(ingresses_with_keys().values_list("id", "version"))
