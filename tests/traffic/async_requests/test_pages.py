"""The page of queues: figures by model, request queues with refused messages, and odd parameters."""

from datetime import timedelta

import pytest

from kernel import clock
from tests.controlplane.dashboard.clients import signed_in
from tests.traffic.rows import accepted, serving_fleet
from traffic.async_requests.models import AsyncRequest, RequestQueue
from traffic.async_requests.selectors import ModelQueue, model_queues
from traffic.keys.services import key_create

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


def test_the_page_shows_what_waits_for_a_model_and_where_it_comes_from() -> None:
    region, now = serving_fleet().region_id, clock.now()
    ids = [accepted("acme", now=now - timedelta(seconds=age)).id for age in (40, 30, 20, 10)]
    AsyncRequest.objects.filter(id=ids[1]).update(state="sending", attempts=1)
    AsyncRequest.objects.filter(id=ids[2]).update(state="done", ended_at=now - timedelta(seconds=5))
    AsyncRequest.objects.filter(id=ids[3]).update(state="expired", ended_at=now - timedelta(seconds=5))
    oldest_at = now - timedelta(seconds=40)
    assert model_queues(now) == [ModelQueue(region, "sim-70b", 1, 1, oldest_at, 2 / 60, 1)]
    key = key_create(name="orders", tenant="acme", actor="ann", now=now).key
    queue = RequestQueue.objects.create(
        url="kafka://k1:9093/orders", kind="kafka", name="orders", key=key, actor="ann", created_at=now, state="full"
    )
    queue.refused.create(message="0/17", reason="no JSON", at=now)
    text = signed_in().get("/batches/queues/").text
    assert all(each in text for each in ("sim-70b", "orders", "acme", "full"))
    assert "why?" not in text


@pytest.mark.parametrize(
    "query", ["?sort=oldest", "?sort=-rate&q=%25_", "?topics-state=x&topics-sort=dead", "?page=999"]
)
def test_odd_parameters_are_no_errors(query: str) -> None:
    serving_fleet()
    accepted()
    assert signed_in().get(f"/batches/queues/{query}").status_code == 200
