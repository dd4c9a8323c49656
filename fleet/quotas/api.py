"""Quotas of teams over HTTP, each with who has and borrows what. Decides nothing; services do."""

from typing import Any

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from fleet.deployments.api import TEAM
from fleet.quotas.models import Quota
from fleet.quotas.selectors import QuotaUse, owner_of, quota_uses_of, uses_of
from fleet.quotas.services import MACHINES_MOST, quota_remove, quota_set
from kernel import clock
from kernel.rest.serializers import StrictSerializer, actor_of
from kernel.rest.view_sets import ReadOnlyModelViewSet


class QuotaSerializer(serializers.ModelSerializer[Quota]):
    # The context holds, under `uses`, what each team uses of each type.
    instance_type = serializers.CharField(source="instance_type_id")
    region = serializers.SerializerMethodField(help_text="Empty: over all regions, beside the quotas of each.")
    machines = serializers.IntegerField(help_text="To which the team is entitled.")
    borrow_most = serializers.IntegerField(
        allow_null=True, help_text="How many of others it may borrow; null: any number."
    )
    wanted = serializers.SerializerMethodField(help_text="Machines that all cells of its deployments would take.")
    used = serializers.SerializerMethodField(help_text="Machines in cells of its deployments now.")
    borrowed = serializers.SerializerMethodField(help_text="Of these, beyond what it is entitled to.")
    idle = serializers.SerializerMethodField(help_text="To which it is entitled and which it does not use.")
    deployments = serializers.SerializerMethodField(help_text="Of the team, on this type.")

    class Meta:
        model = Quota
        fields = [
            "name", "team", "instance_type", "region", "machines", "borrow_most", "wanted", "used", "borrowed",
            "idle", "deployments", "changed_by", "changed_at",
        ]  # fmt: skip
        examples = {"name": "search:trn1.32xlarge"}

    def _use(self, row: Quota) -> QuotaUse:
        return uses_of(row, self.context["uses"])

    def get_region(self, row: Quota) -> str:
        return row.region_id or ""

    def get_wanted(self, row: Quota) -> int:
        return self._use(row).wanted

    def get_used(self, row: Quota) -> int:
        return self._use(row).used

    def get_borrowed(self, row: Quota) -> int:
        return self._use(row).borrowed

    def get_idle(self, row: Quota) -> int:
        return self._use(row).idle

    @extend_schema_field(serializers.ListField(child=serializers.CharField()))
    def get_deployments(self, row: Quota) -> list[str]:
        return list(self._use(row).deployments)


class SetQuotaSerializer(StrictSerializer):
    team = serializers.RegexField(TEAM, max_length=64, help_text="As deployments name theirs.")
    instance_type = serializers.CharField(max_length=64)
    region = serializers.CharField(
        max_length=64, required=False, allow_blank=True, default="", help_text="Left out: over all regions."
    )
    machines = serializers.IntegerField(min_value=0, max_value=MACHINES_MOST)
    borrow_most = serializers.IntegerField(
        min_value=0,
        max_value=MACHINES_MOST,
        required=False,
        allow_null=True,
        help_text="How many of others it may borrow; left out or null: any number.",
    )


class QuotaFilter(filters.FilterSet):
    team = filters.CharFilter()
    instance_type = filters.CharFilter(field_name="instance_type_id")
    region = filters.CharFilter(field_name="region_id")

    class Meta:
        model = Quota
        fields: list[str] = []


class QuotaViewSet(ReadOnlyModelViewSet[Quota]):
    """Machines of a type that a team is entitled to, in a region or over all. What it leaves idle the other teams with
    a quota there may borrow, until it wants them."""

    serializer_class = QuotaSerializer
    filterset_class = QuotaFilter
    lookup_field = "name"
    lookup_value_regex = r"[-\w.:@+]+"
    ordering_fields = ("name", "team", "instance_type", "machines", "changed_at")
    watch_kind = "quota"
    measured = frozenset({"wanted", "used", "borrowed", "idle"})
    columns = "TEAM, TYPE=instance_type, REGION, MACHINES, USED, BORROWED, IDLE, WANTED, DEPLOYMENTS"

    def get_queryset(self) -> QuerySet[Quota]:
        return Quota.objects.all()

    def get_serializer_context(self) -> dict[str, Any]:
        owners = {owner_of(row) for row in Quota.objects.all()}
        return {**super().get_serializer_context(), "uses": quota_uses_of(owners) if owners else {}}

    @extend_schema(operation_id="quotas_set", request=SetQuotaSerializer, responses={200: QuotaSerializer})
    def create(self, request: Request) -> Response:
        """Entitle a team to so many machines of a type, or to another number than before. Cells that it then has on
        borrowed machines go once their owners want these; cells that no quota allows go at once, one by one."""
        body = SetQuotaSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        row = quota_set(**body.validated_data, actor=actor_of(request), now=clock.now())
        return Response(self.get_serializer(row).data)

    @extend_schema(operation_id="quotas_delete", responses={200: QuotaSerializer})
    def destroy(self, request: Request, name: str) -> Response:
        """End a quota: the team is bound by none of that type any more, and entitled to none. Responds with what it
        was."""
        row = self.get_object()
        shown = self.get_serializer(row).data
        quota_remove(name=row.name, actor=actor_of(request), now=clock.now())
        return Response(shown)
