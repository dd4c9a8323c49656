"""The settings: each part readable with nothing and with something, and each form does what it says."""

import re
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth.models import Group, User
from django.test import Client

from accounts.models import ApiToken, Approval, ApprovalRule, Grant, GroupRole, LoginSession
from audit.models import AuditRecord
from fleet.faults.models import FaultRule
from fleet.webhooks.models import Webhook
from kernel.access import Role
from tests.controlplane.access.callers import make_user
from tests.controlplane.dashboard.page_urls import SETTINGS
from tests.controlplane.dashboard.reading import Reader

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


@pytest.fixture
def admin(client: Client) -> Client:
    client.force_login(make_user("ada", Role.ADMIN))
    return client


def post(client: Client, path: str, **form: Any) -> int:
    return client.post(f"/settings/{path}", form).status_code


def one_of_everything() -> None:
    client = Client()
    client.force_login(make_user("root", Role.ADMIN))
    for path, form in (
        ("tokens/new/", {"name": "laptop", "scope": "read", "expires_in_days": "30"}),
        ("users/new/", {"go": "apply", "name": "eve", "password": "correct horse battery", "groups": "admins"}),
        ("service-accounts/new/", {"name": "bot", "description": "rolls out"}),
        ("grants/new/", {"deployment": "chat", "user": "eve"}),
        ("approval-rules/evacuate-region/", {"required": "yes"}),
        ("approval-rules/evacuate-region/", {"required": "no"}),
        ("webhooks/new/", {"go": "apply", "name": "pager", "url": "https://pager.example.com/x", "format": "json"}),
        ("webhooks/pager/test/", {}),
    ):
        assert post(client, path, **form) in {200, 302}, path


@pytest.mark.parametrize("full", [False, True])
def test_every_page_is_whole_and_has_nothing_inline(admin: Client, full: bool) -> None:
    if full:
        one_of_everything()
    for url in SETTINGS.values():
        response = admin.get(url)
        assert response.status_code == 200, url
        assert "unsafe" not in response.headers["Content-Security-Policy"], url
        read = Reader(response.text)
        assert read.inline == [], url
        assert sorted(set(read.ids)) == sorted(read.ids), url
        labelled = set(re.findall(r'<label[^>]* for="([^"]+)"', response.text))
        fields = set(re.findall(r'<(?:input|select|textarea) id="([^"]+)"', response.text))
        assert fields == labelled, url
        assert 'href="/settings/" aria-current="page"' in response.text, url


def test_a_viewer_is_shown_no_form_that_would_be_refused(client: Client) -> None:
    one_of_everything()
    client.force_login(make_user("victor"))
    for page in ("approvals/", "webhooks/", "rules/"):
        assert 'method="post" action="/settings/' not in client.get(f"/settings/{page}").text, page
    assert "/settings/users/" not in client.get("/settings/").text


def test_a_token_is_shown_once_and_never_again(admin: Client) -> None:
    shown = admin.post("/settings/tokens/new/", {"name": "laptop", "scope": "write", "expires_in_days": "30"})
    secret = re.search(r'<pre id="secret-text">(sw_\w+)</pre>', shown.text)
    assert secret
    assert shown.headers["Cache-Control"].startswith("max-age=0")
    assert secret[1] not in admin.get("/settings/").text
    api = Client().get("/api/v1/me", headers={"authorization": f"Bearer {secret[1]}"}).json()
    assert (api["username"], api["role"], api["scope"]) == ("ada", "operator", "write")
    assert post(admin, f"tokens/{api['token']}/revoke/") == 302
    assert Client().get("/api/v1/me", headers={"authorization": f"Bearer {secret[1]}"}).status_code == 401


def test_only_an_admin_makes_a_token_for_a_service_account(admin: Client, client: Client) -> None:
    post(admin, "service-accounts/new/", name="bot")
    form = {"name": "ci", "scope": "write", "expires_in_days": "1", "service_account": "bot"}
    assert post(admin, "tokens/new/", **form) == 200
    assert ApiToken.objects.get().user.username == "bot"
    client.force_login(make_user("oscar", Role.OPERATOR))
    assert post(client, "tokens/new/", **form) == 403
    assert post(admin, "tokens/new/", **{**form, "service_account": "no"}) in {403, 409}


def test_users_cannot_end_what_belongs_to_others(client: Client) -> None:
    one_of_everything()
    token = ApiToken.objects.get()
    session = LoginSession.objects.get()
    client.force_login(make_user("victor"))
    assert post(client, f"tokens/{token.prefix}/revoke/") == 404
    assert post(client, f"sessions/{session.pk}/end/") == 404
    assert "laptop" not in client.get("/settings/").text


def test_ending_a_session_logs_that_browser_out(admin: Client) -> None:
    other = Client()
    other.force_login(make_user("eve"))
    session = LoginSession.objects.get(user__username="eve")
    assert post(admin, f"sessions/{session.pk}/end/") == 302
    assert other.get("/").headers["Location"].startswith("/login/")


