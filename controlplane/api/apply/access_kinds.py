"""Documents about access: groups, users, the identity provider, webhooks and sinks of batches. Only admins preview and
apply them, and plan drafts do not hold them, because everybody with a draft's link sees it. Secrets leave a document
when it is read, and plans never show them."""

from collections.abc import Mapping
from typing import Any

from django.contrib.auth.models import User
from rest_framework import serializers

from accounts.api.users import NAME as GROUP_NAME
from accounts.api.users import ChangeGroupSerializer, ChangeUserSerializer
from accounts.models import GroupRole, IdentityProvider, name_refusal
from accounts.services.identity_provider import COLUMNS, provider_row
from controlplane.api.apply.planning import Kind
from fleet.webhooks.api import ChangeWebhookSerializer
from fleet.webhooks.models import Webhook
from kernel.rest.serializers import ColumnsSerializer, StrictSerializer
from traffic.batch_sinks.api import ChangeBatchSinkSerializer

Stated = dict[str, Any]
PRIVATE = frozenset({Kind.GROUP, Kind.USER, Kind.IDENTITY_PROVIDER, Kind.WEBHOOK, Kind.BATCH_SINK})
PROVIDER = "oidc"
"""Name of the only document of its kind."""
ACCESS_NAMES: Mapping[Kind, str] = {
    Kind.GROUP: GROUP_NAME,
    Kind.USER: r"^[-A-Za-z0-9_.@+]+\Z",
    Kind.IDENTITY_PROVIDER: rf"^{PROVIDER}\Z",
}
ACCESS_NAME_MAX: Mapping[Kind, int] = {Kind.GROUP: 100, Kind.USER: 64, Kind.WEBHOOK: 64, Kind.BATCH_SINK: 64}
ACCESS_NAME_RULES: Mapping[Kind, str] = {
    Kind.GROUP: "may have only letters, digits, ., - and _, and begins with a letter or digit",
    Kind.USER: "may have only letters, digits and -_.@+",
    Kind.IDENTITY_PROVIDER: f"is {PROVIDER}",
}
SECRET_FIELDS: Mapping[Kind, str] = {
    Kind.IDENTITY_PROVIDER: "client_secret",
    Kind.WEBHOOK: "secret",
    Kind.BATCH_SINK: "password",
}


class GroupSpec(ChangeGroupSerializer):
    """Role and claim of a group. `account_change` checks that an admin remains."""


class UserSpec(ChangeUserSerializer):
    """A person. Passwords are not in documents: set them on the page, or log in by the identity provider."""

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        return {name: field for name, field in super().get_fields().items() if name != "password"}

    def validate_groups(self, groups: list[str]) -> list[str]:
        return sorted(set(groups))


class IdentityProviderSpec(ColumnsSerializer):
    """The provider of logins, and the tenants of its groups."""

    tenants = serializers.DictField(
        child=serializers.CharField(max_length=64),
        required=False,
        help_text=str(IdentityProvider._meta.get_field("tenants").help_text),
    )
    client_secret = serializers.CharField(
        max_length=500,
        required=False,
        allow_blank=True,
        trim_whitespace=False,
        help_text="Stored encrypted and never shown. Empty removes it. Another issuer or client needs another one.",
    )

    class Meta:
        model = IdentityProvider
        columns = tuple(name for name in COLUMNS if name != "tenants")

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        fields = super().get_fields()
        for field in fields.values():
            field.required = False
        return fields


class WebhookSpec(ChangeWebhookSerializer):
    """A receiver of messages. Its signing secret is random unless stated."""

    def validate_events(self, events: list[str]) -> list[str]:
        return sorted(set(events))


class BatchSinkSpec(ChangeBatchSinkSerializer):
    """A destination of results. Its tenant never changes."""


ACCESS_SPECS: Mapping[Kind, type[StrictSerializer]] = {
    Kind.GROUP: GroupSpec,
    Kind.USER: UserSpec,
    Kind.IDENTITY_PROVIDER: IdentityProviderSpec,
    Kind.WEBHOOK: WebhookSpec,
    Kind.BATCH_SINK: BatchSinkSpec,
}


def check_access_name(kind: Kind, name: str) -> str:
    """Returns why a user cannot have this name, or ""."""
    return name_refusal(name) if kind is Kind.USER else ""


def groups_present(names: set[str]) -> dict[str, Stated]:
    rows = GroupRole.objects.select_related("group").filter(group__name__in=names)
    return {row.group.name: {"role": row.role, "claim": row.claim} for row in rows}


def users_present(names: set[str]) -> dict[str, Stated]:
    """People. The name of a program or of an unrelated spelling is refused by the service."""
    rows = User.objects.filter(username__in=names, service_account__isnull=True).prefetch_related("groups")
    return {
        row.username: {
            "email": row.email,
            "active": row.is_active,
            "groups": sorted(group.name for group in row.groups.all()),
        }
        for row in rows
    }


def identity_provider_present(names: set[str]) -> dict[str, Stated]:
    """There is always one; before the first change it has the defaults and no issuer."""
    row = provider_row()
    return {name: {column: getattr(row, column) for column in COLUMNS} for name in names}


def webhooks_present(names: set[str]) -> dict[str, Stated]:
    rows = Webhook.objects.filter(name__in=names)
    return {
        row.name: {"url": row.url, "events": sorted(row.events), "format": row.format, "enabled": row.enabled}
        for row in rows
    }
