"""The URLs of the settings, below /settings/."""

from django.urls import URLPattern, path

from controlplane.dashboard.fragments import page_view
from controlplane.dashboard.pages import fleet_settings_actions as fleet
from controlplane.dashboard.pages import settings_actions as accounts
from controlplane.dashboard.pages.settings import APPROVALS, GROUPS, PEOPLE, RULES, SETTINGS, WEBHOOKS
from controlplane.dashboard.pages.shell import SHELL

ROOT = "settings/"

settings_urlpatterns: list[URLPattern] = [
    path(ROOT, page_view(SETTINGS, SHELL), name="settings"),
    path(f"{ROOT}users/", page_view(PEOPLE, SHELL), name="settings-users"),
    path(f"{ROOT}groups/", page_view(GROUPS, SHELL), name="settings-groups"),
    path(f"{ROOT}approvals/", page_view(APPROVALS, SHELL), name="approvals"),
    path(f"{ROOT}webhooks/", page_view(WEBHOOKS, SHELL), name="settings-webhooks"),
    path(f"{ROOT}rules/", page_view(RULES, SHELL), name="settings-rules"),
    path(f"{ROOT}password/", accounts.password_change_ask, name="password-change"),
    path(f"{ROOT}tokens/new/", accounts.token_new, name="token-new"),
    path(f"{ROOT}tokens/<str:prefix>/revoke/", accounts.token_end, name="token-revoke"),
    path(f"{ROOT}sessions/<int:session_id>/end/", accounts.session_end_now, name="session-end"),
    path(f"{ROOT}users/new/", accounts.user_new, name="user-new"),
    path(f"{ROOT}users/<str:username>/change/", accounts.user_change_ask, name="user-change"),
    path(f"{ROOT}service-accounts/new/", accounts.program_new, name="program-new"),
    path(f"{ROOT}groups/new/", accounts.group_new, name="group-new"),
    path(f"{ROOT}groups/<str:name>/change/", accounts.group_change_ask, name="group-change"),
    path(f"{ROOT}groups/<str:name>/delete/", accounts.group_delete_ask, name="group-delete"),
    path(f"{ROOT}grants/new/", accounts.grant_new, name="grant-new"),
    path(f"{ROOT}grants/<int:grant_id>/take/", accounts.grant_take_ask, name="grant-take"),
    path(f"{ROOT}approvals/<int:approval_id>/approve/", accounts.approval_approve_ask, name="approval-approve"),
    path(f"{ROOT}approvals/<int:approval_id>/reject/", accounts.approval_reject_ask, name="approval-reject"),
    path(f"{ROOT}approval-rules/<str:name>/", accounts.approval_rule_ask, name="approval-rule"),
    path(f"{ROOT}webhooks/new/", fleet.webhook_new, name="webhook-new"),
    path(f"{ROOT}webhooks/<slug:name>/test/", fleet.webhook_test_ask, name="webhook-test"),
    path(f"{ROOT}webhooks/<slug:name>/switch/", fleet.webhook_switch, name="webhook-switch"),
    path(f"{ROOT}webhooks/<slug:name>/delete/", fleet.webhook_delete_ask, name="webhook-delete"),
    path(f"{ROOT}rules/<slug:name>/", fleet.fault_rule_ask, name="fault-rule"),
]
