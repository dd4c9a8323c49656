"""Application keys over HTTP, and the version of them that each ingress enforces. Parses, calls one service, renders;
decides nothing."""

from datetime import timedelta

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from engine_agent.protocol.states import ServingClass
from fleet.reconcile.planning.states import choices
from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import StrictSerializer, WhySerializer, actor_of, body_of, validated
from kernel.rest.view_sets import GenericViewSet, ListModelMixin, ReadOnlyModelViewSet
from kernel.tones import Tone
from traffic.keys.models import ApplicationKey, KeyPolicy
from traffic.keys.planner import MAX_ORIGINS, KeyState, checked_origin, revoking_effect
from traffic.keys.selectors import ingresses_waited_for, ingresses_with_keys, key_policy, keys_described, keys_in_state
from traffic.keys.services import ROTATION_GRACE, NewKey, key_change, key_create, key_revoke, key_rotate, keys_require
from traffic.routing.models import Ingress

MAX_LIMIT = 2**31 - 1
"""Ingresses count in 32 bits."""
MAX_GRACE_S = 90 * 86_400
TENANT = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"
COUNTS = ["requests_24h", "limited_24h", "errors_24h"]


class KeySerializer(serializers.ModelSerializer[ApplicationKey]):
    deployments = serializers.ListField(child=serializers.CharField(), help_text="Empty for all.")
    serving_class = serializers.ChoiceField(
        choices=choices(ServingClass), help_text="The most urgent class; requests for a higher one get this."
    )
    state = serializers.SerializerMethodField()
    tone = serializers.SerializerMethodField()
    refused_everywhere_at = serializers.DateTimeField(
        allow_null=True, help_text="When the last ingress acknowledged the revocation."
    )
    revocation_lag_s = serializers.FloatField(allow_null=True, help_text="From `revoked_at` until then.")
    requests_24h = serializers.IntegerField(default=0)
    limited_24h = serializers.IntegerField(default=0, help_text="Those over a limit.")
    errors_24h = serializers.IntegerField(default=0, help_text="Those answered with 5xx.")

    allowed_origins = serializers.ListField(
        child=serializers.CharField(), help_text="Origins of browser pages that may use it. Empty for none."
    )

    class Meta:
        model = ApplicationKey
        fields = [
            "prefix", "name", "tenant", "deployments", "serving_class", "requests_per_min", "tokens_per_min",
            "max_concurrent", "allowed_origins",
            "state", "tone", "created_by", "created_at", "expires_at", "last_used_at", "revoked_at",
            "refused_everywhere_at", "revocation_lag_s", *COUNTS,
        ]  # fmt: skip
        examples: dict[str, object] = {"name": "search"}

    @extend_schema_field(serializers.ChoiceField(choices=choices(KeyState)))
    def get_state(self, key: ApplicationKey) -> str:
        return key.state_at(clock.now()).value

    @extend_schema_field(serializers.ChoiceField(choices=choices(Tone)))
    def get_tone(self, key: ApplicationKey) -> str:
        return key.tone_at(clock.now()).value


class KeyDetailSerializer(KeySerializer):
    waits_for = serializers.SerializerMethodField(help_text="Ingresses that have not acknowledged the revocation yet.")
    effect_of_revoking = serializers.SerializerMethodField()

    class Meta(KeySerializer.Meta):
        fields = [*KeySerializer.Meta.fields, "waits_for", "effect_of_revoking"]
        examples = {
            "waits_for": [],
            "effect_of_revoking": "Requests with this key are refused with 401 by 2 ingresses, within about 5 s.",
        }

    @extend_schema_field(serializers.ListField(child=serializers.CharField()))
    def get_waits_for(self, key: ApplicationKey) -> list[str]:
        if key.revoked_version is None or key.refused_everywhere_at is not None:
            return []
        return list(ingresses_waited_for(key.revoked_version))

    def get_effect_of_revoking(self, key: ApplicationKey) -> str:
        return revoking_effect(
            ingresses=ingresses_with_keys().count(),
            requests_24h=getattr(key, "requests_24h", 0),
            last_used_at=key.last_used_at,
        )


