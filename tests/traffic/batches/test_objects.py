"""Batches over objects in a tenant's bucket, in the test cloud, with a stand-in for the ingress."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.utils import timezone

from lab.cloud.server import World
from lab.cloud.world import Fault, When
from tests.fleet.rows import NOW
from tests.fleet.webhooks.receiver import Receiver
from tests.traffic.bucket_store import cloud_of_files, keys, lost_answer, torn_body
from tests.traffic.rows import (
    begun,
    begun_with,
    has_open_batches,
    jsonl,
    line,
    results,
    serving_fleet,
    standin_ingress,
    worked_until,
)
from traffic.batches.models import Batch
from traffic.batches.planning.batch import BatchSettings
from traffic.batches.services.ranges import batch_chore_claim
from traffic.batches.services.validation import batch_validate
from traffic.tenants.models import GrantUse
from traffic.tenants.planner import ApplicationRefused
from traffic.tenants.services import tenant_grant_create, tenant_grant_withdraw

pytestmark = [pytest.mark.cloud, pytest.mark.django_db(transaction=True)]
IN, OUT = "s3://acme-data/in/a.jsonl", "s3://acme-data/out"
LINES = jsonl(*(line(number) for number in range(7)))


@pytest.fixture
def world(settings: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    settings.PLAIN_LINKS = True
    settings.FILES = str(tmp_path / "files")
    with cloud_of_files(monkeypatch, "acme-data") as world:
        yield world


@pytest.fixture
def ingress() -> Iterator[Receiver]:
    with standin_ingress() as standin:
        yield standin


def put(world: World, content: bytes, key: str = "in/a.jsonl") -> None:
    world.client("s3").put_object(Bucket="acme-data", Key=key, Body=content)


def got(world: World, key: str) -> bytes:
    return bytes(world.client("s3").get_object(Bucket="acme-data", Key=key)["Body"].read())


def granted(
    tenant: str = "acme", uri: str = "s3://acme-data", uses: tuple[GrantUse, ...] = (GrantUse.READ, GrantUse.WRITE)
) -> list[int]:
    return [tenant_grant_create(tenant=tenant, use=use, target=uri, actor="ada", now=NOW).pk for use in uses]


async def in_database(work: Any) -> Any:
    return await sync_to_async(work, thread_sensitive=True)()


async def ended(begin: Any, ingress: Receiver) -> Batch:
    def start() -> str:
        serving_fleet(ingress.port)
        return str(begin().id)

    batch_id = await in_database(start)
    await worked_until(lambda: not has_open_batches())
    batch: Batch = await in_database(lambda: Batch.objects.get(id=batch_id))
    await in_database(connections.close_all)
    return batch


def asked(**ours: str) -> dict[str, Any]:
    return {"switchyard": ours}


def began(**ours: str) -> Batch:
    granted()
    return begun_with("acme", now=timezone.now(), **asked(**ours))


@pytest.mark.asyncio
async def test_an_object_is_read_and_results_are_written_beside_our_own(world: World, ingress: Receiver) -> None:
    put(world, LINES)
    world.faults += [torn_body(), lost_answer("PutObject")]
    batch = await ended(lambda: began(input_uri=IN, output_uri=f"{OUT}/"), ingress)
    assert (batch.state, batch.completed, batch.errors, batch.model) == ("completed", 7, [], "sim-70b")
    assert batch.input_etag == world.client("s3").head_object(Bucket="acme-data", Key="in/a.jsonl")["ETag"].strip('"')
    name = f"out/{batch.id}_output.jsonl"
    assert keys(world, "acme-data") == ["in/a.jsonl", name]
    theirs = [json.loads(each) for each in got(world, name).splitlines()]
    assert theirs == results(batch.output_file_id)


@pytest.mark.asyncio
async def test_results_that_cannot_be_written_there_are_here_and_it_is_said(world: World, ingress: Receiver) -> None:
    world.faults.append(Fault("PutObject", "AccessDenied", times=9))
    batch = await ended(
        lambda: (granted(), begun(LINES, "acme", now=timezone.now(), **asked(output_uri=OUT)))[1], ingress
    )
    assert (batch.state, len(results(batch.output_file_id))) == ("completed", 7)
    (error,) = batch.errors
    assert (error["code"], error["param"]) == ("object_not_accessible", "switchyard.output_uri")
    assert "access is denied" in error["message"]
    world.faults.clear()


@pytest.mark.asyncio
async def test_what_has_the_name_of_a_result_already_is_not_replaced(world: World, ingress: Receiver) -> None:
    def begin() -> Batch:
        batch = began(output_uri=OUT, input_uri=IN)
        put(world, b"theirs", f"out/{batch.id}_output.jsonl")
        return batch

    put(world, LINES)
    batch = await ended(begin, ingress)
    assert (batch.state, batch.errors[0]["code"]) == ("completed", "object_exists")
    assert got(world, f"out/{batch.id}_output.jsonl") == b"theirs"
    assert len(results(batch.output_file_id)) == 7


@pytest.mark.asyncio
async def test_a_place_that_was_withdrawn_gets_nothing(world: World, ingress: Receiver) -> None:
    def begin() -> Batch:
        grants = granted()
        batch = begun(LINES, "acme", now=timezone.now(), **asked(output_uri=OUT))
        for grant in grants:
            tenant_grant_withdraw(grant_id=grant, actor="ada", now=NOW)
        return batch

    batch = await ended(begin, ingress)
    assert (batch.state, batch.errors[0]["code"]) == ("completed", "place_not_allowed")
    assert (keys(world, "acme-data"), len(results(batch.output_file_id))) == ([], 7)


def validated(world: World, **ours: str) -> Batch:
    serving_fleet()
    began(**ours)
    batch = batch_chore_claim(now=timezone.now(), settings=BatchSettings())
    assert batch is not None
    batch_validate(batch=batch, now=timezone.now(), settings=BatchSettings())
    batch.refresh_from_db()
    return batch


def test_an_object_that_is_not_there_fails_the_batch_by_name(world: World) -> None:
    batch = validated(world, input_uri=IN)
    assert (batch.state, batch.errors[0]["code"], batch.errors[0]["param"]) == (
        "failed", "object_not_found", "switchyard.input_uri",
    )  # fmt: skip
    assert IN in batch.errors[0]["message"]


def test_a_huge_object_is_not_read(world: World, settings: Any) -> None:
    settings.BATCH_INPUT_BYTES = 100
    put(world, LINES)
    batch = validated(world, input_uri=IN)
    assert (batch.state, batch.errors[0]["code"]) == ("failed", "file_too_large")


def test_an_object_that_changes_while_it_is_read_fails_the_batch(world: World) -> None:
    put(world, jsonl(*(line(number, "x" * 400_000) for number in range(20))))  # longer than the read-ahead
    world.faults.append(Fault("GetObject", when=When.AFTER, ending=torn_body().ending))
    answered = world.forwarded

    def replaced(call: Any) -> Any:
        answer = answered(call)
        if call.operation == "GetObject" and world.count("GetObject") == 0:
            world.backend("s3", "aws").put_object("acme-data", "in/a.jsonl", LINES)
        return answer

    world.forwarded = replaced  # type: ignore[method-assign]
    batch = validated(world, input_uri=IN)
    assert (batch.state, batch.errors[0]["code"]) == ("failed", "object_changed")


def test_lines_that_are_wrong_are_said_as_of_a_file(world: World) -> None:
    put(world, jsonl(line(1), line(1)))
    batch = validated(world, input_uri=IN)
    assert [(error["code"], error["line"]) for error in batch.errors] == [("duplicate_custom_id", 2)]


@pytest.mark.parametrize(
    ("ours", "param"),
    [
        ({"input_uri": "s3://acme-data/other/a.jsonl"}, "input_uri"),
        ({"input_uri": "s3://acme-data/in2/a.jsonl"}, "input_uri"),
        ({"input_uri": "s3://globex-data/in/a.jsonl"}, "input_uri"),
        ({"input_uri": "s3://switchyard-files/east/files/file-1"}, "input_uri"),
        ({"input_uri": IN, "output_uri": "s3://acme-data/in"}, "output_uri"),
        ({"input_uri": IN, "output_uri": "s3://acme-data"}, "output_uri"),
    ],
)
def test_a_tenant_uses_its_own_places_for_what_they_are_alone(settings: Any, ours: dict[str, str], param: str) -> None:
    serving_fleet()
    granted(uri="s3://acme-data/in", uses=(GrantUse.READ,))
    granted("globex", "s3://globex-data")
    with pytest.raises(ApplicationRefused) as caught:
        begun_with("acme", **asked(**ours))
    assert (caught.value.status, caught.value.code, caught.value.param) == (
        403, "place_not_allowed", f"switchyard.{param}",
    )  # fmt: skip
    assert not Batch.objects.exists()
    assert begun_with("acme", **asked(input_uri=IN)).input_file_id == ""
