"""What admins allow engines beyond the lists, over HTTP. Decides nothing; services do."""

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.api.approvals import ApprovalSerializer, waiting
from accounts.models import Approval
from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import StrictSerializer, actor_of
from kernel.rest.view_sets import GenericViewSet, ListModelMixin
from models_registry.models import EngineAllowance
from models_registry.planning.engine_arguments import ENGINES
from models_registry.services.engine_allowance import engine_allowance_request, engine_allowance_withdraw


class EngineAllowanceSerializer(serializers.ModelSerializer[EngineAllowance]):
    engine = serializers.ChoiceField(choices=ENGINES)
    name = serializers.CharField(help_text="`--option` or `VARIABLE`.")

    class Meta:
        model = EngineAllowance
        fields = ["id", "engine", "name", "why", "actor", "created_at"]
        examples = {"name": "--trust-remote-code"}


class AllowSerializer(StrictSerializer):
    engine = serializers.ChoiceField(choices=ENGINES)
    name = serializers.CharField(max_length=128, help_text="`trust_remote_code`, `--trust-remote-code`, `LD_PRELOAD`.")
    why = serializers.CharField(max_length=200, help_text="Your reason: it lets versions run what the lists do not.")

    class Meta:
        examples = {"name": "--trust-remote-code"}


class EngineAllowanceFilter(filters.FilterSet):
    engine = filters.CharFilter()

    class Meta:
        model = EngineAllowance
        fields: list[str] = []


class EngineAllowanceViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[EngineAllowance]):
    """Options and variables that engines may be given beyond the lists that come with Switchyard. Each lets operators
    have nodes run what those lists keep out."""

    serializer_class = EngineAllowanceSerializer
    filterset_class = EngineAllowanceFilter
    lookup_field = "id"
    lookup_value_regex = r"[0-9]{1,18}"
    page_order = "id"
    needs = {"create": Role.ADMIN, "destroy": Role.ADMIN}
    ordering_fields = ("id", "engine", "name", "created_at")
    aliases = ("allowances",)
    columns = "ID, ENGINE, NAME, ACTOR, WHY, AGE=created_at:age"

    def get_queryset(self) -> QuerySet[EngineAllowance]:
        return EngineAllowance.objects.all()

    @extend_schema(
        operation_id="engine_allowances_create",
        request=AllowSerializer,
        responses={200: EngineAllowanceSerializer, 202: ApprovalSerializer},
    )
    def create(self, request: Request) -> Response:
        """Allow an engine one more option or variable. 409 if it may be given it already; 202 where that needs
        two-person approval."""
        body = AllowSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        row = engine_allowance_request(**body.validated_data, actor=actor_of(request), now=clock.now())
        if isinstance(row, Approval):
            return waiting(row)
        return Response(EngineAllowanceSerializer(row).data)

    @extend_schema(operation_id="engine_allowances_delete", responses={200: EngineAllowanceSerializer})
    def destroy(self, request: Request, id: str) -> Response:
        """Take an allowance back; engines that run go on, none is started with it. Responds with what it was."""
        row = self.get_object()
        shown = EngineAllowanceSerializer(row).data
        engine_allowance_withdraw(allowance_id=row.pk, actor=actor_of(request), now=clock.now())
        return Response(shown)
