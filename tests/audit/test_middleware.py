"""Requests that change something leave one record with who, how, what and why; others leave none."""

import re
from datetime import timedelta

import pytest
from django.contrib.auth.models import User
from django.contrib.auth.signals import user_logged_in
from django.contrib.sessions.backends.db import SessionStore
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.test import Client, RequestFactory

from accounts.models import ApiToken
from audit import middleware
from audit.services import DENIALS_RECORDED, DENIALS_WITHIN
from audit.signals import login_recording
from engine_agent.protocol.states import AgentKind
from fleet.agents.services.enrolment import join_token_issue
from fleet.nodes.models import Node
from kernel import clock
from kernel.events import event_record
from kernel.models import Event
from tests.audit.records import changes, only_record, recorded
from tests.controlplane.api.client import anonymous, bearer, browser
from tests.controlplane.dashboard.clients import signed_in
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


def test_a_change_over_the_api_says_who_did_what_and_why() -> None:
    node = rows.node("n-00000001")
    bearer().post(f"/api/v1/nodes/{node.id}/cordon", {"why": "noisy fan"}, format="json")
    record = only_record()
    assert (record.number, record.outcome, record.action, record.object) == (
        1,
        "done",
        "node.cordon",
        f"node/{node.id}",
    )
    assert (record.actor, record.proof, record.address) == ("operator", "token", "127.0.0.1")
    assert record.token_prefix == ApiToken.objects.get().prefix
    assert record.reason == "noisy fan"


def test_it_tells_each_column_before_and_after() -> None:
    node = rows.node("n-00000001")
    bearer().post(f"/api/v1/nodes/{node.id}/cordon")
    recorded = changes(only_record())
    row = next(entry for entry in recorded["rows"] if entry["table"] == "fleet_node")
    assert row["key"] == node.id
    assert row["changed"]["cordoned"] == [False, True]
    assert [event["kind"] for event in recorded["events"]] == ["node.cordoned"]


def test_asking_again_for_what_is_so_records_nothing() -> None:
    node = rows.node("n-00000001")
    client = bearer()
    for _ in range(2):
        assert client.post(f"/api/v1/nodes/{node.id}/cordon").status_code in {200, 409}
    assert len(recorded()) == 1


def test_what_is_read_or_refused_as_wrong_records_nothing() -> None:
    client = bearer()
    client.get("/api/v1/nodes")
    assert client.post("/api/v1/webhooks", {"nmae": "x"}, format="json").status_code == 400
    assert client.post("/api/v1/nodes/n-00000009/cordon").status_code == 404
    assert recorded() == []


def test_a_session_without_its_csrf_token_is_recorded_as_denied() -> None:
    node = rows.node("n-00000001")
    browser().post(f"/api/v1/nodes/{node.id}/cordon")
    record = only_record()
    assert (record.outcome, record.actor, record.proof, record.action) == (
        "denied",
        "operator",
        "session",
        "node.cordon",
    )
    assert record.object == f"node/{node.id}"
    assert "CSRF" in record.reason


def test_a_revoked_token_is_recorded_as_its_users() -> None:
    client = bearer("visitor")
    ApiToken.objects.update(revoked_at=NOW)
    client.get("/api/v1/nodes")
    record = only_record()
    assert (record.outcome, record.actor, record.token_prefix) == ("denied", "visitor", ApiToken.objects.get().prefix)


def test_refusals_in_a_loop_are_recorded_a_few_times_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    User.objects.create_user("visitor")
    client = bearer("visitor")
    for number in range(30):
        assert client.get(f"/api/v1/audit/{number}").status_code == 403
    assert len(recorded()) == DENIALS_RECORDED
    assert client.get("/api/v1/audit").status_code == 403
    assert len(recorded()) == DENIALS_RECORDED + 1
    later = clock.now() + DENIALS_WITHIN
    monkeypatch.setattr(clock, "now", lambda: later)
    client.get("/api/v1/audit/1")
    assert len(recorded()) == DENIALS_RECORDED + 2


def test_strangers_are_not_recorded() -> None:
    client = anonymous()
    client.post("/api/v1/nodes/n-00000001/cordon")
    client.credentials(HTTP_AUTHORIZATION="Bearer sw_00000000000000_" + 48 * "0")
    client.get("/api/v1/nodes")
    assert recorded() == []


