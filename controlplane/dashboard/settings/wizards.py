"""The wizards of access and notifications: webhooks, users, groups and the identity provider. They decide nothing:
services check and apply their documents."""

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404
from django.urls import reverse

from accounts.models import GroupRole
from accounts.services.identity_provider import COLUMNS, provider_row
from controlplane.api.apply.access_kinds import PROVIDER
from controlplane.api.apply.planning import Kind
from controlplane.dashboard.actions import secret_shown
from controlplane.dashboard.fragments import PageRequest
from controlplane.dashboard.settings.single_sign_on import sign_on_view
from controlplane.dashboard.wizards import (
    Documents,
    Facts,
    Input,
    InputKind,
    Option,
    Step,
    Typed,
    Values,
    Wizard,
    document,
    nested,
)
from fleet.webhooks.models import Webhook
from fleet.webhooks.planner import WebhookEvent, WebhookFormat
from kernel.access import Role

HOW_TO_VERIFY = (
    "X-Switchyard-Signature is sha256= and the HMAC-SHA256 of X-Switchyard-Timestamp, a dot and the body. "
    "The page of webhooks has a Test button."
)
FORMAT_NOTES = {WebhookFormat.JSON: "signed JSON", WebhookFormat.SLACK: "for chats that support Slack's webhooks"}


def _formats(typed: Typed) -> list[Option]:
    return [Option(each.value, each.value, FORMAT_NOTES[each]) for each in WebhookFormat]


def _events(typed: Typed) -> list[Option]:
    return [Option(each.value) for each in WebhookEvent if each is not WebhookEvent.TEST]


def _groups(typed: Typed) -> list[Option]:
    rows = GroupRole.objects.select_related("group").order_by("group__name")[:200]
    return [Option(row.group.name, note=row.role) for row in rows]


def _name_in_url(typed: Typed) -> list[Option]:
    return [Option(typed.text("name"))]


_URL = Input(
    name="url",
    at="Webhook.url",
    label="URL",
    required=True,
    placeholder="https://hooks.example.com/…",
    help="https, unless its network is allowed. Only its host is shown afterwards, because the path may be secret.",
)
_MESSAGES = Step(
    "Messages",
    (
        Input(name="format", at="Webhook.format", required=True, value=WebhookFormat.JSON, options=_formats),
        Input(
            name="events",
            at="Webhook.events",
            kind=InputKind.MANY,
            options=_events,
            help="None selected: all. decision.needed: a rollout or an approval waits for a person.",
        ),
    ),
)


def _webhook_documents(values: Values) -> Documents:
    spec = {"events": values.get("events", []), **nested(values, ("url", "format"))}
    return [document(Kind.WEBHOOK, values["name"], spec)]


def _webhooks_url(documents: Documents) -> str:
    return f"{reverse('settings-webhooks')}#webhook-{documents[0]['metadata']['name']}"


def _webhook_secret(request: HttpRequest, documents: Documents) -> HttpResponse | None:
    """Shows the signing secret of a new webhook, once."""
    hook = Webhook.objects.filter(name=documents[0]["metadata"]["name"]).first()
    return webhook_secret_shown(request, hook) if hook is not None else None


def webhook_secret_shown(request: HttpRequest, hook: Webhook) -> HttpResponse:
    url = f"{reverse('settings-webhooks')}#webhook-{hook.name}"
    return secret_shown(request, what="Secret", name=hook.name, text=hook.secret, use=HOW_TO_VERIFY, url=url)


def _webhook_start(request: PageRequest) -> dict[str, str | list[str]]:
    hook = get_object_or_404(Webhook, name=request.key)
    return {"name": hook.name, "format": hook.format, "events": list(hook.events)}


