"""Wizards of webhooks, users, groups and single sign-on: secrets stay out of documents, pages and records, and the Test
buttons really send."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client, override_settings

from accounts.models import Approval
from accounts.models import IdentityProvider as ProviderRow
from accounts.oidc import provider
from audit.models import AuditRecord
from fleet.drafts.models import PlanDraft
from fleet.webhooks.models import Webhook
from kernel.access import Role
from kernel.models import Event
from tests.accounts.identity_provider import CLIENT, SECRET, IdentityProvider, identity_provider
from tests.controlplane.access.callers import make_user
from tests.fleet.rows import NOW
from tests.fleet.webhooks.receiver import Receiver, answering, receiver

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
HOOK = {"name": "pager", "format": "json", "events": "decision.needed"}
USER = {"name": "eve", "password": "correct horse battery"}
CHANGE, TRY = "/settings/single-sign-on/change/", "/settings/single-sign-on/try/"


@pytest.fixture
def admin(client: Client) -> Client:
    client.force_login(make_user("ada", Role.ADMIN))
    return client


@pytest.fixture
def sso() -> Iterator[IdentityProvider]:
    with identity_provider() as known, override_settings(WEBHOOK_NETWORKS=["127.0.0.1"]):
        yield known


def sign_on(known: IdentityProvider, **more: str) -> dict[str, str]:
    fields = {"issuer": known.url, "client_id": CLIENT, "client_secret": SECRET, "title": "Example SSO"}
    return {**fields, "scopes": "openid profile", "groups_claim": "groups", **more}


def records() -> str:
    return json.dumps(list(AuditRecord.objects.values_list("changes", "reason")), default=str)


def test_a_new_webhook_shows_its_secret_once_and_its_address_never(admin: Client) -> None:
    form = {**HOOK, "url": "https://hooks.example.com/T0/top-secret-path", "go": "apply"}
    shown = admin.post("/settings/webhooks/new/", form)
    hook = Webhook.objects.get()
    assert (hook.events, hook.secret in shown.text) == (["decision.needed"], True)
    assert hook.secret not in admin.get("/settings/webhooks/").text
    assert "top-secret-path" not in records() + str(list(Event.objects.values_list("message", "detail")))
    assert "top-secret-path" not in admin.get("/settings/webhooks/pager/change/").text
    assert admin.post("/settings/webhooks/pager/change/", {**HOOK, "events": [], "go": "apply"}).status_code == 302
    hook.refresh_from_db()
    assert (hook.url, hook.events) == (form["url"], [])
    assert admin.get("/settings/webhooks/no-such/change/").status_code == 404


def test_a_button_rotates_the_secret_of_a_webhook_and_shows_it_once(admin: Client) -> None:
    Webhook.objects.create(name="pager", url="https://hooks.example.com/x", secret="0" * 64, created_at=NOW)
    assert "New secret" in admin.get("/settings/webhooks/").text
    shown = admin.post("/settings/webhooks/pager/rotate/").text
    hook = Webhook.objects.get()
    assert hook.secret != "0" * 64
    assert hook.secret in shown
    assert hook.secret not in admin.get("/settings/webhooks/").text + records()
    assert admin.post("/settings/webhooks/no-such/rotate/").status_code == 404
    assert admin.get("/settings/webhooks/pager/rotate/").status_code == 405


def test_the_test_button_of_a_webhook_sends_and_shows_the_answer(admin: Client) -> None:
    def tried(server: Receiver) -> str:
        return str(admin.post("/settings/webhooks/try/", {"url": server.url, "format": "json"}).text)

    with receiver() as server:
        assert "must be https" in tried(server)
        assert server.heard == []
        with override_settings(WEBHOOK_NETWORKS=["127.0.0.1"]):
            assert "The receiver answered 20" in tried(server)
            [(_, headers, body)] = server.heard
            assert (headers["X-Switchyard-Event"], json.loads(body)["data"]) == ("test", {"asked_by": "ada"})
            server.answer = answering(410, b"gone")
            assert "Not delivered: answered 410: gone" in tried(server)
    assert Event.objects.filter(kind="webhook.tested").count() == 2


def test_the_password_of_a_new_user_is_in_no_document_and_no_record(admin: Client) -> None:
    check = admin.post("/settings/users/new/", {**USER, "groups": "admins"}, headers={"HX-Request": "true"})
    assert ("kind: User" in check.text, USER["password"] in check.text) == (True, False)
    assert not User.objects.filter(username="eve").exists()
    assert admin.post("/settings/users/new/", {**USER, "groups": "admins", "go": "apply"}).status_code == 302
    eve = User.objects.get(username="eve")
    assert (eve.check_password(USER["password"]), eve.groups.get().name) == (True, "admins")
    assert USER["password"] not in records()


@pytest.mark.parametrize("path", ["/settings/users/new/", "/settings/webhooks/new/", CHANGE])
def test_secrets_come_from_no_link_and_such_documents_are_in_no_draft(admin: Client, path: str) -> None:
    page = admin.get(path, {"password": "typed-by-a-link", "client_secret": "typed-by-a-link", "name": "eve"})
    assert 'value="typed-by-a-link"' not in page.text
    form = {**USER, **HOOK, "url": "https://p.example/x", "title": "x", "go": "draft", "scopes": "openid"}
    assert "Add to draft" not in admin.post(path, form).text
    assert not PlanDraft.objects.exists()


def test_the_end_of_a_session_keeps_no_secret_in_the_address(client: Client) -> None:
    away = client.post("/settings/users/new/", {**USER, "go": "apply"}).headers["Location"]
    assert ("eve" in away, "horse" in away) == (True, False)


def test_single_sign_on_is_set_tested_changed_and_removed(admin: Client, sso: IdentityProvider) -> None:
    findings = admin.post(TRY, sign_on(sso)).text
    assert ("works" in findings, "1 signing key" in findings, "does not work" in findings) == (True, True, False)
    form = sign_on(sso, **{"tenants-0-group": "g-rufus", "tenants-0-tenant": "rufus"})
    assert admin.post(CHANGE, {**form, "go": "apply"}).status_code == 302
    row, known = ProviderRow.objects.get(), provider()
    assert known is not None
    assert (known.issuer, known.client_secret, row.tenants) == (sso.url, SECRET, {"g-rufus": "rufus"})
    for text in (row.sealed_secret, admin.get("/settings/single-sign-on/").text, admin.get(CHANGE).text, records()):
        assert SECRET not in text
    assert "Log in with Example SSO" in Client().get("/login/").text
    kept = {name: text for name, text in form.items() if name != "client_secret"}
    assert admin.post(CHANGE, {**kept, "title": "Other", "go": "apply"}).status_code == 302
    other = provider()
    assert other is not None
    assert (other.title, other.client_secret) == ("Other", SECRET)
    assert "works" in admin.post(TRY, {}).text
    assert admin.post("/settings/single-sign-on/remove/").status_code == 302
    assert provider() is None
    without = admin.get("/settings/single-sign-on/").text
    assert "No group is mapped. Give" in without
    assert "of the provider" not in without.partition("No group is mapped")[2]


def test_the_stored_secret_goes_to_no_other_issuer(admin: Client, sso: IdentityProvider) -> None:
    admin.post(CHANGE, {**sign_on(sso), "go": "apply"})
    other = {**sign_on(sso), "issuer": "https://evil.example", "client_secret": "", "go": "apply"}
    refused = admin.post(CHANGE, other)
    assert (refused.status_code, "belongs to the former issuer" in refused.text) == (409, True)
    assert ProviderRow.objects.get().issuer == sso.url


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"issuer": "http://169.254.169.254/latest"}, "not a public address"),
        ({"issuer": "https://[::1]/"}, "not a public address"),
        ({"issuer": "ftp://login.example"}, "https://host/path"),
        ({"scopes": "profile"}, "ust include openid"),
        ({"tenants-0-group": "g", "tenants-0-tenant": "no tenant!"}, "cannot be a tenant"),
    ],
)
def test_a_wrong_provider_is_refused_at_its_field(
    admin: Client, sso: IdentityProvider, wrong: dict[str, str], said: str
) -> None:
    response = admin.post(CHANGE, {**sign_on(sso), **wrong, "go": "apply"})
    assert (response.status_code, said in response.text) == (409, True)
    assert not ProviderRow.objects.exists()


def test_a_test_calls_no_other_address_and_names_what_is_wrong(admin: Client, sso: IdentityProvider) -> None:
    with override_settings(WEBHOOK_NETWORKS=["10.0.0.0/8"]):
        assert "not a public address and not allowed" in admin.post(TRY, sign_on(sso)).text
        by_name = sign_on(sso, issuer=sso.url.replace("127.0.0.1", "localhost"))
        assert "not a public address and not allowed" in admin.post(TRY, by_name).text
    sso.issuer = "https://elsewhere.example"
    assert "does not work" in admin.post(TRY, sign_on(sso)).text


def test_the_environment_wins_as_a_whole_and_the_page_says_so(admin: Client, sso: IdentityProvider) -> None:
    admin.post(CHANGE, {**sign_on(sso), "go": "apply"})
    with override_settings(OIDC_ISSUER="https://env.example", OIDC_CLIENT_SECRET="of the environment"):
        known = provider()
        assert known is not None
        assert (known.issuer, known.client_secret) == ("https://env.example", "of the environment")
        assert "of the environment are in force" in admin.get("/settings/single-sign-on/").text
        assert "of the environment are in force" in admin.get(CHANGE).text


def test_a_wrong_provider_locks_no_password_out(client: Client) -> None:
    User.objects.create_superuser("root", password="correct horse battery")
    ProviderRow.objects.create(issuer="https://gone.example", sealed_secret="unreadable", changed_at=NOW)
    assert client.get("/login/").status_code == 200
    assert client.post("/login/", {"username": "root", "password": "correct horse battery"}).status_code == 302
    assert "encrypted with another" in client.get("/settings/single-sign-on/").text


def test_while_two_persons_are_required_another_provider_waits(admin: Client, sso: IdentityProvider) -> None:
    second = Client()
    second.force_login(make_user("grace", Role.ADMIN))
    admin.post("/settings/approval-rules/evacuate-region/", {"required": "yes"})
    form: dict[str, Any] = {**sign_on(sso), "go": "apply"}
    assert admin.post(CHANGE, form).headers["Location"] == "/settings/approvals/"
    assert provider() is None
    assert SECRET not in second.get("/settings/approvals/").text + records()
    waiting = Approval.objects.get()
    assert SECRET not in str(waiting.secrets)
    assert second.post(f"/settings/approvals/{waiting.pk}/approve/").status_code == 302
    known = provider()
    assert known is not None
    assert (known.issuer, known.client_secret) == (sso.url, SECRET)
