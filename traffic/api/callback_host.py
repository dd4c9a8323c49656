"""Over HTTP: to which hosts callbacks of a tenant may go. Decides nothing; services do."""

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import OpenApiExample, extend_schema, extend_schema_serializer
from rest_framework import serializers
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import StrictSerializer, actor_of
from kernel.rest.view_sets import GenericViewSet, ListModelMixin
from traffic.api import request_examples
from traffic.models import CallbackHost
from traffic.services.callback_host import callback_host_allow, callback_host_withdraw


@extend_schema_serializer(
    examples=[OpenApiExample("callback host", request_examples.CALLBACK_HOST, response_only=True)]
)
class CallbackHostSerializer(serializers.ModelSerializer[CallbackHost]):
    tenant = serializers.CharField(help_text="Empty: requests without a key.")
    host = serializers.CharField(help_text="With its port, unless that is 443.")

    class Meta:
        model = CallbackHost
        fields = ["id", "tenant", "host", "actor", "created_at"]


@extend_schema_serializer(examples=[OpenApiExample("a host", request_examples.NEW_CALLBACK_HOST, request_only=True)])
class AllowCallbackHostSerializer(StrictSerializer):
    tenant = serializers.CharField(
        max_length=64, allow_blank=True, required=False, default="", help_text="Left out: requests without a key."
    )
    host = serializers.CharField(max_length=260, help_text="`app.example.com`, `app.example.com:8443`.")


class CallbackHostFilter(filters.FilterSet):
    tenant = filters.CharFilter()

    class Meta:
        model = CallbackHost
        fields: list[str] = []


class CallbackHostViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[CallbackHost]):
    """Hosts that a tenant's near-real-time requests may name in `X-Switchyard-Callback-Url`. Without one: none."""

    serializer_class = CallbackHostSerializer
    filterset_class = CallbackHostFilter
    lookup_field = "id"
    lookup_value_regex = r"[0-9]{1,18}"
    page_order = "id"
    needs = {"create": Role.ADMIN, "destroy": Role.ADMIN}
    ordering_fields = ("id", "tenant", "host", "created_at")

    def get_queryset(self) -> QuerySet[CallbackHost]:
        return CallbackHost.objects.all()

    @extend_schema(
        operation_id="callback_hosts_create",
        request=AllowCallbackHostSerializer,
        responses={200: CallbackHostSerializer},
    )
    def create(self, request: Request) -> Response:
        """Let callbacks of a tenant go to a host. 409 if they may already."""
        body = AllowCallbackHostSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        row = callback_host_allow(**body.validated_data, actor=actor_of(request), now=clock.now())
        return Response(CallbackHostSerializer(row).data)

    @extend_schema(operation_id="callback_hosts_delete", responses={200: CallbackHostSerializer})
    def destroy(self, request: Request, id: str) -> Response:
        """Take a host off a tenant's list; what waits to be sent there is given up. Responds with what it was."""
        row = self.get_object()
        shown = CallbackHostSerializer(row).data
        callback_host_withdraw(host_id=row.pk, actor=actor_of(request), now=clock.now())
        return Response(shown)
