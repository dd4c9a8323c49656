"""Users and service accounts over HTTP. Decides nothing; services do."""

from typing import Any

from django.contrib.auth.models import User
from django.db.models import Count, QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.api.approvals import ApprovalSerializer, waiting
from accounts.models import (
    NAME_LONGEST,
    NAME_RULE,
    ROLES,
    Approval,
    Grant,
    GroupRole,
    ServiceAccount,
    name_refusal,
)
from accounts.permissions import require_fresh_factor
from accounts.selectors import role_by_groups, service_accounts_described, users_described
from accounts.services.account_change import account_change
from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import StrictSerializer, actor_of
from kernel.rest.view_sets import ReadOnlyModelViewSet

ADMIN_WRITES = {"create": Role.ADMIN, "partial_update": Role.ADMIN, "destroy": Role.ADMIN}
Groups = serializers.ListField(
    child=serializers.CharField(max_length=150), max_length=100, required=False, help_text="All of them, by name."
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
    superuser = serializers.BooleanField(source="is_superuser", help_text="Admin whatever the groups say.")
    has_password = serializers.SerializerMethodField()
    providers = serializers.SerializerMethodField(help_text="Identity providers that this user came by.")
    second_factor = serializers.BooleanField(source="has_factor", help_text="Whether each login takes one.")
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
        required=False, max_length=128, trim_whitespace=False, help_text="Without it: by the identity provider only."
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
    active = serializers.BooleanField(required=False, help_text="False: its tokens open nothing.")
    groups = Groups


class CreateServiceAccountSerializer(StrictSerializer):
    name = serializers.CharField(max_length=NAME_LONGEST, help_text=NAME_RULE, validators=[valid_name])
    description = serializers.CharField(required=False, allow_blank=True, max_length=200)
    groups = Groups


class UserFilter(filters.FilterSet):
    active = filters.BooleanFilter(field_name="is_active")
    group = filters.CharFilter(field_name="groups__name")

    class Meta:
        model = User
        fields: list[str] = []


class UserViewSet(ReadOnlyModelViewSet[User]):
    """People who may log in. They are deactivated, never deleted: what they did keeps its name."""

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

    @extend_schema(
        operation_id="users_create",
        request=CreateUserSerializer,
        responses={200: UserSerializer, 202: ApprovalSerializer},
    )
    def create(self, request: Request) -> Response:
        """Add a user. 409 if the name is taken. 202 with a request for an admin, or one with a password, while anything
        takes two people."""
        body = CreateUserSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        user = account_change("create user", actor=actor_of(request), now=clock.now(), **body.validated_data)
        if isinstance(user, Approval):
            return waiting(user)
        return Response(UserSerializer(self.get_queryset().get(pk=user.pk)).data)

    @extend_schema(
        operation_id="users_change",
        request=ChangeUserSerializer,
        responses={200: UserSerializer, 202: ApprovalSerializer},
    )
    def partial_update(self, request: Request, name: str) -> Response:
        """Change what is given. 409 if no admin would be left. 202 with a request for an admin more or less, or
        another's password, while anything takes two people. A password takes a fresh second factor of admins who have
        one."""
        return _change(self, request, ChangeUserSerializer, name)


class ServiceAccountViewSet(ReadOnlyModelViewSet[ServiceAccount]):
    """Programs that use the API: they have tokens and no password."""

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
        operation_id="service_accounts_create",
        request=CreateServiceAccountSerializer,
        responses={200: ServiceAccountSerializer, 202: ApprovalSerializer},
    )
    def create(self, request: Request) -> Response:
        """Add a program; make its token with `POST tokens`. 409 if the name is taken. 202 as for users."""
        body = CreateServiceAccountSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        account = account_change(
            "create service account", actor=actor_of(request), now=clock.now(), **body.validated_data
        )
        if isinstance(account, Approval):
            return waiting(account)
        return Response(ServiceAccountSerializer(self.get_queryset().get(pk=account.pk)).data)

    @extend_schema(
        operation_id="service_accounts_change",
        request=ChangeServiceAccountSerializer,
        responses={200: ServiceAccountSerializer, 202: ApprovalSerializer},
    )
    def partial_update(self, request: Request, name: str) -> Response:
        """Change what is given. 202 as for users."""
        return _change(self, request, ChangeServiceAccountSerializer, name)


def _change(view: Any, request: Request, serializer: type[StrictSerializer], name: str) -> Response:
    view.get_object()
    body = serializer(data=request.data)
    body.is_valid(raise_exception=True)
    if "password" in body.validated_data:
        require_fresh_factor(request, clock.now())
    user = account_change("change user", username=name, actor=actor_of(request), now=clock.now(), **body.validated_data)
    if isinstance(user, Approval):
        return waiting(user)
    return Response(view.get_serializer(view.get_object()).data)


NAME = r"^[A-Za-z0-9][-\w.]{0,99}\Z"


