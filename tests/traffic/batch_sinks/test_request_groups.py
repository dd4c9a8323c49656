"""Near-real-time requests that name a sink: groups, keys and objects, kills, and who may name which sink."""

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kernel.refusals import Conflict
from tests.fleet.rows import NOW
from tests.traffic.batch_sinks.servers import Server, valkey
from tests.traffic.rows import ANSWER, accepted, serving_fleet
from traffic.async_requests.models import AsyncRequest
from traffic.async_requests.planner import AsyncSettings, AsyncState
from traffic.async_requests.selectors import async_request_json, async_request_of
from traffic.async_requests.services.requests import async_request_end, async_requests_trim
from traffic.batch_sinks.models import BatchDelivery, BatchSink
from traffic.batch_sinks.planner import SinkSettings
from traffic.batch_sinks.selectors import sinks_with_waiting_requests
from traffic.batch_sinks.services.deliveries import BatchDeliverer, deliveries_claim, delivery_work
from traffic.batch_sinks.services.request_groups import request_groups_form, request_groups_trim
from traffic.batch_sinks.services.sinks import batch_delivery_retry, batch_sink_create, batch_sink_delete
from traffic.tenants.planner import ApplicationRefused
from traffic.tenants.selectors import Application

pytestmark = [pytest.mark.processes, pytest.mark.django_db]
SETTINGS = SinkSettings(chunk_lines=2, timeout_s=2.0, group_most=5)
DUE = NOW + timedelta(seconds=SETTINGS.object_group_s)


@pytest.fixture(autouse=True)
def _fleet(settings: Any, tmp_path: Path) -> None:
    settings.FILES = str(tmp_path / "files")
    settings.WEBHOOK_NETWORKS = ["127.0.0.0/8"]
    serving_fleet()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


def valkey_sink(server: Server, **columns: Any) -> BatchSink:
    with server.client() as client:
        client.flushall()
    stated = {"kind": "valkey", "url": f"valkey://127.0.0.1:{server.port}/0", "key_template": "{batch}:{custom_id}"}
    return batch_sink_create(name="answers", tenant="acme", actor="ada", now=NOW, **{**stated, **columns})


def ended(number: int, state: AsyncState = AsyncState.DONE, **columns: Any) -> AsyncRequest:
    request = accepted("acme", idempotency_key=f"k-{number}", sink="answers")
    outcome = {"status": 200, "answer": ANSWER} if state is AsyncState.DONE else {"reason": "too late"}
    rows = AsyncRequest.objects.filter(id=request.id)
    done = async_request_end(rows, state=state, now=NOW, **{**outcome, **columns})
    assert done is not None
    return done


def deliver(now: datetime = DUE) -> list[BatchDelivery]:
    request_groups_form(now=now, settings=SETTINGS)
    for leased in deliveries_claim(count=9, now=now, settings=SETTINGS):
        delivery_work(leased, settings=SETTINGS, clock_now=lambda: now)
    return list(BatchDelivery.objects.order_by("id"))


def shown(request: AsyncRequest) -> Any:
    found = async_request_of(Application(tenant="acme"), request.id)
    assert found is not None
    return async_request_json(found, AsyncSettings())["sink"]


def stored_keys(server: Server) -> dict[str, Any]:
    with server.client(decode_responses=True) as client:
        return {key: json.loads(client.get(key)) for key in client.keys("*")}


def test_ended_requests_are_keys_of_their_idempotency_key(server: Server) -> None:
    valkey_sink(server)
    requests = [ended(number) for number in range(3)]
    open_one = accepted("acme", idempotency_key="open", sink="answers")
    assert shown(requests[0]) == {"name": "answers", "state": "pending"}
    assert sinks_with_waiting_requests().get().waiting == 3
    assert request_groups_form(now=NOW, settings=SETTINGS) == 0, "they wait for others"
    (delivery,) = deliver()
    assert (delivery.state, delivery.lines, delivery.batch_id) == ("delivered", 3, None)
    assert stored_keys(server) == {f"async:k-{number}": json.loads(ANSWER) for number in range(3)}
    assert [shown(each)["state"] for each in (*requests, open_one)] == ["delivered"] * 3 + ["pending"]
    assert len(deliver()) == 1, "each request is in one group"


def test_failed_requests_are_delivered_if_wanted(server: Server) -> None:
    valkey_sink(server, errors=True)
    ended(1)
    ended(2, AsyncState.EXPIRED)
    ended(3, AsyncState.FAILED, status=400, answer=b'{"error":{"message":"no"}}')
    ended(4, answer=json.dumps({"text": "x" * 4000}).encode())
    (delivery,) = deliver()
    assert (delivery.state, delivery.lines) == ("delivered", 4)
    found = stored_keys(server)
    assert found["async:k-2"] == {"error": {"code": "deadline_exceeded", "message": "too late"}}
    assert found["async:k-3"] == {"error": {"message": "no"}}
    assert found["async:k-4"] == {"text": "x" * 4000}


def test_many_requests_are_several_groups_and_wait_for_none(server: Server) -> None:
    valkey_sink(server)
    for number in range(7):
        ended(number, AsyncState.CANCELLED if number == 3 else AsyncState.DONE)
    assert [each.lines for each in deliver(NOW)] in ([4], [5])
    assert sum(each.lines for each in deliver()) == 6, "the sink takes no failed ones"


def test_a_killed_process_costs_no_request_and_a_failed_group_is_continued(server: Server) -> None:
    valkey_sink(server, username="nobody", password="wrong")
    ended(1)
    request_groups_form(now=DUE, settings=SETTINGS)
    deliveries_claim(count=1, now=DUE, settings=SETTINGS)  # and then it is killed
    later = DUE + timedelta(seconds=SETTINGS.lease_s)
    (failed,) = deliver(later)
    assert (failed.state, "user or password" in failed.reason) == ("failed", True)
    BatchSink.objects.update(username="", sealed_password="")
    batch_delivery_retry(delivery_id=failed.pk, actor="ada", now=later)
    (delivery,) = deliver(later)
    assert (delivery.state, delivery.lines, delivery.fence) == ("delivered", 1, 3)


def test_outcomes_are_kept_until_they_are_delivered(server: Server) -> None:
    valkey_sink(server)
    request, settings = ended(1), AsyncSettings()
    day_after = NOW + timedelta(seconds=settings.kept_s + 1)
    assert async_requests_trim(now=day_after) == 0
    with pytest.raises(Conflict, match="near-real-time requests name answers"):
        batch_sink_delete(name="answers", actor="ada", now=NOW)
    deliver(day_after)
    assert async_requests_trim(now=day_after) == 1
    assert not AsyncRequest.objects.filter(id=request.id).exists()
    assert request_groups_trim(now=day_after, settings=SETTINGS) == 0
    assert request_groups_trim(now=day_after + timedelta(days=3), settings=SETTINGS) == 1
    batch_sink_delete(name="answers", actor="ada", now=NOW)


def test_a_request_names_only_sinks_of_its_tenant(server: Server) -> None:
    valkey_sink(server)
    for tenant, name in (("globex", "answers"), ("", "answers"), ("acme", "other"), ("acme", "")):
        with pytest.raises(ApplicationRefused, match="has no sink") as caught:
            accepted(tenant, sink=name)
        assert (caught.value.status, caught.value.code) == (400, "bad_header")
    assert not AsyncRequest.objects.exists()


def test_the_loop_is_awake_while_requests_wait(server: Server) -> None:
    loop = BatchDeliverer(SETTINGS)
    assert not loop.is_open(NOW)
    valkey_sink(server)
    ended(1)
    assert loop.is_open(NOW)
