"""Quotas of teams over HTTP, each with its use and borrowing. Parses and renders; services decide."""

from typing import Any

from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from fleet.quotas.models import Quota
from fleet.quotas.selectors import owner_of, quota_uses_of, uses_of
from fleet.quotas.services import quota_remove, quota_set
from kernel import clock
from kernel.rest.serializers import ColumnsSerializer, RecordSerializer, actor_of, body_of
from kernel.rest.view_sets import ReadOnlyModelViewSet


class QuotaSerializer(RecordSerializer[Quota]):
    # Context: `uses`, the use of each team and type.
    wanted = serializers.IntegerField(source="use.wanted", help_text="Machines that all target cells need.")
    used = serializers.IntegerField(source="use.used", help_text="Machines in cells of its deployments.")
    borrowed = serializers.IntegerField(source="use.borrowed", help_text="Of these, machines above the quota.")
    idle = serializers.IntegerField(source="use.idle", help_text="Unused machines of the quota.")
    deployments = serializers.ListField(
        source="use.deployments", child=serializers.CharField(), help_text="The team's deployments on this type."
    )

    class Meta:
        model = Quota
        fields = [
            "name", "team", "instance_type", "region", "machines", "borrow_most", "wanted", "used", "borrowed",
            "idle", "deployments", "changed_by", "changed_at",
        ]  # fmt: skip
        examples = {"name": "search:trn1.32xlarge"}

    def to_representation(self, instance: Quota) -> dict[str, Any]:
        instance.use = uses_of(instance, self.context["uses"])  # type: ignore[attr-defined]
        return super().to_representation(instance)


class SetQuotaSerializer(ColumnsSerializer):
    class Meta:
        model = Quota
        columns = ("team", "instance_type", "region", "machines", "borrow_most")


class QuotaFilter(filters.FilterSet):
    team = filters.CharFilter()
    instance_type = filters.CharFilter(field_name="instance_type_id")
    region = filters.CharFilter(field_name="region_id")


class QuotaViewSet(ReadOnlyModelViewSet[Quota]):
    """Machines of a type that a team is entitled to, in a region or in total. Other teams with a quota there may borrow
    idle ones until the team needs them."""

    queryset = Quota.objects.all()
    serializer_class = QuotaSerializer
    filterset_class = QuotaFilter
    lookup_field = "name"
    lookup_value_regex = r"[-\w.:@+]+"
    ordering_fields = ("name", "team", "instance_type", "machines", "changed_at")
    watch_kind = "quota"
    measured = frozenset({"wanted", "used", "borrowed", "idle"})
    columns = "TEAM, TYPE=instance_type, REGION, MACHINES, USED, BORROWED, IDLE, WANTED, DEPLOYMENTS"

    def get_serializer_context(self) -> dict[str, Any]:
        owners = {owner_of(row) for row in Quota.objects.all()}
        return {**super().get_serializer_context(), "uses": quota_uses_of(owners) if owners else {}}

    @extend_schema(operation_id="quotas_set", request=SetQuotaSerializer)
    def create(self, request: Request) -> Response:
        """Creates or changes a team's quota of a type. Cells on machines that are then borrowed stop when their owners
        need these; cells that no quota allows stop one by one."""
        body = body_of(request, SetQuotaSerializer)
        row = quota_set(**body, actor=actor_of(request), now=clock.now())
        return Response(self.get_serializer(row).data)

    def destroy(self, request: Request, name: str) -> Response:
        """Deletes a quota and returns it. The team is then neither limited by it nor entitled to its machines."""
        return self.remove_object(request, quota_remove, "name")


ROUTES = (("quotas", QuotaViewSet, "quota"),)
