"""Ingresses with what they report and what they should run, in one query."""

from django.db.models import OuterRef, QuerySet, Subquery, TextField, Value
from django.db.models.functions import Coalesce

from traffic.models import Ingress, RoutingTable


def ingresses_described() -> QuerySet[Ingress]:
    """Ingresses with their last report, and `wanted_revision` of their region's newest table, 0 before the first.

    Of one that never reported `connected` is False, `revision` 0 and `reason` "".
    """
    newest = RoutingTable.objects.filter(region_id=OuterRef("region_id")).order_by("-revision")
    return Ingress.objects.select_related("report").annotate(
        connected=Coalesce("report__connected", Value(False)),
        revision=Coalesce("report__revision", Value(0)),
        reason=Coalesce("report__reason", Value(""), output_field=TextField()),
        wanted_revision=Coalesce(Subquery(newest.values("revision")[:1]), Value(0)),
    )
