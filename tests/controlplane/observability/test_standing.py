"""How far behind the control loops are stands where people and programs look: quietly while all is well."""

import re
from datetime import timedelta
from typing import Any

import pytest
from django.db import DatabaseError, connection
from django.test import Client

from controlplane.observability import views
from kernel import clock
from kernel.control_hosts import control_host_seen
from kernel.control_standing import HOUSEKEEPING
from kernel.loop_passes import loop_passed
from kernel.models import ControlHost, LoopPass
from tests.controlplane.access.callers import make_user
from tests.controlplane.api.client import bearer

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "HEALTH_KEPT_S", -1.0)
    LoopPass.objects.all().delete()
    loop_passed("fleet.reconcile", took_s=0.1)
    loop_passed(HOUSEKEEPING, waited_s=0.2)


def behind(seconds: float) -> None:
    with connection.cursor() as cursor:
        cursor.execute("UPDATE kernel_looppass SET passed_at = clock_timestamp() - %s * interval '1 s'", [seconds])


def health() -> tuple[int, dict[str, Any]]:
    answer = Client().get("/healthz")
    return answer.status_code, answer.json()


def page() -> str:
    client = Client()
    client.force_login(make_user("somebody"))
    return client.get("/incidents/").content.decode()


def test_anybody_may_ask_for_health() -> None:
    status, told = health()
    assert (status, told["status"], set(told["loops"])) == (200, "ok", {"fleet.reconcile"})


def test_late_loops_are_said_and_are_not_webs_fault() -> None:
    behind(45.0)
    status, told = health()
    assert (status, told["status"]) == (200, "late")
    assert told["last_pass_s"] >= 45.0
    assert told["queue_s"] >= 40.0


def test_without_the_database_web_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> None:
        raise DatabaseError("gone")

    monkeypatch.setattr(views, "control_standing", gone)
    assert health() == (503, {"status": "the database does not answer"})


def test_who_asks_again_within_a_second_costs_the_database_nothing(
    monkeypatch: pytest.MonkeyPatch, django_assert_num_queries: Any
) -> None:
    monkeypatch.setattr(views, "HEALTH_KEPT_S", 60.0)
    health()
    with django_assert_num_queries(0):
        health()


def test_every_page_says_it_and_raises_its_voice_only_when_they_are_late() -> None:
    assert re.search(r'<p class="control-loops">Last pass \d s ago, queue \d s old</p>', page())
    behind(45.0)
    late = page()
    assert '<p class="control-loops tone-bad" role="status">' in late
    ages = re.search(r"Last pass (\d+) s ago, queue (\d+) s old", late)
    assert ages
    assert (int(ages[1]) >= 45, int(ages[2]) >= 40) == (True, True)


def test_metrics_have_the_ages() -> None:
    behind(45.0)
    text = bearer().get("/metrics").content.decode()
    assert _value(text, 'switchyard_control_pass_age_seconds{loop="fleet.reconcile"}') >= 45.0
    assert _value(text, "switchyard_housekeeping_queue_age_seconds") >= 40.0


def _value(metrics: str, series: str) -> float:
    (line,) = (line for line in metrics.splitlines() if line.startswith(series))
    return float(line.rpartition(" ")[2])


def test_two_control_hosts_are_in_health_metrics_and_on_every_page() -> None:
    control_host_seen("control-1")
    assert "Control hosts" not in page()
    control_host_seen("control-2")
    _, told = health()
    assert (told["hosts_are_well"], told["hosts_summary"]) == (True, "control-1, control-2")
    assert [host["name"] for host in told["hosts"]] == ["control-1", "control-2"]
    assert 'switchyard_control_host_silent_seconds{host="control-2"}' in bearer().get("/metrics").content.decode()
    assert "Control hosts: control-1, control-2" in page()
    ControlHost.objects.filter(name="control-1").update(seen_at=clock.now() - timedelta(minutes=1))
    assert re.search(r"tone-bad[^>]*>.*control-1 silent since", page(), re.DOTALL)
    assert health()[1]["hosts_are_well"] is False
