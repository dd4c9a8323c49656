"""Batches behind their deadline: noted once, reported to the tenant, and sent as near-real-time if allowed."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from engine_agent.protocol.states import ServingClass
from fleet.webhooks.models import WebhookDelivery
from kernel.models import Event
from tests.fleet.rows import NOW
from tests.traffic.rows import MODEL, SOON, begun, jsonl, line, serving_fleet
from traffic.batches.models import Batch
from traffic.batches.planning.batch import Tally
from traffic.batches.selectors import batch_json
from traffic.batches.services.batch import batches_pace
from traffic.batches.services.ranges import range_claim
from traffic.keys.services import key_create
from traffic.region_shares.services.overrides import traffic_policy_change
from traffic.tenants.models import GrantUse
from traffic.tenants.services import tenant_grant_create, tenant_webhook_create

pytestmark = pytest.mark.django_db
LATE = NOW + timedelta(hours=12)
RATES = {f"us-east-1 {MODEL}": 0.001}


@pytest.fixture(autouse=True)
def _own_store(settings: Any, tmp_path: Path) -> None:
    settings.FILES = str(tmp_path / "files")


def behind(key: str = "") -> Batch:
    """A batch of a thousand lines with no answer in half of its time."""
    serving_fleet()
    batch = begun(jsonl(line(1)), "acme", key=key)
    Batch.objects.filter(id=batch.id).update(
        state="in_progress", in_progress_at=NOW, lines=1000, lines_by_model={MODEL: 1000}
    )
    batch.ranges.create(number=0, model=MODEL, start=0, end=1, lines=1000)
    return batch


def paced(batch: Batch, now: Any = LATE) -> tuple[int, bool, bool]:
    noted = batches_pace(now=now, rates=RATES)
    batch.refresh_from_db()
    return noted, batch.at_risk_at is not None, batch.raised_at is not None


def test_its_owner_is_notified_once_and_its_class_stays(settings: Any) -> None:
    tenant_grant_create(tenant="acme", use=GrantUse.CALLBACK, target="app.example.com", actor="ada", now=NOW)
    tenant_webhook_create(tenant="acme", url="https://app.example.com/x", actor="ada", now=NOW)
    batch = behind()
    assert paced(batch, NOW) == (0, False, False)
    assert paced(batch) == (1, True, False)
    assert paced(batch) == (0, True, False)
    assert WebhookDelivery.objects.get().body == {
        "type": "switchyard.batch.deadline_at_risk", "data": {"id": batch.id},
    }  # fmt: skip
    event = Event.objects.get(kind="batch.deadline_at_risk")
    assert (event.detail["batch"], event.detail["steps"]) == (batch.id, ["tell"])
    ours = batch_json(batch, Tally(), now=LATE)["switchyard"]
    assert (ours["deadline_at_risk_at"], ours["warnings"][0]["code"], ours["serving_class"]) == (
        int(LATE.timestamp()), "deadline_at_risk", "batch",
    )  # fmt: skip


def test_where_it_is_wanted_what_is_left_is_sent_as_near_real_time(settings: Any) -> None:
    batch = behind()
    before = range_claim(batch_id=batch.id, model=MODEL, now=NOW, settings=SOON)
    assert before is not None
    assert before.serving_class == "batch"
    assert paced(batch) == (1, True, False)
    settings.BATCH_AT_RISK = "near_realtime"
    assert paced(batch, LATE + timedelta(minutes=10)) == (1, True, True)
    assert paced(batch) == (0, True, True)
    after = range_claim(batch_id=batch.id, model=MODEL, now=LATE, settings=SOON)
    assert after is not None
    assert after.serving_class == "near_realtime"
    assert steps() == [["tell"], ["raise"]]


def steps() -> list[list[str]]:
    return [event.detail["steps"] for event in Event.objects.filter(kind="batch.deadline_at_risk").order_by("id")]


def test_the_policy_of_its_deployment_says_how_far_it_goes_and_each_step_has_its_time(settings: Any) -> None:
    settings.BATCH_AT_RISK = "tell"
    batch = behind()
    traffic_policy_change(deployment=MODEL, stated={"batch_at_risk": "cells"}, actor="ada", now=NOW)
    assert paced(batch) == (1, False, True)
    assert paced(batch, LATE + timedelta(minutes=9)) == (0, False, True)
    assert paced(batch, LATE + timedelta(minutes=10)) == (1, False, True)
    assert batch.cells_asked_at == LATE + timedelta(minutes=10)
    assert paced(batch, LATE + timedelta(minutes=20)) == (1, True, True)
    assert paced(batch, LATE + timedelta(hours=1)) == (0, True, True)
    assert steps() == [["raise"], ["ask"], ["tell"]]


def test_a_step_that_helped_is_the_last_one(settings: Any) -> None:
    settings.BATCH_AT_RISK = "cells"
    batch = behind()
    assert paced(batch) == (1, False, True)
    batch.ranges.update(completed=600)
    assert paced(batch, LATE + timedelta(hours=1)) == (0, False, True), "600 lines within an hour, and 400 are left"
    assert paced(batch, LATE + timedelta(hours=9)) == (1, False, True), "no further answers, and time is short"
    assert steps() == [["raise"], ["ask"]]


def test_a_key_that_is_for_batches_alone_is_never_raised(settings: Any) -> None:
    settings.BATCH_AT_RISK = "near_realtime"
    new = key_create(name="app", tenant="acme", actor="ada", now=NOW, serving_class=ServingClass.BATCH)
    assert paced(behind(new.key.prefix)) == (1, True, False)


def test_what_has_ended_meanwhile_is_left_alone() -> None:
    batch = behind()
    Batch.objects.filter(id=batch.id).update(state="cancelling")
    assert paced(batch) == (0, False, False)
