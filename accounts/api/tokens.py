"""API tokens, sessions, and the caller. Users see and end their own; admins see and end all."""

from typing import Any

from django.contrib.auth.models import User
from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_field, extend_schema_serializer
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.models import ROLES, SCOPES, TOKEN_STATES, ApiToken, LoginSession
from accounts.permissions import require_fresh_factor, token_owner
from accounts.selectors import visible_sessions, visible_tokens
from accounts.services.session import session_end
from accounts.services.token import DAYS, LONGEST_DAYS, token_create_within, token_revoke
from kernel import clock
from kernel.access import Role, Scope, access_of
from kernel.refusals import Conflict
from kernel.rest.serializers import StrictSerializer, actor_of, body_of
from kernel.rest.view_sets import ReadOnlyModelViewSet, ViewSet
from kernel.tones import Tone

TONES = [(tone.value, tone.value.capitalize()) for tone in Tone]


class TokenSerializer(serializers.Serializer[ApiToken]):
    prefix = serializers.CharField()
    name = serializers.CharField()
    user = serializers.CharField(source="user.username")
    scope = serializers.ChoiceField(choices=SCOPES, help_text="The most that it allows, whatever the role of its user.")
    state = serializers.SerializerMethodField()
    tone = serializers.SerializerMethodField()
    created_by = serializers.CharField()
    created_at = serializers.DateTimeField()
    last_used_at = serializers.DateTimeField(allow_null=True, help_text="To the minute.")
    expires_at = serializers.DateTimeField(allow_null=True)
    revoked_at = serializers.DateTimeField(allow_null=True)

    class Meta:
        examples = {"name": "laptop"}

    @extend_schema_field(serializers.ChoiceField(choices=TOKEN_STATES))
    def get_state(self, token: ApiToken) -> str:
        return token.state_at(clock.now()).value

    @extend_schema_field(serializers.ChoiceField(choices=TONES))
    def get_tone(self, token: ApiToken) -> str:
        return token.state_at(clock.now()).tone.value


class NewTokenSerializer(TokenSerializer):
    token = serializers.CharField(help_text="The secret that callers send. It is shown only once.")


class CreateTokenSerializer(StrictSerializer):
    name = serializers.CharField(max_length=96)
    scope = serializers.ChoiceField(choices=SCOPES, default=Scope.READ.value)
    expires_in_days = serializers.IntegerField(min_value=1, max_value=LONGEST_DAYS, default=DAYS)
    service_account = serializers.CharField(
        max_length=150, required=False, help_text="For this service account instead of yourself; requires an admin."
    )

    def validate_scope(self, value: str) -> Scope:
        return Scope(value)


class SessionSerializer(serializers.Serializer[LoginSession]):
    id = serializers.IntegerField()
    user = serializers.CharField(source="user.username")
    method = serializers.CharField(help_text="`password` or `oidc`.")
    address = serializers.CharField()
    browser = serializers.CharField()
    current = serializers.SerializerMethodField(help_text="The one that asks.")
    created_at = serializers.DateTimeField()
    seen_at = serializers.DateTimeField(help_text="To the minute.")
    expires_at = serializers.DateTimeField()

    class Meta:
        examples = {"method": "password"}

    def get_current(self, session: LoginSession) -> bool:
        return bool(session.session_key == self.context["request"].session.session_key)


@extend_schema_serializer(many=False)
class MeSerializer(serializers.Serializer[Any]):
    username = serializers.CharField()
    email = serializers.CharField()
    role = serializers.ChoiceField(choices=ROLES, help_text="Your role, limited by the token's scope.")
    scope = serializers.ChoiceField(choices=SCOPES, help_text="`admin` with a session.")
    groups = serializers.ListField(child=serializers.CharField())
    grants = serializers.DictField(child=serializers.CharField(), help_text="Deployment -> role.")
    service_account = serializers.BooleanField()
    token = serializers.CharField(allow_null=True, help_text="Prefix of the request's token; null with a session.")

    class Meta:
        examples = {"role": "operator", "grants": {"sim-70b": "operator"}}