class NewKeySerializer(KeySerializer):
    key = serializers.CharField(help_text="The key's text. It cannot be read again.")

    class Meta(KeySerializer.Meta):
        fields = [*KeySerializer.Meta.fields, "key"]


class ChangeKeySerializer(StrictSerializer):
    name = serializers.CharField(max_length=96, required=False)
    requests_per_min = serializers.IntegerField(min_value=0, max_value=MAX_LIMIT, required=False, help_text="0: none.")
    tokens_per_min = serializers.IntegerField(min_value=0, max_value=MAX_LIMIT, required=False, help_text="0: none.")
    max_concurrent = serializers.IntegerField(min_value=0, max_value=MAX_LIMIT, required=False, help_text="0: none.")
    expires_at = serializers.DateTimeField(required=False, allow_null=True)
    allowed_origins = serializers.ListField(
        child=serializers.CharField(max_length=300),
        max_length=MAX_ORIGINS,
        required=False,
        help_text="Origins of browser pages that may use it, such as `https://app.example`. Empty for none.",
    )

    def validate_allowed_origins(self, value: list[str]) -> list[str]:
        try:
            return sorted({checked_origin(text) for text in value})
        except ValueError as error:
            raise serializers.ValidationError(str(error)) from None


class CreateKeySerializer(ChangeKeySerializer):
    name = serializers.CharField(max_length=96)
    tenant = serializers.RegexField(TENANT, help_text="1 to 64 letters, digits and `._-`; usage is counted by it.")
    deployments = serializers.ListField(
        child=serializers.CharField(max_length=128), max_length=100, required=False, help_text="Empty for all."
    )
    serving_class = serializers.ChoiceField(choices=choices(ServingClass), required=False)

    def validate_serving_class(self, value: str) -> ServingClass:
        return ServingClass(value)


class RotateKeySerializer(StrictSerializer):
    grace_s = serializers.IntegerField(
        min_value=1,
        max_value=MAX_GRACE_S,
        default=int(ROTATION_GRACE.total_seconds()),
        help_text="How long the old key stays valid, in seconds.",
    )


class RequireKeysSerializer(WhySerializer):
    required = serializers.BooleanField()  # type: ignore[assignment] # a serializer takes its fields away


class KeyPolicySerializer(serializers.ModelSerializer[KeyPolicy]):
    required = serializers.BooleanField(  # type: ignore[assignment] # a serializer takes its fields away
        help_text="Whether every request needs a key."
    )
    version = serializers.IntegerField(help_text="Grows with every change of any key.")

    class Meta:
        model = KeyPolicy
        fields = ["required", "version", "actor", "changed_at"]


class KeyFilter(filters.FilterSet):
    tenant = filters.CharFilter()
    state = filters.ChoiceFilter(choices=choices(KeyState), method="in_state")

    def in_state(self, keys: QuerySet[ApplicationKey], name: str, value: str) -> QuerySet[ApplicationKey]:
        return keys_in_state(keys, KeyState(value), clock.now())


class KeyViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[ApplicationKey]):
    """Keys of applications. Ingresses check keys and limits from hashes, without the control plane. A limit applies per
    region and is shared by its ingresses."""

    filterset_class = KeyFilter
    lookup_field = "prefix"
    lookup_url_kwarg = "id"
    lookup_value_regex = r"[0-9a-f]{1,16}"
    page_order = "-id"
    needs = {"require": Role.ADMIN}
    ordering_fields = ("prefix", "name", "tenant", "created_at", "expires_at", "last_used_at")
    watch_kind = "key"
    measured = frozenset(
        {
            "last_used_at",
            "requests_24h",
            "limited_24h",
            "errors_24h",
            "effect_of_revoking",
            "waits_for",
            "state",
            "tone",
        }
    )
    shown_once = frozenset({"create", "rotate"})
    columns = "PREFIX, NAME, TENANT, STATE, AGE=created_at:age"

    def get_queryset(self) -> QuerySet[ApplicationKey]:
        return keys_described(clock.now())

    def get_serializer_class(self) -> type[KeySerializer]:
        return KeyDetailSerializer if self.detail else KeySerializer

    @extend_schema(request=CreateKeySerializer, responses={200: NewKeySerializer})
    def create(self, request: Request) -> Response:
        """Create a key. Only this response shows its text."""
        fields = body_of(request, CreateKeySerializer)
        return _shown_once(key_create(actor=actor_of(request), now=clock.now(), **fields))

    @extend_schema(request=ChangeKeySerializer, responses={200: KeyDetailSerializer})
    def partial_update(self, request: Request, id: str) -> Response:
        """Change the given fields. Returns 409 if the key is revoked."""
        fields = body_of(request, ChangeKeySerializer)
        key_change(prefix=self.get_object().prefix, actor=actor_of(request), now=clock.now(), **fields)
        return Response(KeyDetailSerializer(self.get_object()).data)

    @extend_schema(request=WhySerializer, responses={200: KeyDetailSerializer})
    @action(detail=True, methods=["post"])
    def revoke(self, request: Request, id: str) -> Response:
        """Revoke a key. Returns 409 if it is revoked already."""
        fields = body_of(request, WhySerializer)
        key_revoke(prefix=self.get_object().prefix, actor=actor_of(request), now=clock.now(), why=fields["why"])
        return Response(KeyDetailSerializer(self.get_object()).data)

    @extend_schema(request=RotateKeySerializer, responses={200: NewKeySerializer})
    @action(detail=True, methods=["post"])
    def rotate(self, request: Request, id: str) -> Response:
        """Create a key with the same settings; this one expires after `grace_s`. Returns 409 if it is revoked or has
        expired."""
        grace = timedelta(seconds=body_of(request, RotateKeySerializer)["grace_s"])
        key = self.get_object()
        return _shown_once(key_rotate(prefix=key.prefix, actor=actor_of(request), now=clock.now(), grace=grace))

    @extend_schema(responses={200: KeyPolicySerializer}, filters=False)
    @action(detail=False, methods=["get"], pagination_class=None)
    def policy(self, request: Request) -> Response:
        """Whether a key is required, and since when. Takes no parameter."""
        validated(StrictSerializer, request.query_params.dict())
        return Response(KeyPolicySerializer(key_policy()).data)

    @extend_schema(request=RequireKeysSerializer, responses={200: KeyPolicySerializer})
    @action(detail=False, methods=["post"])
    def require(self, request: Request) -> Response:
        """Require a key for every request in the whole fleet, or no longer."""
        fields = body_of(request, RequireKeysSerializer)
        return Response(KeyPolicySerializer(keys_require(actor=actor_of(request), now=clock.now(), **fields)).data)


def _shown_once(new: NewKey) -> Response:
    return Response({**KeySerializer(new.key).data, "key": new.text})


class KeyRingSerializer(serializers.ModelSerializer[Ingress]):
    ingress = serializers.CharField(source="id")
    region = serializers.CharField(source="region_id")
    connected = serializers.BooleanField()
    version = serializers.IntegerField(help_text="Version of keys that it enforces; 0 before the first key.")
    wanted_version = serializers.IntegerField(help_text="Version of keys in its region's newest table.")

    class Meta:
        model = Ingress
        fields = ["ingress", "region", "connected", "version", "wanted_version"]


class KeyRingFilter(filters.FilterSet):
    region = filters.CharFilter(field_name="region_id")


class KeyRingViewSet(ReadOnlyModelViewSet[Ingress]):
    """Versions of the keys at each ingress. An ingress enforces the version that it acknowledged, connected or not."""

    serializer_class = KeyRingSerializer
    filterset_class = KeyRingFilter
    lookup_value_regex = r"[-\w.:@+]+"
    ordering_fields = ("id", "region")
    watch_kind = "key-ring"
    row_key = "ingress"
    measured = frozenset({"connected", "version", "wanted_version"})

    def get_queryset(self) -> QuerySet[Ingress]:
        return ingresses_with_keys()


ROUTES = (
    ("keys", KeyViewSet, "key"),
    ("key-rings", KeyRingViewSet, "key-ring"),
)
