"""What people ask on the settings pages of the fleet: webhooks, and the modes of rules about faults."""

from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404

from controlplane.dashboard.pages.settings_actions import form
from controlplane.dashboard.pages.settings_asks import actor, ask, checked, shown, word, words
from fleet.api.fault_rule import SetModeSerializer
from fleet.api.webhook import CreateWebhookSerializer
from fleet.models import Webhook
from fleet.planning.fault_rules import SETTABLE_RULES, Rule, RuleMode
from fleet.planning.webhooks.messages import WebhookFormat
from fleet.services.fault_rule import fault_rule_set
from fleet.services.webhook import webhook_change, webhook_create, webhook_delete, webhook_test
from kernel import clock
from kernel.access import Role


@form(Role.ADMIN)
def webhook_new(request: HttpRequest) -> HttpResponse:
    """Add one; the secret that signs its messages is shown once."""

    def make() -> HttpResponse:
        given: dict[str, Any] = {name: word(request, name) for name in ("name", "url")}
        given["format"] = word(request, "format") or WebhookFormat.JSON.value
        given["events"] = words(request, "events")
        hook = webhook_create(actor=actor(request), now=clock.now(), **checked(CreateWebhookSerializer, given))
        use = "X-Switchyard-Signature is sha256= and the HMAC-SHA256 of X-Switchyard-Timestamp, a dot and the body."
        return shown(request, "settings-webhooks", what="Secret", name=hook.name, text=hook.secret, use=use)

    return ask(request, "settings-webhooks", make)


@form(Role.OPERATOR)
def webhook_test_ask(request: HttpRequest, name: str) -> HttpResponse:
    hook = get_object_or_404(Webhook, name=name)
    return ask(
        request, "settings-webhooks", lambda: webhook_test(name=hook.name, actor=actor(request), now=clock.now())
    )


@form(Role.ADMIN)
def webhook_switch(request: HttpRequest, name: str) -> HttpResponse:
    hook = get_object_or_404(Webhook, name=name)
    enabled = word(request, "enabled") == "yes"
    return ask(
        request,
        "settings-webhooks",
        lambda: webhook_change(name=hook.name, actor=actor(request), now=clock.now(), enabled=enabled),
    )


@form(Role.ADMIN)
def webhook_delete_ask(request: HttpRequest, name: str) -> HttpResponse:
    hook = get_object_or_404(Webhook, name=name)
    return ask(
        request, "settings-webhooks", lambda: webhook_delete(name=hook.name, actor=actor(request), now=clock.now())
    )


@form(Role.ADMIN)
def fault_rule_ask(request: HttpRequest, name: str) -> HttpResponse:
    if name not in SETTABLE_RULES:
        raise Http404(f"There is no rule {name!r}.")

    def change() -> None:
        mode = RuleMode(checked(SetModeSerializer, {"mode": word(request, "mode")})["mode"])
        fault_rule_set(rule=Rule(name), mode=mode, actor=actor(request), now=clock.now(), why="")

    return ask(request, "settings-rules", change)
