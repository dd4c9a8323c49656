"""Routing tables, each with whether it is the one in force, in one query."""

from django.db.models import Exists, OuterRef, QuerySet

from traffic.models import RoutingTable


def routing_tables_described() -> QuerySet[RoutingTable]:
    """Every revision; `current` tells the newest of its region."""
    newer = RoutingTable.objects.filter(region_id=OuterRef("region_id"), revision__gt=OuterRef("revision"))
    return RoutingTable.objects.annotate(current=~Exists(newer))


def table_by_reference(tables: QuerySet[RoutingTable], reference: str) -> RoutingTable | None:
    """The table that `region@revision` names, or None."""
    region, _, revision = reference.partition("@")
    return tables.filter(region_id=region, revision=int(revision)).first()