class GroupSerializer(serializers.Serializer[GroupRole]):
    name = serializers.CharField(source="group.name")
    role = serializers.ChoiceField(choices=ROLES)
    claim = serializers.CharField(help_text="The group at the identity provider whose members join this one; or empty.")
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
    """To a user or to a group, one of both."""

    deployment = serializers.SlugField(max_length=96)
    role = serializers.ChoiceField(choices=ROLES, default=Role.OPERATOR.value)
    user = serializers.CharField(max_length=150, required=False)
    group = serializers.CharField(max_length=150, required=False)

    def validate_role(self, value: str) -> Role:
        return Role(value)


class GroupFilter(filters.FilterSet):
    role = filters.ChoiceFilter(choices=ROLES)

    class Meta:
        model = GroupRole
        fields: list[str] = []


class GrantFilter(filters.FilterSet):
    deployment = filters.CharFilter()
    user = filters.CharFilter(field_name="user__username")
    group = filters.CharFilter(field_name="group__name")

    class Meta:
        model = Grant
        fields: list[str] = []


class GroupViewSet(ReadOnlyModelViewSet[GroupRole]):
    """Groups, each with the role of its members. Members are set with the users, or come from the identity provider."""

    serializer_class = GroupSerializer
    filterset_class = GroupFilter
    lookup_field = "group__name"
    lookup_url_kwarg = "name"
    lookup_value_regex = r"[-\w.]+"
    page_order = "group_id"
    needs = ADMIN_WRITES

    def get_queryset(self) -> QuerySet[GroupRole]:
        return GroupRole.objects.select_related("group").annotate(members=Count("group__user"))

    @extend_schema(
        operation_id="groups_create",
        request=CreateGroupSerializer,
        responses={200: GroupSerializer, 202: ApprovalSerializer},
    )
    def create(self, request: Request) -> Response:
        """Add a group. 409 if the name is taken. 202 with a request for new admins while anything takes two people."""
        body = CreateGroupSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        row = account_change("create group", actor=actor_of(request), now=clock.now(), **body.validated_data)
        if isinstance(row, Approval):
            return waiting(row)
        return Response(GroupSerializer(self.get_queryset().get(pk=row.pk)).data)

    @extend_schema(
        operation_id="groups_change",
        request=ChangeGroupSerializer,
        responses={200: GroupSerializer, 202: ApprovalSerializer},
    )
    def partial_update(self, request: Request, name: str) -> Response:
        """Change what is given. 409 if no admin would be left. 202 with a request where it makes or removes admins
        while anything takes two people."""
        self.get_object()
        body = ChangeGroupSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        row = account_change("change group", name=name, actor=actor_of(request), now=clock.now(), **body.validated_data)
        if isinstance(row, Approval):
            return waiting(row)
        return Response(GroupSerializer(self.get_object()).data)

    @extend_schema(operation_id="groups_delete", responses={200: GroupSerializer, 202: ApprovalSerializer})
    def destroy(self, request: Request, name: str) -> Response:
        """Remove a group with its grants. Answers what it was. 409 if no admin would be left. 202 with a request where
        another admin loses power while anything takes two people."""
        was = GroupSerializer(self.get_object()).data
        found = account_change("delete group", name=name, actor=actor_of(request), now=clock.now())
        return waiting(found) if isinstance(found, Approval) else Response(was)


class GrantViewSet(ReadOnlyModelViewSet[Grant]):
    """Roles for single deployments, beside what groups give everywhere. A grant only adds."""

    serializer_class = GrantSerializer
    filterset_class = GrantFilter
    lookup_field = "id"
    lookup_value_regex = r"[0-9]{1,18}"
    page_order = "-id"
    needs = ADMIN_WRITES

    def get_queryset(self) -> QuerySet[Grant]:
        return Grant.objects.select_related("user", "group")

    @extend_schema(
        operation_id="grants_give",
        request=GiveSerializer,
        responses={200: GrantSerializer, 202: ApprovalSerializer},
    )
    def create(self, request: Request) -> Response:
        """Give a role for a deployment; one that was given there before is replaced. 202 with a request where that
        lowers an admin's grant while anything takes two people."""
        body = GiveSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        found = account_change("give grant", actor=actor_of(request), now=clock.now(), **body.validated_data)
        return waiting(found) if isinstance(found, Approval) else Response(GrantSerializer(found).data)

    @extend_schema(operation_id="grants_take", responses={200: GrantSerializer, 202: ApprovalSerializer})
    def destroy(self, request: Request, id: str) -> Response:
        """End a grant. Answers what it was. 202 with a request where it is an admin's while anything takes two
        people."""
        grant = self.get_object()
        was = GrantSerializer(grant).data
        found = account_change("take grant", grant_id=grant.pk, actor=actor_of(request), now=clock.now())
        return waiting(found) if isinstance(found, Approval) else Response(was)
