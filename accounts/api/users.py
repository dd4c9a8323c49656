"""Users, service accounts, groups and grants over HTTP."""

from typing import Any

from django.contrib.auth.models import User
from django.db.models import Count, QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.api.approvals import ApprovalSerializer, waiting
from accounts.models import NAME_LONGEST, NAME_RULE, ROLES, Approval, Grant, GroupRole, ServiceAccount, name_refusal
from accounts.permissions import require_fresh_factor
from accounts.selectors import role_by_groups, service_accounts_described, users_described
from accounts.services.account_change import account_change
from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import StrictSerializer, actor_of, body_of
from kernel.rest.view_sets import ReadOnlyModelViewSet

ADMIN_WRITES = {"create": Role.ADMIN, "partial_update": Role.ADMIN, "destroy": Role.ADMIN}
Groups = serializers.ListField(
    child=serializers.CharField(max_length=150), max_length=100, required=False, help_text="All groups, by name."
)


def valid_name(name: str) -> None:
    """A field's validator."""
    if refusal := name_refusal(name):
        raise serializers.ValidationError(refusal, "name")


class UserSerializer(serializers.Serializer[User]):
    username = serializers.CharField()
    email = serializers.CharField()
    active = serializers.BooleanField(source="is_active")
    role = serializers.SerializerMethodField(help_text="The highest of all groups; `viewer` without any.")
    groups = serializers.SerializerMethodField()
    superuser = serializers.BooleanField(source="is_superuser", help_text="Admin regardless of groups.")
    has_password = serializers.SerializerMethodField()
    providers = serializers.SerializerMethodField(help_text="Identity providers of this user's logins.")
    second_factor = serializers.BooleanField(source="has_factor", help_text="Whether each login requires one.")
    last_login = serializers.DateTimeField(allow_null=True)
    created_at = serializers.DateTimeField(source="date_joined")

    class Meta:
        examples = {"role": "operator", "providers": ["https://login.example.com"]}

    @extend_schema_field(serializers.ChoiceField(choices=ROLES))
    def get_role(self, user: User) -> str:
        return role_by_groups(user).value

    @extend_schema_field(serializers.ListField(child=serializers.CharField()))
    def get_groups(self, user: User) -> list[str]:
        return sorted(group.name for group in user.groups.all())

    def get_has_password(self, user: User) -> bool:
        return user.has_usable_password()

    @extend_schema_field(serializers.ListField(child=serializers.CharField()))
    def get_providers(self, user: User) -> list[str]:
        return sorted({identity.issuer for identity in user.identities.all()})


class ChangeUserSerializer(StrictSerializer):
    email = serializers.EmailField(required=False, allow_blank=True)
    password = serializers.CharField(
        required=False, max_length=128, trim_whitespace=False, help_text="Ends the user's sessions and tokens."
    )
    active = serializers.BooleanField(required=False, help_text="False ends the user's sessions and tokens.")
    groups = Groups


class CreateUserSerializer(StrictSerializer):
    username = serializers.CharField(max_length=NAME_LONGEST, help_text=NAME_RULE, validators=[valid_name])
    email = serializers.EmailField(required=False, allow_blank=True)
    password = serializers.CharField(
        required=False,
        max_length=128,
        trim_whitespace=False,
        help_text="Without it, the user logs in by the identity provider only.",
    )
    groups = Groups


class ServiceAccountSerializer(serializers.Serializer[ServiceAccount]):
    name = serializers.CharField(source="user.username")
    description = serializers.CharField()
    active = serializers.BooleanField(source="user.is_active")
    role = serializers.SerializerMethodField()
    groups = serializers.SerializerMethodField()
    created_by = serializers.CharField()
    created_at = serializers.DateTimeField()

    class Meta:
        examples = {"name": "deploy-bot", "role": "operator"}

    @extend_schema_field(serializers.ChoiceField(choices=ROLES))
    def get_role(self, account: ServiceAccount) -> str:
        return role_by_groups(account.user).value

    @extend_schema_field(serializers.ListField(child=serializers.CharField()))
    def get_groups(self, account: ServiceAccount) -> list[str]:
        return sorted(group.name for group in account.user.groups.all())


class ChangeServiceAccountSerializer(StrictSerializer):
    description = serializers.CharField(required=False, allow_blank=True, max_length=200)
    active = serializers.BooleanField(required=False, help_text="Whether its tokens are accepted.")
    groups = Groups


class CreateServiceAccountSerializer(StrictSerializer):
    name = serializers.CharField(max_length=NAME_LONGEST, help_text=NAME_RULE, validators=[valid_name])
    description = serializers.CharField(required=False, allow_blank=True, max_length=200)
    groups = Groups


