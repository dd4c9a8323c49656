"""Groups and grants over HTTP: who has which role, everywhere or for one deployment. Decides nothing; services do."""

from django.db.models import Count, QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.api.approvals import ApprovalSerializer, waiting
from accounts.api.users import ADMIN_WRITES
from accounts.models import ROLES, Approval, Grant, GroupRole
from accounts.services.account_change import account_change
from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import StrictSerializer, actor_of
from kernel.rest.view_sets import ReadOnlyModelViewSet

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
