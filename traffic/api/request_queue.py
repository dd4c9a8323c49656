"""Over HTTP: queues whose messages are near-real-time requests, and why some of those are none. Decides nothing."""

from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import StrictSerializer, actor_of
from kernel.rest.view_sets import GenericViewSet, ListModelMixin
from traffic.models import RefusedMessage, RequestQueue
from traffic.services.request_queue import request_queue_declare, request_queue_withdraw

REFUSED_SHOWN = 20


class RefusedMessageSerializer(serializers.ModelSerializer[RefusedMessage]):
    class Meta:
        model = RefusedMessage
        fields = ["message", "reason", "at"]
        examples = {"message": "5fea7756-0ea4-451a-a703-a558b933e274"}


class RequestQueueSerializer(serializers.ModelSerializer[RequestQueue]):
    key = serializers.CharField(source="key.prefix", help_text="Prefix of the key whose requests its messages are.")
    tenant = serializers.CharField(source="key.tenant")
    reason = serializers.CharField(help_text="Why it is not read; empty while it is.")
    waiting = serializers.IntegerField(allow_null=True, help_text="About how many messages it has.")
    refused = serializers.SerializerMethodField(help_text="The last messages that were left for its dead letters.")

    class Meta:
        model = RequestQueue
        fields = [
            "id", "url", "name", "key", "tenant", "actor", "created_at", "state", "reason", "read_at", "waiting",
            "refused",
        ]  # fmt: skip
        examples = {"name": "sw-0123456789ab-requests-orders"}

    @extend_schema_field(RefusedMessageSerializer(many=True))
    def get_refused(self, row: RequestQueue) -> object:
        return RefusedMessageSerializer(list(row.refused.all())[:REFUSED_SHOWN], many=True).data


class DeclareRequestQueueSerializer(StrictSerializer):
    url = serializers.CharField(max_length=200, help_text="Output `Queue` of deploy/aws/requests.yaml.")
    key = serializers.CharField(max_length=40, help_text="Prefix of an application key.")


class RequestQueueViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[RequestQueue]):
    """Queues of SQS whose messages are near-real-time requests of a key."""

    serializer_class = RequestQueueSerializer
    lookup_field = "id"
    lookup_value_regex = r"[0-9]{1,18}"
    page_order = "id"
    needs = {"create": Role.ADMIN, "destroy": Role.ADMIN}
    ordering_fields = ("id", "name", "created_at")
    columns = "ID, NAME, TENANT, KEY, STATE, WAITING, REASON"

    def get_queryset(self) -> QuerySet[RequestQueue]:
        return RequestQueue.objects.select_related("key").prefetch_related("refused")

    @extend_schema(
        operation_id="request_queues_create",
        request=DeclareRequestQueueSerializer,
        responses={200: RequestQueueSerializer},
    )
    def create(self, request: Request) -> Response:
        """Let senders take the messages of a queue as requests of a key. 409 if they do already."""
        body = DeclareRequestQueueSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        row = request_queue_declare(**body.validated_data, actor=actor_of(request), now=clock.now())
        return Response(RequestQueueSerializer(row).data)

    @extend_schema(operation_id="request_queues_delete", responses={200: RequestQueueSerializer})
    def destroy(self, request: Request, id: str) -> Response:
        """Take no more messages of a queue; those that wait stay in it. Responds with what it was."""
        row = self.get_object()
        shown = RequestQueueSerializer(row).data
        request_queue_withdraw(queue_id=row.pk, actor=actor_of(request), now=clock.now())
        return Response(shown)