def test_secrets_stay_out() -> None:
    secret = "correct-horse-battery"
    body = {"name": "pager", "url": "https://93.184.215.14/x", "secret": secret}
    assert bearer().post("/api/v1/webhooks", body, format="json").status_code == 200
    record = only_record()
    assert (record.action, record.object) == ("webhook.create", "webhook/pager")
    assert secret not in record.changes
    assert changes(record)["asked"]["secret"] == "(hidden)"


def test_a_page_leaves_the_record_that_the_api_would() -> None:
    response = signed_in().post("/keys/new/", {"name": "shop", "tenant": "shop", "serving_class": "realtime"})
    assert response.status_code == 200
    record = only_record()
    assert (record.action, record.proof) == ("key.create", "session")
    shown = re.search(r"sw_[0-9a-f]+_[0-9a-f]+", response.text)
    assert shown is not None
    assert shown[0] not in record.changes


def test_login_and_logout_are_recorded_and_a_wrong_password_as_denied() -> None:
    User.objects.create_user("ada", password="correct-horse")
    client = Client()
    client.post("/login/", {"username": "ada", "password": "wrong"})
    client.post("/login/", {"username": "nobody", "password": "wrong"})
    client.post("/login/", {"username": "ada", "password": "correct-horse"})
    client.post("/logout/")
    assert [(record.action, record.outcome, record.actor) for record in recorded()] == [
        ("login", "denied", "ada"),
        ("login", "done", "ada"),
        ("logout", "done", "ada"),
    ]
    assert not any("correct-horse" in record.changes for record in recorded())


def test_an_agents_enrolment_is_recorded_as_the_agents() -> None:
    until = clock.now() + timedelta(hours=1)
    token = join_token_issue(kind=AgentKind.NODE, subject="n-00000001", region="us-east-1", expires_at=until)
    body = {"kind": "node", "id": "n-00000001", "nonce": "5e" * 32}
    headers = {"Authorization": f"Bearer {token}"}
    answer = Client().post("/agents/enrol", body, content_type="application/json", headers=headers)
    assert answer.status_code == 200
    record = only_record()
    assert (record.action, record.actor, record.proof) == ("agent.enrol", "n-00000001", "join-token")
    assert record.object == "agent/n-00000001"
    assert answer.json()["credential"] not in record.changes


def test_a_fault_of_the_server_takes_the_change_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: object) -> None:
        raise RuntimeError("no record")

    monkeypatch.setattr(middleware, "audit_record", fails)
    node = rows.node("n-00000001")
    credentials = vars(bearer())["_credentials"]
    client = Client(raise_request_exception=False)
    answer = client.post(f"/api/v1/nodes/{node.id}/cordon", "{}", content_type="application/json", **credentials)
    assert answer.status_code == 500
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.json()["instance"] == f"/api/v1/nodes/{node.id}/cordon"
    assert not Node.objects.get().cordoned


def test_a_login_that_comes_back_from_elsewhere_is_recorded_too() -> None:
    """An identity provider sends people back with GET."""
    user = User.objects.create_user("ada")
    request = RequestFactory().get("/login/back/")
    request.session = SessionStore()
    request.session.create()

    def logs_in(request: HttpRequest) -> HttpResponse:
        user_logged_in.send(sender=User, request=request, user=user)
        return HttpResponse(status=302)

    middleware.AuditMiddleware(logs_in)(request)
    record = only_record()
    assert (record.action, record.outcome, record.actor, record.object) == ("login", "done", "ada", "user/ada")


def test_a_dry_run_that_is_taken_back_records_nothing() -> None:
    def tries(request: HttpRequest) -> HttpResponse:
        with transaction.atomic():
            event_record(kind="test.tried", message="tried", now=NOW)
            transaction.set_rollback(True)
        return HttpResponse()

    request = RequestFactory().post("/api/v1/plan")
    with login_recording():
        middleware.AuditMiddleware(lambda request: HttpResponse()).process_view(request, tries, (), {})
    assert recorded() == []


def test_a_refusal_takes_back_what_the_view_wrote_and_counters_of_attempts_stay() -> None:
    def answers(status: int) -> None:
        def view(request: HttpRequest) -> HttpResponse:
            event_record(kind=f"test.{status}", message="written", now=NOW)
            return HttpResponse(status=status)

        with login_recording():
            middleware.AuditMiddleware(lambda request: HttpResponse()).process_view(
                RequestFactory().post("/x"), view, (), {}
            )

    for status in (400, 404, 409, 500, 401, 403, 429):
        answers(status)
    kept = set(Event.objects.filter(kind__startswith="test.").values_list("kind", flat=True))
    assert kept == {"test.401", "test.403", "test.429"}