class UserFilter(filters.FilterSet):
    active = filters.BooleanFilter(field_name="is_active")
    group = filters.CharFilter(field_name="groups__name")


class UserViewSet(ReadOnlyModelViewSet[User]):
    """People who may log in. They are deactivated, never deleted, so records keep their names."""

    serializer_class = UserSerializer
    filterset_class = UserFilter
    lookup_field = "username"
    lookup_url_kwarg = "name"
    lookup_value_regex = r"[-\w.@+]+"
    page_order = "username"
    ordering_fields = ("username", "is_active")
    needs = {**ADMIN_WRITES, "list": Role.ADMIN, "retrieve": Role.ADMIN}
    columns = "NAME=username, ROLE, ACTIVE, GROUPS, LOGIN=last_login:age"

    def get_queryset(self) -> QuerySet[User]:
        return users_described()

    @extend_schema(request=CreateUserSerializer, responses={200: UserSerializer, 202: ApprovalSerializer})
    def create(self, request: Request) -> Response:
        """Add a user. 409 if the name is taken. While any action requires two-person approval: 202 with a request if it
        is an admin or has a password."""
        return _create(self, request, "create user", CreateUserSerializer)

    @extend_schema(request=ChangeUserSerializer, responses={200: UserSerializer, 202: ApprovalSerializer})
    def partial_update(self, request: Request, name: str) -> Response:
        """Change the given fields. 409 if no admin would be left. While any action requires two-person approval: 202
        with a request to add or remove an admin, or to set another user's password. Admins with a second factor need a
        fresh one to set a password."""
        return _change(self, request, ChangeUserSerializer, name)


class ServiceAccountViewSet(ReadOnlyModelViewSet[ServiceAccount]):
    """Service accounts: programs that use the API with tokens and have no password."""

    serializer_class = ServiceAccountSerializer
    lookup_field = "user__username"
    lookup_url_kwarg = "name"
    lookup_value_regex = r"[-\w.@+]+"
    page_order = "user_id"
    needs = {**ADMIN_WRITES, "list": Role.ADMIN, "retrieve": Role.ADMIN}
    aliases = ("sa",)
    columns = "NAME, ROLE, ACTIVE, DESCRIPTION, AGE=created_at:age"

    def get_queryset(self) -> QuerySet[ServiceAccount]:
        return service_accounts_described()

    @extend_schema(
        request=CreateServiceAccountSerializer, responses={200: ServiceAccountSerializer, 202: ApprovalSerializer}
    )
    def create(self, request: Request) -> Response:
        """Add a service account; create its token with `POST tokens`. 409 if the name is taken. 202 as for users."""
        return _create(self, request, "create service account", CreateServiceAccountSerializer)

    @extend_schema(
        request=ChangeServiceAccountSerializer, responses={200: ServiceAccountSerializer, 202: ApprovalSerializer}
    )
    def partial_update(self, request: Request, name: str) -> Response:
        """Change the given fields. 202 as for users."""
        return _change(self, request, ChangeServiceAccountSerializer, name)


def _create(view: Any, request: Request, change: str, accepted: type[StrictSerializer]) -> Response:
    row = account_change(change, actor=actor_of(request), now=clock.now(), **body_of(request, accepted))
    if isinstance(row, Approval):
        return waiting(row)
    return Response(view.get_serializer(view.get_queryset().get(pk=row.pk)).data)


def _change(view: Any, request: Request, serializer: type[StrictSerializer], name: str) -> Response:
    view.get_object()
    body = body_of(request, serializer)
    if "password" in body:
        require_fresh_factor(request, clock.now())
    user = account_change("change user", username=name, actor=actor_of(request), now=clock.now(), **body)
    if isinstance(user, Approval):
        return waiting(user)
    return Response(view.get_serializer(view.get_object()).data)


NAME = r"^[A-Za-z0-9][-\w.]{0,99}\Z"


class GroupSerializer(serializers.Serializer[GroupRole]):
    name = serializers.CharField(source="group.name")
    role = serializers.ChoiceField(choices=ROLES)
    claim = serializers.CharField(
        help_text="The group at the identity provider whose members join this group, or empty."
    )
    members = serializers.IntegerField(default=0)

    class Meta:
        examples = {"name": "on-call", "role": "operator", "claim": "sre-oncall"}


class ChangeGroupSerializer(StrictSerializer):
    role = serializers.ChoiceField(choices=ROLES, required=False)
    claim = serializers.CharField(max_length=256, required=False, allow_blank=True)

    def validate_role(self, value: str) -> Role:
        return Role(value)


class CreateGroupSerializer(ChangeGroupSerializer):
    name = serializers.RegexField(NAME)
    role = serializers.ChoiceField(choices=ROLES)


