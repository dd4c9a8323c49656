"""Deliveries to a tenant's bucket in the test cloud: parts, lost answers, and grants."""

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lab.cloud.server import World
from lab.cloud.world import Fault
from tests.fleet.rows import NOW
from tests.traffic.batch_sinks.servers import answered, ended_batch, failed
from tests.traffic.bucket_store import cloud_of_files, keys, lost_answer
from tests.traffic.rows import ANSWER, accepted, jsonl, serving_fleet
from traffic.async_requests.models import AsyncRequest
from traffic.async_requests.planner import AsyncState
from traffic.async_requests.services.requests import async_request_end
from traffic.batch_sinks.models import BatchDelivery, BatchSink
from traffic.batch_sinks.planner import SinkSettings
from traffic.batch_sinks.services.deliveries import deliveries_claim, delivery_work
from traffic.batch_sinks.services.request_groups import request_groups_form
from traffic.batch_sinks.services.sinks import batch_sink_create
from traffic.tenants.models import GrantUse, TenantGrant
from traffic.tenants.planner import ApplicationRefused
from traffic.tenants.services import tenant_grant_create, tenant_grant_withdraw

pytestmark = [pytest.mark.cloud, pytest.mark.django_db(transaction=True)]
SETTINGS = SinkSettings(chunk_lines=2)
OUTPUT, ERRORS = jsonl(*(answered(number, "x" * 3_000_000) for number in range(6))), jsonl(failed(9))


@pytest.fixture
def world(settings: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    settings.FILES = str(tmp_path / "files")
    serving_fleet()
    tenant_grant_create(tenant="acme", use=GrantUse.WRITE, target="s3://acme-data/out", actor="ada", now=NOW)
    with cloud_of_files(monkeypatch, "acme-data") as world:
        yield world


def sink(**columns: Any) -> BatchSink:
    stated = {"kind": "s3", "url": "s3://acme-data/out/{date}/{batch}", "part_mib": 8, **columns}
    return batch_sink_create(name="bucket", tenant="acme", actor="ada", now=NOW, **stated)


def deliver() -> BatchDelivery:
    for leased in deliveries_claim(count=9, now=NOW, settings=SETTINGS):
        delivery_work(leased, settings=SETTINGS, clock_now=lambda: NOW)
    return BatchDelivery.objects.get()


def got(world: World, key: str) -> bytes:
    return bytes(world.client("s3").get_object(Bucket="acme-data", Key=key)["Body"].read())


def test_results_are_parts_of_whole_lines_and_a_repetition_changes_nothing(world: World) -> None:
    sink(errors=True)
    batch = ended_batch("bucket", output=OUTPUT, errors=ERRORS)
    world.faults.append(lost_answer("PutObject"))
    delivery = deliver()
    assert (delivery.state, delivery.lines, delivery.reason) == ("delivered", 7, "")
    folder = f"out/{batch.created_at:%Y-%m-%d}/{batch.id}"
    names = [f"{folder}/errors-00000.jsonl", *(f"{folder}/output-{number:05d}.jsonl" for number in range(3))]
    assert keys(world, "acme-data") == names
    assert b"".join(got(world, name) for name in names[1:]) == OUTPUT
    assert got(world, names[0]) == ERRORS
    BatchDelivery.objects.update(state="pending", due_at=NOW, position=0, part=0, lines=0, in_errors=False)
    assert (deliver().state, keys(world, "acme-data")) == ("delivered", names)


def test_an_object_of_another_content_and_a_withdrawn_grant_end_it(world: World) -> None:
    sink()
    batch = ended_batch("bucket", output=OUTPUT)
    key = f"out/{batch.created_at:%Y-%m-%d}/{batch.id}/output-00000.jsonl"
    world.client("s3").put_object(Bucket="acme-data", Key=key, Body=b"theirs")
    delivery = deliver()
    assert (delivery.state, "other content" in delivery.reason) == ("failed", True)
    assert got(world, key) == b"theirs"
    tenant_grant_withdraw(grant_id=TenantGrant.objects.get().pk, actor="ada", now=NOW)
    BatchDelivery.objects.update(state="pending", due_at=NOW)
    assert "no grant" in deliver().reason


def test_a_bucket_that_does_not_answer_is_tried_again(world: World) -> None:
    sink()
    ended_batch("bucket", output=jsonl(answered(1)))
    world.faults.append(Fault("PutObject", "InternalError", times=9))
    delivery = deliver()
    assert (delivery.state, delivery.attempts) == ("pending", 1)
    world.faults.clear()
    BatchDelivery.objects.update(due_at=NOW)
    assert deliver().state == "delivered"


def test_a_batch_names_sinks_of_its_own_tenant_only(world: World) -> None:
    sink()
    with pytest.raises(ApplicationRefused, match="there is no sink `bucket`") as caught:
        ended_batch("bucket", output=OUTPUT, tenant="globex")
    assert (caught.value.code, caught.value.param) == ("sink_not_found", "switchyard.sinks")
    for wrong in (["a b"], ["a"] * 6, ["bucket", ""]):
        with pytest.raises(ApplicationRefused, match="names of sinks"):
            ended_batch(*wrong, output=OUTPUT)


def test_a_group_of_near_real_time_requests_is_one_object_even_if_it_is_written_twice(world: World) -> None:
    row = sink()
    for number in range(3):
        request = accepted("acme", idempotency_key=f"k-{number}", sink=row.name)
        rows = AsyncRequest.objects.filter(id=request.id)
        async_request_end(rows, state=AsyncState.DONE, now=NOW, status=200, answer=ANSWER)
    later = NOW + timedelta(seconds=SETTINGS.object_group_s)
    assert request_groups_form(now=later, settings=SETTINGS) == 1
    BatchDelivery.objects.update(due_at=NOW)
    delivery = deliver()
    name = f"out/{later:%Y-%m-%d}/async_{delivery.pk}/output-00000.jsonl"
    assert (delivery.state, keys(world, "acme-data")) == ("delivered", [name])
    lines = [json.loads(line) for line in got(world, name).splitlines()]
    assert {line["custom_id"] for line in lines} == {"k-0", "k-1", "k-2"}
    assert {line["response"]["status_code"] for line in lines} == {200}
    BatchDelivery.objects.update(state="pending", due_at=NOW, position=0, part=0, lines=0, output_name="")
    assert (deliver().state, keys(world, "acme-data")) == ("delivered", [name])
