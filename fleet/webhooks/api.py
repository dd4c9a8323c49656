"""Webhooks over HTTP: add, change, remove and test them, and list their deliveries. Parses requests and calls services;
never decides."""

from django.conf import settings
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from fleet.reconcile.planning.states import choices
from fleet.webhooks.models import Webhook, WebhookDelivery
from fleet.webhooks.planner import DeliveryState, WebhookEvent, WebhookFormat
from fleet.webhooks.services import (
    webhook_change,
    webhook_create,
    webhook_delete,
    webhook_secret_rotate,
    webhook_test,
)
from kernel import clock
from kernel.access import Role
from kernel.outbound import RefusedUrl, parse_url
from kernel.rest.serializers import StrictSerializer, actor_of, body_of
from kernel.rest.view_sets import GenericViewSet, ListModelMixin, ReadOnlyModelViewSet
from kernel.tones import Tone

FORMATS = choices(WebhookFormat)
EVENTS = [(event.value, event.value) for event in WebhookEvent if event is not WebhookEvent.TEST]


class WebhookSerializer(serializers.ModelSerializer[Webhook]):
    url = serializers.CharField(source="shown_url", help_text="Only the host, because the path may be secret.")
    format = serializers.ChoiceField(choices=FORMATS)
    events = serializers.ListField(child=serializers.ChoiceField(choices=EVENTS), help_text="All events if empty.")

    class Meta:
        model = Webhook
        fields = ["name", "url", "format", "events", "enabled", "created_at"]
        examples = {"name": "pager"}


class NewWebhookSerializer(WebhookSerializer):
    class Meta(WebhookSerializer.Meta):
        fields = [*WebhookSerializer.Meta.fields, "secret"]


class ChangeWebhookSerializer(StrictSerializer):
    url = serializers.CharField(max_length=500, required=False, help_text="https, unless its network is allowed.")
    events = serializers.ListField(
        child=serializers.ChoiceField(choices=EVENTS), required=False, help_text="All events if empty."
    )
    format = serializers.ChoiceField(
        choices=FORMATS, required=False, help_text="`slack`: for chats that support Slack's incoming webhooks."
    )
    secret = serializers.CharField(
        min_length=16, max_length=128, required=False, help_text="Key for signatures; random by default."
    )
    enabled = serializers.BooleanField(required=False)

    def validate_url(self, url: str) -> str:
        try:
            target = parse_url(url)
        except RefusedUrl as refusal:
            raise serializers.ValidationError(str(refusal)) from refusal
        if target.scheme != "https" and not settings.WEBHOOK_NETWORKS:
            raise serializers.ValidationError("must be https; http needs SWITCHYARD_WEBHOOK_NETWORKS")
        return url


class CreateWebhookSerializer(ChangeWebhookSerializer):
    name = serializers.SlugField(max_length=64)
    url = serializers.CharField(max_length=500, help_text="https, unless its network is allowed.")


class WebhookDeliverySerializer(serializers.ModelSerializer[WebhookDelivery]):
    webhook = serializers.CharField(source="webhook.name")
    tone = serializers.ChoiceField(choices=choices(Tone))
    body = serializers.DictField(help_text="The event; its keys depend on its kind.")
    status = serializers.IntegerField(allow_null=True, help_text="HTTP status of the last response.")

    class Meta:
        model = WebhookDelivery
        fields = [
            "id", "webhook", "event", "state", "tone", "attempts", "status", "reason", "body", "created_at", "due_at",
            "ended_at",
        ]  # fmt: skip
        examples = {
            "webhook": "pager",
            "event": "incident.opened",
            "body": {"id": 7, "kind": "node-slow", "summary": "Node n-4e5f6a7b: slower than its cohort"},
        }


class WebhookDeliveryFilter(filters.FilterSet):
    webhook = filters.CharFilter(field_name="webhook__name")
    state = filters.MultipleChoiceFilter(choices=choices(DeliveryState), distinct=False, help_text="May be repeated.")
    event = filters.CharFilter()


class WebhookDeliveryViewSet(ReadOnlyModelViewSet[WebhookDelivery]):
    """Messages to webhooks with their delivery state, newest first."""

    queryset = WebhookDelivery.objects.filter(webhook__isnull=False).select_related("webhook")
    serializer_class = WebhookDeliverySerializer
    filterset_class = WebhookDeliveryFilter
    lookup_value_regex = r"[0-9]+"
    page_order = "-id"
    ordering_fields = ("id", "event", "state", "created_at", "due_at", "ended_at")
    watch_kind = "webhook-delivery"


class WebhookViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[Webhook]):
    """Receivers of notifications about incidents and rollouts. Messages are signed: `X-Switchyard-Signature` is
    `sha256=` and the HMAC-SHA256 of `<X-Switchyard-Timestamp>.<body>` with the secret."""

    queryset = Webhook.objects.all()
    serializer_class = WebhookSerializer
    lookup_field = "name"
    lookup_value_regex = r"[-\w]+"
    page_order = "name"
    needs = {"create": Role.ADMIN, "partial_update": Role.ADMIN, "destroy": Role.ADMIN, "rotate": Role.ADMIN}
    ordering_fields = ("name", "enabled", "created_at")
    watch_kind = "webhook"
    shown_once = frozenset({"create", "rotate"})
    columns = "NAME, URL, ENABLED, EVENTS"

    @extend_schema(request=CreateWebhookSerializer, responses={200: NewWebhookSerializer})
    def create(self, request: Request) -> Response:
        """Add a webhook. Only this response contains its secret. 409 if the name is taken."""
        columns = body_of(request, CreateWebhookSerializer)
        hook = webhook_create(actor=actor_of(request), now=clock.now(), **columns)
        return Response(NewWebhookSerializer(hook).data)

    @extend_schema(request=ChangeWebhookSerializer)
    def partial_update(self, request: Request, name: str) -> Response:
        """Change the given fields."""
        return self.act_on_object(request, webhook_change, "name", ChangeWebhookSerializer)

    def destroy(self, request: Request, name: str) -> Response:
        """Remove a webhook and its undelivered messages, and return it."""
        return self.remove_object(request, webhook_delete, "name")

    @extend_schema(request=None, responses={200: NewWebhookSerializer})
    @action(detail=True, methods=["post"])
    def rotate(self, request: Request, name: str) -> Response:
        """Replace the secret by a random one. Only this response contains it. It signs all messages from now on."""
        hook = webhook_secret_rotate(name=self.get_object().name, actor=actor_of(request), now=clock.now())
        return Response(NewWebhookSerializer(hook).data)

    @extend_schema(responses={200: WebhookDeliverySerializer})
    @action(detail=True, methods=["post"])
    def test(self, request: Request, name: str) -> Response:
        """Send a test message; the returned delivery shows its progress. 409 if the webhook is disabled."""
        delivery = webhook_test(name=self.get_object().name, actor=actor_of(request), now=clock.now())
        return Response(WebhookDeliverySerializer(delivery).data)


ROUTES = (
    ("webhooks", WebhookViewSet, "webhook"),
    ("webhook-deliveries", WebhookDeliveryViewSet, "webhook-delivery"),
)
