"""Near-real-time requests under `/v1/async/` for applications, in OpenAI's format, and request queues for operators.
Ingresses forward these requests unchanged, so the application is identified here by its key. Decides nothing; services
do."""

from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.urls import path, re_path
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import StrictSerializer, actor_of, body_of
from kernel.rest.view_sets import GenericViewSet, ListModelMixin
from traffic.async_requests.consumers import ENDPOINTS, PREFIX
from traffic.async_requests.models import RefusedMessage, RequestQueue
from traffic.async_requests.planner import AsyncSettings
from traffic.async_requests.planning.kafka import KafkaSecurity, SaslMechanism, TopicSettings
from traffic.async_requests.selectors import async_request_json, async_request_of
from traffic.async_requests.services.body_groups import answer_load
from traffic.async_requests.services.queues import request_queue_declare, request_queue_withdraw
from traffic.async_requests.services.requests import async_request_cancel
from traffic.files.api import away_refused
from traffic.tenants.api import application_view, unknown_path
from traffic.tenants.planner import ApplicationRefused
from traffic.tenants.selectors import Application

APPLICATIONS = "applications' requests are counted as usage, by key; they change nothing that operators run"


@application_view("POST", audit_exempt_as=APPLICATIONS)
def accept(request: HttpRequest, application: Application) -> HttpResponseBase:
    """A POST without a body; others are accepted in front of Django (`consumers.AcceptAsync`)."""
    raise ApplicationRefused(400, "invalid_json", "the request body is not valid JSON: it is empty")


@application_view("GET", "DELETE", audit_exempt_as=APPLICATIONS)
@away_refused()
def detail(request: HttpRequest, application: Application, request_id: str) -> HttpResponseBase:
    """GET: state of a request. DELETE: cancel it, unless it has ended."""
    if request.method == "DELETE":
        stored = async_request_cancel(application=application, request_id=request_id, now=clock.now())
    else:
        stored = async_request_of(application, request_id)
    if stored is None:
        raise ApplicationRefused(404, "not_found", f"there is no request {request_id[:40]!r}")
    return JsonResponse(async_request_json(answer_load(stored), AsyncSettings()))


no_such_path = unknown_path(f"{', '.join(ENDPOINTS)} and {PREFIX}ID", audit_exempt_as=APPLICATIONS)


REFUSED_SHOWN = 20


class RefusedMessageSerializer(serializers.ModelSerializer[RefusedMessage]):
    class Meta:
        model = RefusedMessage
        fields = ["message", "reason", "at"]
        examples = {"message": "5fea7756-0ea4-451a-a703-a558b933e274"}


class RequestQueueSerializer(serializers.ModelSerializer[RequestQueue]):
    key = serializers.CharField(source="key.prefix", help_text="Prefix of the key that its messages use.")
    tenant = serializers.CharField(source="key.tenant")
    reason = serializers.CharField(help_text="Why it is not read, or empty.")
    waiting = serializers.IntegerField(allow_null=True, help_text="Approximate number of messages.")
    has_password = serializers.BooleanField(source="sealed_password", help_text="The password itself is not shown.")
    refused = serializers.SerializerMethodField(help_text="The last messages that are no requests.")

    class Meta:
        model = RequestQueue
        fields = [
            "id", "url", "kind", "name", "key", "tenant", "actor", "created_at", "state", "reason",
            "read_at", "waiting", "group", "results_topic", "dead_letter_topic", "security", "mechanism",
            "username", "has_password", "refused",
        ]  # fmt: skip
        examples = {"name": "sw-0123456789ab-requests-orders"}

    @extend_schema_field(RefusedMessageSerializer(many=True))
    def get_refused(self, row: RequestQueue) -> object:
        return RefusedMessageSerializer(list(row.refused.all())[:REFUSED_SHOWN], many=True).data


class TopicSettingsSerializer(StrictSerializer):
    """Settings of a topic of Kafka."""

    group = serializers.CharField(
        max_length=128, required=False, help_text="Consumer group. Default: by install and topic."
    )
    results_topic = serializers.CharField(max_length=80, required=False, help_text="Gets a record for each outcome.")
    dead_letter_topic = serializers.CharField(
        max_length=80, required=False, help_text="Gets records that are no requests, with the reason as a header."
    )
    security = serializers.ChoiceField(
        choices=[each.value for each in KafkaSecurity], required=False, help_text="Default: PLAINTEXT."
    )
    mechanism = serializers.ChoiceField(
        choices=[each.value for each in SaslMechanism], required=False, help_text="Default: SCRAM-SHA-512."
    )
    username = serializers.CharField(max_length=256, required=False)
    password = serializers.CharField(max_length=1024, required=False, help_text="Stored encrypted and never shown.")
    ca_pem = serializers.CharField(
        max_length=65536, required=False, help_text="Certificates that may sign the brokers'. Default: the host's."
    )


class DeclareRequestQueueSerializer(StrictSerializer):
    url = serializers.CharField(
        max_length=500, help_text="Output `Queue` of deploy/aws/requests.yaml, or kafka://HOST:PORT[,HOST:PORT]/TOPIC."
    )
    key = serializers.CharField(max_length=40, help_text="Prefix of an application key.")
    topic = TopicSettingsSerializer(required=False, help_text="Only for Kafka.")


class RequestQueueViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[RequestQueue]):
    """SQS queues and topics of Kafka whose messages are near-real-time requests of a key."""

    queryset = RequestQueue.objects.select_related("key").prefetch_related("refused")
    serializer_class = RequestQueueSerializer
    page_order = "id"
    needs = {"create": Role.ADMIN, "destroy": Role.ADMIN}
    ordering_fields = ("id", "name", "created_at")
    columns = "ID, KIND, NAME, TENANT, KEY, STATE, WAITING, REASON"

    @extend_schema(request=DeclareRequestQueueSerializer)
    def create(self, request: Request) -> Response:
        """Bind a queue or topic to a key, so that senders read it. Returns 409 if it is bound already."""
        body = dict(body_of(request, DeclareRequestQueueSerializer))
        topic = body.pop("topic", None)
        stated = TopicSettings(**topic) if topic is not None else None
        row = request_queue_declare(**body, topic=stated, actor=actor_of(request), now=clock.now())
        return Response(RequestQueueSerializer(row).data)

    def destroy(self, request: Request, id: str) -> Response:
        """Stop reading a queue; its messages stay there. Responds with the deleted row."""
        return self.remove_object(request, request_queue_withdraw, "queue_id")


ROUTES = (("request-queues", RequestQueueViewSet, "request-queue"),)

urlpatterns = [
    *(path(each.removeprefix(PREFIX), accept, name=f"async-{each.removeprefix(PREFIX)}") for each in ENDPOINTS),
    path("<str:request_id>", detail, name="async-request"),
    re_path(r"^", no_such_path),
]
