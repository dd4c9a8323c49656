"""Loads what the routing planner takes beside cells (traffic.selectors.routing_cache), routing tables with their state,
and tables as the ingresses get them.
"""

import msgspec
from django.conf import settings
from django.db.models import Exists, Max, OuterRef, QuerySet
from django.utils.crypto import salted_hmac

from engine_agent.protocol.ingress_messages import Hold, Withheld
from engine_agent.protocol.ingress_messages import RoutingTable as TableMessage
from fleet.models import Deployment
from traffic.models import Ingress, IngressReport, PoolHold, RoutingTable
from traffic.planning.ingress import FollowingIngress
from traffic.planning.key import shared_keys
from traffic.planning.routing import HeldDeployment, IngressAddress, ServedDeployment
from traffic.selectors.key import KEY_RING, keys_for_ingresses, tenants_stopped


def served_deployments() -> list[ServedDeployment]:
    return [
        ServedDeployment(
            name=deployment.name,
            models=tuple(dict.fromkeys((deployment.name, deployment.model_version.model_id))),
            serving_class=deployment.serving_class,
            max_model_len=deployment.model_version.spec().max_model_len,
            created_at=int(deployment.model_version.created_at.timestamp()),
            adapters=deployment.model_version.adapter_names,
        )
        for deployment in Deployment.objects.select_related("model_version")
    ]


def held_deployments() -> dict[str, HeldDeployment]:
    """Those that may have no cells, by name."""
    rows = PoolHold.objects.filter(deployment__regions__cells_max__isnull=False).distinct()
    return {
        row.deployment_id: HeldDeployment(
            Hold(row.for_s, row.cold_start_s, row.ready_at, Withheld(row.withheld)), frozenset(row.regions)
        )
        for row in rows
    }


def ingress_addresses() -> list[IngressAddress]:
    return [
        IngressAddress(ingress.id, ingress.region_id, ingress.address, ingress.port)
        for ingress in Ingress.objects.exclude(address="")
    ]


def latest_tables() -> dict[str, RoutingTable]:
    """Region -> the table in force."""
    return {
        table.region_id: table
        for table in RoutingTable.objects.order_by("region_id", "-revision").distinct("region_id")
    }


def latest_revisions() -> dict[str, int]:
    rows = RoutingTable.objects.order_by().values("region_id").annotate(latest=Max("revision"))
    return {row["region_id"]: row["latest"] for row in rows}


class UnreadableTable(Exception):
    """A stored table is of a shape that this version does not know; the text names it and says what is wrong."""


def table_message(table: RoutingTable) -> TableMessage:
    """A stored table as it goes over the wire, less its keys. The only way to read one.

    Raises:
        UnreadableTable: its body is none. That is its own region's trouble: whoever reads many goes on without it.
    """
    try:
        stated = {**table.body, "revision": table.revision, "region": table.region_id, "type": "routing_table"}
        return msgspec.convert(stated, TableMessage)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise UnreadableTable(f"{table.region_id} revision {table.revision} cannot be read: {error}") from error


def table_for_ingresses(table: RoutingTable) -> TableMessage:
    """A stored table as its ingresses get it: with the keys that go with it, and the secrets if there are other
    regions: proving hops costs every request something."""
    has_regions = Ingress.objects.values("region").distinct().count() > 1
    message = msgspec.structs.replace(table_message(table), hop_secrets=hop_secrets() if has_regions else ())
    ring = table.body.get(KEY_RING)
    if not ring:
        return message
    keys = shared_keys(keys_for_ingresses(), ring["ingresses"])
    return msgspec.structs.replace(
        message, keys=keys, keys_required=ring["required"], tenants_over_quota=tenants_stopped()
    )


def routed_cells(table: TableMessage) -> frozenset[str]:
    return frozenset(cell.cell for pool in table.pools for cell in pool.cells if not cell.drain)


def following_ingresses() -> list[FollowingIngress]:
    """Every ingress with the revision that it last acknowledged."""
    reports = IngressReport.objects.values_list("ingress__region_id", "revision", "last_seen_at")
    return [FollowingIngress(*columns) for columns in reports]


def routing_tables_described() -> QuerySet[RoutingTable]:
    """Every revision; `current` tells the newest of its region."""
    newer = RoutingTable.objects.filter(region_id=OuterRef("region_id"), revision__gt=OuterRef("revision"))
    return RoutingTable.objects.annotate(current=~Exists(newer))


def table_by_reference(tables: QuerySet[RoutingTable], reference: str) -> RoutingTable | None:
    """The table that `region@revision` names, or None."""
    region, _, revision = reference.partition("@")
    return tables.filter(region_id=region, revision=int(revision)).first()


SALT = "switchyard.traffic.hops"
MAX_SECRETS = 2
"""What an ingress accepts: the secret in use and the one before."""


def hop_secrets() -> tuple[str, ...]:
    """The secret to sign with first. A new SECRET_KEY gives a new one; the first of SECRET_KEY_FALLBACKS, the other."""
    keys = [settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS][:MAX_SECRETS]
    return tuple(salted_hmac(SALT, "", secret=key, algorithm="sha256").hexdigest() for key in keys)