class TokenFilter(filters.FilterSet):
    user = filters.CharFilter(field_name="user__username")
    scope = filters.ChoiceFilter(choices=SCOPES)


class SessionFilter(filters.FilterSet):
    user = filters.CharFilter(field_name="user__username")


class TokenViewSet(ReadOnlyModelViewSet[ApiToken]):
    """API tokens: your own, and for admins all."""

    serializer_class = TokenSerializer
    filterset_class = TokenFilter
    lookup_field = "prefix"
    lookup_url_kwarg = "id"
    lookup_value_regex = r"[0-9a-f]{1,16}"
    page_order = "-id"
    ordering_fields = ("id", "name", "created_at", "expires_at", "revoked_at")
    shown_once = frozenset({"create"})
    needs = {"create": Role.VIEWER, "revoke": Role.VIEWER}
    columns = "PREFIX, NAME, USER, STATE, SCOPE, USED=last_used_at:age, EXPIRES=expires_at"

    def get_queryset(self) -> QuerySet[ApiToken]:
        return visible_tokens(self.request.user, access_of(self.request))

    @extend_schema(request=CreateTokenSerializer, responses={200: NewTokenSerializer})
    def create(self, request: Request) -> Response:
        """Create a token. Only this response shows it. A token that was requested with a token has at most its scope
        and lifetime. 403 for users with a second factor, except in a browser where they showed it within the last 10
        minutes."""
        fields = body_of(request, CreateTokenSerializer)
        require_fresh_factor(request, clock.now())
        token, text = token_create_within(
            user=token_owner(request, fields.get("service_account", "")),
            name=fields["name"],
            days=fields["expires_in_days"],
            scope=fields["scope"],
            shown=request.auth if isinstance(request.auth, ApiToken) else None,
            actor=actor_of(request),
            now=clock.now(),
        )
        return Response({**TokenSerializer(token).data, "token": text})

    @action(detail=True, methods=["post"])
    def revoke(self, request: Request, id: str) -> Response:
        """Revoke a token. 409 if it is revoked already."""
        token = self.get_object()
        if not token_revoke(token=token, actor=actor_of(request), now=clock.now()):
            raise Conflict(f"token {token.prefix} is revoked already")
        return Response(TokenSerializer(token).data)


class SessionViewSet(ReadOnlyModelViewSet[LoginSession]):
    """Active logins in browsers: your own, and for admins all."""

    serializer_class = SessionSerializer
    filterset_class = SessionFilter
    page_order = "-id"
    needs = {"revoke": Role.VIEWER}

    def get_queryset(self) -> QuerySet[LoginSession]:
        return visible_sessions(self.request.user, access_of(self.request), clock.now())

    @action(detail=True, methods=["post"])
    def revoke(self, request: Request, id: str) -> Response:
        """End a session immediately. Responds with the ended session."""
        session = self.get_object()
        was = self.get_serializer(session).data
        session_end(session=session, actor=actor_of(request), now=clock.now())
        return Response(was)


class MeViewSet(ViewSet):
    """Who asks."""

    @extend_schema(operation_id="me", responses={200: MeSerializer})
    def list(self, request: Request) -> Response:
        """Your user, role and grants."""
        access, user = access_of(request), request.user
        assert isinstance(user, User)  # noqa: S101 - the permission admits users only
        caller = {
            "username": user.username,
            "email": user.email,
            "role": (access.role_on() or Role.VIEWER).value,
            "scope": access.scope.value,
            "groups": sorted(user.groups.values_list("name", flat=True)),
            "grants": {name: role.value for name, role in access.grants.items()},
            "service_account": hasattr(user, "service_account"),
            "token": request.auth.prefix if isinstance(request.auth, ApiToken) else None,
        }
        return Response(MeSerializer(caller).data)


ROUTES = (
    ("me", MeViewSet, "me"),
    ("tokens", TokenViewSet, "token"),
    ("sessions", SessionViewSet, "session"),
)