WEBHOOK_WIZARD = Wizard(
    title="New webhook",
    section="settings",
    about="A webhook receives messages about incidents, rollouts, batches and decisions that wait for a person.",
    steps=(
        Step(
            "Receiver",
            (
                Input(
                    name="name",
                    at="Webhook.metadata.name",
                    required=True,
                    placeholder="pager",
                    help="1 to 64 letters, digits, - and _. It never changes.",
                ),
                _URL,
            ),
        ),
        _MESSAGES,
    ),
    documents=_webhook_documents,
    kinds=frozenset({Kind.WEBHOOK}),
    creates=frozenset({Kind.WEBHOOK}),
    url=_webhooks_url,
    finish=_webhook_secret,
    role=Role.ADMIN,
    test="webhook-try",
)
WEBHOOK_CHANGE_WIZARD = Wizard(
    title="Change a webhook",
    section="settings",
    about="Without a new URL it keeps its receiver. Its signing secret stays.",
    steps=(
        Step(
            "Receiver",
            (
                Input(
                    name="name",
                    at="Webhook.metadata.name",
                    kind=InputKind.CHOICE,
                    required=True,
                    options=_name_in_url,
                ),
                Input(name="url", at="Webhook.url", label="New URL", placeholder="unchanged", help=_URL.help),
            ),
        ),
        _MESSAGES,
    ),
    documents=_webhook_documents,
    kinds=frozenset({Kind.WEBHOOK}),
    url=_webhooks_url,
    start=_webhook_start,
    role=Role.ADMIN,
    test="webhook-try",
)
USER_WIZARD = Wizard(
    title="New user",
    section="settings",
    about="A person who logs in here. Everybody who can log in is a viewer; groups give more.",
    steps=(
        Step(
            "Person",
            (
                Input(
                    name="name",
                    at="User.metadata.name",
                    required=True,
                    placeholder="ada",
                    help="1 to 64 letters, digits and -_.@+. It never changes.",
                ),
                Input(name="email", at="User.email", placeholder="ada@example.com"),
                Input(
                    name="password",
                    at="User.password",
                    kind=InputKind.SECRET,
                    placeholder="none",
                    help="At least 12 characters. Without one, the user logs in by the identity provider only. "
                    "It is in no document.",
                ),
            ),
        ),
        Step(
            "Rights",
            (
                Input(
                    name="groups",
                    at="User.groups",
                    kind=InputKind.MANY,
                    options=_groups,
                    placeholder="There are no groups yet.",
                    help="None selected: a viewer. Groups with a claim follow the identity provider at each login.",
                ),
            ),
        ),
    ),
    documents=lambda values: [document(Kind.USER, values["name"], nested(values, ("email", "groups")))],
    kinds=frozenset({Kind.USER}),
    creates=frozenset({Kind.USER}),
    url=lambda documents: reverse("settings-users"),
    role=Role.ADMIN,
)
GROUP_WIZARD = Wizard(
    title="New group",
    section="settings",
    about="The members of a group have its role everywhere. Grants on this page's list add roles for one deployment.",
    steps=(
        Step(
            "Group",
            (
                Input(
                    name="name",
                    at="Group.metadata.name",
                    required=True,
                    placeholder="on-call",
                    help="1 to 100 letters, digits, ., - and _. It never changes.",
                ),
                Input(
                    name="role",
                    at="Group.role",
                    required=True,
                    value=Role.OPERATOR.value,
                    help="viewer reads, operator runs the fleet, admin also manages users and rules.",
                ),
                Input(
                    name="claim",
                    at="Group.claim",
                    label="Group at the identity provider",
                    placeholder="none",
                    help="Its members join this group at each login. Empty: set members by hand.",
                ),
            ),
        ),
    ),
    documents=lambda values: [document(Kind.GROUP, values["name"], nested(values, ("role", "claim")))],
    kinds=frozenset({Kind.GROUP}),
    creates=frozenset({Kind.GROUP}),
    url=lambda documents: reverse("settings-groups"),
    role=Role.ADMIN,
)


def _provider_documents(values: Values) -> Documents:
    """All fields, because the form has begun with all of them."""
    spec: dict[str, Any] = {"issuer": "", **nested(values, ("issuer", "client_id", "title", "scopes", "groups_claim"))}
    spec["admit_all"] = values.get("admit_all", False)
    spec["tenants"] = {row["group"]: row["tenant"] for row in values.get("tenants", [])}
    return [document(Kind.IDENTITY_PROVIDER, PROVIDER, spec)]


def _provider_start(request: PageRequest) -> dict[str, str | list[str]]:
    row = provider_row()
    texts = {name: getattr(row, name) for name in COLUMNS if name not in {"admit_all", "tenants"}}
    if row.admit_all:
        texts["admit_all"] = "on"
    for index, (group, tenant) in enumerate(sorted(row.tenants.items())):
        texts[f"tenants-{index}-group"], texts[f"tenants-{index}-tenant"] = group, tenant
    return texts


PROVIDER_WIZARD = Wizard(
    title="Single sign-on",
    section="settings",
    about="Logins by an OpenID provider. Passwords continue to work, whatever is set here.",
    steps=(
        Step(
            "Provider",
            (
                Input(
                    name="issuer",
                    at="IdentityProvider.issuer",
                    placeholder="https://login.example.com/realms/ops",
                ),
                Input(name="client_id", at="IdentityProvider.client_id", label="Client ID"),
                Input(
                    name="client_secret",
                    at="IdentityProvider.client_secret",
                    kind=InputKind.SECRET,
                    placeholder="unchanged",
                    help="Stored encrypted and never shown. Another issuer or client needs another one.",
                ),
                Input(name="title", at="IdentityProvider.title"),
            ),
            facts=Facts("dashboard/settings/sign_on_facts.html", lambda typed: sign_on_view()),
        ),
        Step(
            "Claims",
            (
                Input(name="scopes", at="IdentityProvider.scopes"),
                Input(name="groups_claim", at="IdentityProvider.groups_claim"),
                Input(name="admit_all", at="IdentityProvider.admit_all", label="Admit everybody as a viewer"),
            ),
            about="Each group of Switchyard names its group at the provider (Settings, Groups).",
        ),
        Step(
            "Tenants",
            (
                Input(
                    name="tenants",
                    at="IdentityProvider.tenants",
                    label="Groups of tenants",
                    help="Members of no group of Switchyard see the page of this tenant, read-only, and nothing else.",
                    columns=(
                        Input(name="group", label="Group at the provider", required=True),
                        Input(name="tenant", label="Tenant", required=True),
                    ),
                ),
            ),
        ),
    ),
    documents=_provider_documents,
    kinds=frozenset({Kind.IDENTITY_PROVIDER}),
    url=lambda documents: reverse("settings-single-sign-on"),
    start=_provider_start,
    role=Role.ADMIN,
    test="identity-provider-try",
)
