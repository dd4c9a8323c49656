import pytest
from django.utils import timezone

from fleet.clouds.aws.identity import install_ensure
from kernel.access import Role
from tests.controlplane.access.callers import calls, make_user
from tests.controlplane.api.client import rules
from tests.fleet.rows import NOW
from traffic.async_requests.models import RefusedMessage, RequestQueue
from traffic.keys.services import key_create

pytestmark = pytest.mark.django_db

QUEUES = "/api/v1/request-queues"


def test_an_admin_declares_a_queue_sees_what_it_refused_and_withdraws_it() -> None:
    ada = calls(make_user("ada", Role.ADMIN))
    key = key_create(name="orders", tenant="acme", actor="ada", now=timezone.now()).key
    url = f"https://sqs.us-east-1.amazonaws.com/123456789012/{install_ensure(NOW).pk}-requests-orders"
    body = {"url": url, "key": key.prefix}
    declared = ada.post(QUEUES, body, format="json").json()
    assert (declared["tenant"], declared["key"], declared["state"]) == ("acme", key.prefix, "new")
    assert ada.post(QUEUES, body, format="json").status_code == 409
    assert rules(ada.post(QUEUES, {**body, "url": "https://x"}, format="json")) == {"url": "queue"}
    RefusedMessage.objects.create(queue=RequestQueue.objects.get(), message="m-1", reason="no JSON", at=NOW)
    shown = ada.get(f"{QUEUES}/{declared['id']}").json()
    assert [each["reason"] for each in shown["refused"]] == ["no JSON"]
    assert ada.delete(f"{QUEUES}/{declared['id']}").json() == shown
    assert not RequestQueue.objects.exists()


def test_an_operator_binds_no_key() -> None:
    assert calls(make_user("olga", Role.OPERATOR)).post(QUEUES, {}, format="json").status_code == 403