def test_users_groups_and_grants_are_made_and_changed(admin: Client) -> None:
    assert post(admin, "groups/new/", go="apply", name="on-call", role="operator", claim="sre") == 302
    assert (
        post(admin, "users/new/", go="apply", name="eve", groups=["on-call"], password="correct horse battery") == 302
    )
    assert post(admin, "users/eve/change/", what="groups") == 302
    assert not User.objects.get(username="eve").groups.exists()
    assert post(admin, "users/eve/change/", what="active", active="no") == 302
    assert not User.objects.get(username="eve").is_active
    assert post(admin, "groups/on-call/change/", role="viewer", claim="") == 302
    assert GroupRole.objects.get(group__name="on-call").role == "viewer"
    assert post(admin, "grants/new/", deployment="chat", group="on-call") == 302
    assert post(admin, f"grants/{Grant.objects.get().pk}/take/") == 302
    assert post(admin, "groups/on-call/delete/") == 302
    assert not Group.objects.filter(name="on-call").exists()


@pytest.mark.parametrize(
    ("path", "form", "message"),
    [
        ("users/new/", {"go": "apply", "name": "eve", "password": "123"}, "too short"),
        ("users/new/", {"go": "apply", "name": "e v e"}, "may have only letters"),
        ("users/new/", {"go": "apply", "name": "system"}, "is reserved"),
        ("users/new/", {"go": "apply", "name": "ada", "password": "correct horse battery"}, "exists already"),
        ("users/ada/change/", {"what": "active", "active": "no"}, "you cannot deactivate yourself"),
        ("users/ada/change/", {"what": "groups"}, "no admin would be left"),
        ("groups/admins/delete/", {}, "no admin would be left"),
        ("groups/admins/change/", {"role": "viewer"}, "no admin would be left"),
        ("grants/new/", {"deployment": "chat"}, "a user or a group"),
        ("tokens/new/", {"name": "x", "scope": "all", "expires_in_days": "1"}, "scope"),
        ("tokens/new/", {"name": "x", "scope": "read", "expires_in_days": "9999"}, "expires in days"),
        ("webhooks/new/", {"go": "apply", "name": "x", "url": "ftp://x", "format": "json"}, "https://host/path"),
        ("rules/slow/", {"mode": "sometimes"}, "mode"),
        ("approval-rules/nothing/", {"required": "yes"}, "no action"),
    ],
)
def test_a_refusal_says_why_and_changes_nothing(admin: Client, path: str, form: dict[str, str], message: str) -> None:
    response = admin.post(f"/settings/{path}", form)
    assert response.status_code == 409
    assert message in response.text.lower().replace("&#x27;", "'")


def test_webhooks_and_rules_are_set(admin: Client) -> None:
    assert (
        post(admin, "webhooks/new/", go="apply", name="pager", url="https://pager.example.com/x", format="json") == 200
    )
    assert post(admin, "webhooks/pager/switch/", enabled="no") == 302
    assert not Webhook.objects.get().enabled
    assert post(admin, "webhooks/pager/delete/") == 302
    assert not Webhook.objects.exists()
    assert post(admin, "rules/slow/", mode="shadow") == 302
    assert FaultRule.objects.get().mode == "shadow"


def test_a_second_admin_approves_and_the_first_cannot(admin: Client) -> None:
    second = Client()
    second.force_login(make_user("grace", Role.ADMIN))
    post(admin, "approval-rules/evacuate-region/", required="yes")
    post(admin, "approval-rules/evacuate-region/", required="no")
    waiting = Approval.objects.get()
    assert 'title="pending approvals"' in admin.get("/").text
    assert 'approve/"' not in admin.get("/settings/approvals/").text
    assert post(admin, f"approvals/{waiting.pk}/approve/") == 409
    assert 'approve/"' in second.get("/settings/approvals/").text
    assert post(second, f"approvals/{waiting.pk}/approve/") == 302
    assert not ApprovalRule.objects.get().required
    assert 'title="pending approvals"' not in admin.get("/").text


def test_a_user_changes_their_own_password_and_is_logged_out_everywhere(client: Client) -> None:
    user = make_user("eve")
    user.set_password("correct horse battery")
    user.save()
    client.force_login(user)
    other = Client()
    other.force_login(user)
    key = other.cookies[settings.SESSION_COOKIE_NAME].value
    assert post(client, "password/", old_password="wrong", new_password="another horse battery") == 403
    assert post(client, "password/", old_password="correct horse battery", new_password="short") == 409
    assert post(client, "password/", old_password="correct horse battery", new_password="another horse battery") == 302
    assert [each.get("/").status_code for each in (client, other)] == [302, 302]
    user.refresh_from_db()
    assert user.check_password("another horse battery")
    audit = str(list(AuditRecord.objects.values()))
    assert "user.changed" in audit
    assert "horse battery" not in audit
    assert key not in audit


def test_old_passwords_are_not_guessed_here_either(client: Client) -> None:
    user = make_user("eve")
    user.set_password("correct horse battery")
    user.save()
    client.force_login(user)
    for _ in range(10):
        assert post(client, "password/", old_password="wrong", new_password="another horse battery") == 403
    assert post(client, "password/", old_password="correct horse battery", new_password="another horse battery") == 429
    assert client.get("/").status_code == 200