class GrantSerializer(serializers.Serializer[Grant]):
    id = serializers.IntegerField()
    deployment = serializers.CharField()
    role = serializers.ChoiceField(choices=ROLES)
    user = serializers.CharField(source="user.username", allow_null=True, default=None)
    group = serializers.CharField(source="group.name", allow_null=True, default=None)
    created_by = serializers.CharField()
    created_at = serializers.DateTimeField()

    class Meta:
        examples = {"role": "operator"}


class GiveSerializer(StrictSerializer):
    """A grant to either a user or a group."""

    deployment = serializers.SlugField(max_length=96)
    role = serializers.ChoiceField(choices=ROLES, default=Role.OPERATOR.value)
    user = serializers.CharField(max_length=150, required=False)
    group = serializers.CharField(max_length=150, required=False)

    def validate_role(self, value: str) -> Role:
        return Role(value)


class GroupFilter(filters.FilterSet):
    role = filters.ChoiceFilter(choices=ROLES)


class GrantFilter(filters.FilterSet):
    deployment = filters.CharFilter()
    user = filters.CharFilter(field_name="user__username")
    group = filters.CharFilter(field_name="group__name")


class GroupViewSet(ReadOnlyModelViewSet[GroupRole]):
    """Groups, each with the role of its members. Set members on the users, or take them from the identity provider."""

    queryset = GroupRole.objects.select_related("group").annotate(members=Count("group__user"))
    serializer_class = GroupSerializer
    filterset_class = GroupFilter
    lookup_field = "group__name"
    lookup_url_kwarg = "name"
    lookup_value_regex = r"[-\w.]+"
    page_order = "group_id"
    needs = ADMIN_WRITES

    @extend_schema(request=CreateGroupSerializer, responses={200: GroupSerializer, 202: ApprovalSerializer})
    def create(self, request: Request) -> Response:
        """Add a group. 409 if the name is taken. 202 with a request if it makes admins while any action requires
        two-person approval."""
        return _create(self, request, "create group", CreateGroupSerializer)

    @extend_schema(request=ChangeGroupSerializer, responses={200: GroupSerializer, 202: ApprovalSerializer})
    def partial_update(self, request: Request, name: str) -> Response:
        """Change the given fields. 409 if no admin would be left. 202 with a request if it makes or removes admins
        while any action requires two-person approval."""
        self.get_object()
        body = body_of(request, ChangeGroupSerializer)
        row = account_change("change group", name=name, actor=actor_of(request), now=clock.now(), **body)
        if isinstance(row, Approval):
            return waiting(row)
        return Response(GroupSerializer(self.get_object()).data)

    @extend_schema(responses={200: GroupSerializer, 202: ApprovalSerializer})
    def destroy(self, request: Request, name: str) -> Response:
        """Remove a group with its grants. Responds with the removed group. 409 if no admin would be left. 202 with a
        request if another admin loses the role while any action requires two-person approval."""
        was = GroupSerializer(self.get_object()).data
        found = account_change("delete group", name=name, actor=actor_of(request), now=clock.now())
        return waiting(found) if isinstance(found, Approval) else Response(was)


class GrantViewSet(ReadOnlyModelViewSet[Grant]):
    """Roles for single deployments, in addition to the roles of groups."""

    queryset = Grant.objects.select_related("user", "group")
    serializer_class = GrantSerializer
    filterset_class = GrantFilter
    page_order = "-id"
    needs = ADMIN_WRITES

    @extend_schema(
        operation_id="grants_give", request=GiveSerializer, responses={200: GrantSerializer, 202: ApprovalSerializer}
    )
    def create(self, request: Request) -> Response:
        """Grant a role for a deployment; replaces an earlier grant there. 202 with a request if it lowers an admin's
        grant while any action requires two-person approval."""
        return _create(self, request, "give grant", GiveSerializer)

    @extend_schema(operation_id="grants_take", responses={200: GrantSerializer, 202: ApprovalSerializer})
    def destroy(self, request: Request, id: str) -> Response:
        """End a grant. Responds with the ended grant. 202 with a request if it is an admin's while any action requires
        two-person approval."""
        grant = self.get_object()
        was = GrantSerializer(grant).data
        found = account_change("take grant", grant_id=grant.pk, actor=actor_of(request), now=clock.now())
        return waiting(found) if isinstance(found, Approval) else Response(was)


ROUTES = (
    ("users", UserViewSet, "user"),
    ("service-accounts", ServiceAccountViewSet, "service-account"),
    ("groups", GroupViewSet, "group"),
    ("grants", GrantViewSet, "grant"),
)
