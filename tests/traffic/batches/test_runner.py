"""Batches from input to results, with a stand-in for the ingress."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from asgiref.sync import sync_to_async
from django.db import DataError, connections
from django.utils import timezone

from tests.fleet import rows
from tests.fleet.rows import NOW
from tests.fleet.webhooks.receiver import Receiver
from tests.traffic.rows import (
    ANSWER,
    SOON,
    answering_json,
    begun,
    has_open_batches,
    jsonl,
    line,
    results,
    serving_fleet,
    standin_ingress,
    worked_until,
)
from traffic.batches.models import Batch, BatchRange
from traffic.batches.planning.batch import BatchSettings
from traffic.batches.planning.lines import Outcome
from traffic.batches.services import finalizing
from traffic.batches.services.batch import batch_end_early
from traffic.batches.services.ranges import range_outcomes
from traffic.files.services.store import FileStore, StoreAway, file_store
from traffic.routing.services.tables import tables_publish

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.asyncio, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _own_store(settings: Any, tmp_path: Path) -> None:
    settings.PLAIN_LINKS = True
    settings.FILES = str(tmp_path / "files")


@pytest.fixture
def ingress() -> Iterator[Receiver]:
    with standin_ingress() as standin:
        yield standin


async def done(content: bytes, ingress: Receiver, *, settings: BatchSettings = SOON, **asked: Any) -> Batch:
    """Runs a batch over this content to its end."""

    def begin() -> str:
        serving_fleet(ingress.port)
        return begun(content, now=timezone.now(), **asked).id

    batch_id = await sync_to_async(begin, thread_sensitive=True)()
    await worked_until(lambda: not has_open_batches(), settings)
    batch: Batch = await sync_to_async(Batch.objects.get, thread_sensitive=True)(id=batch_id)
    await sync_to_async(connections.close_all, thread_sensitive=True)()
    return batch


async def test_every_line_is_answered_once_and_the_results_name_them(ingress: Receiver) -> None:
    batch = await done(jsonl(*(line(number) for number in range(11))), ingress)
    assert (batch.state, batch.model, batch.lines, batch.completed, batch.failed) == ("completed", "sim-70b", 11, 11, 0)
    assert (batch.error_file_id, batch.errors) == ("", [])
    lines = results(batch.output_file_id)
    assert Counter(each["custom_id"] for each in lines) == Counter(f"id-{number}" for number in range(11))
    assert lines[0]["response"]["status_code"] == 200
    assert lines[0]["response"]["body"] == json.loads(ANSWER)
    assert (lines[0]["error"], lines[0]["response"]["request_id"]) == (None, lines[0]["id"])
    assert batch.output_tokens == 11
    stamps = (batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    assert list(stamps) == sorted(stamps)  # type: ignore[type-var]


async def test_it_is_sent_as_batch_work_and_with_its_deadline(ingress: Receiver) -> None:
    await done(jsonl(line(1)), ingress)
    ((path, headers, body),) = ingress.heard
    assert path == "/v1/chat/completions"
    assert headers["X-Switchyard-Class"] == "batch"
    assert 0 < int(headers["X-Switchyard-Deadline-Ms"]) <= 3_600_000
    assert json.loads(body)["messages"] == [{"role": "user", "content": "why?"}]


async def test_nothing_is_left_of_it_but_its_files(ingress: Receiver) -> None:
    batch = await done(jsonl(line(1)), ingress)
    assert list(file_store().names("batches")) == []
    ranges = await sync_to_async(BatchRange.objects.count, thread_sensitive=True)()
    await sync_to_async(connections.close_all, thread_sensitive=True)()
    assert (ranges, batch.leased_until) == (0, None)


async def test_what_engines_refuse_is_in_the_error_file_with_their_answer(ingress: Receiver) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        asked = next(body for _, headers, body in ingress.heard if headers == dict(handler.headers))
        is_bad = b"bad" in asked
        refusal = b'{"error":{"message":"too long","code":"context_length_exceeded"}}'
        answering_json(400 if is_bad else 200, refusal if is_bad else ANSWER)(handler)

    ingress.answer = answer
    batch = await done(jsonl(line(1), line(2, "bad"), line(3)), ingress)
    assert (batch.state, batch.completed, batch.failed, batch.errors) == ("completed", 2, 1, [])
    (failed,) = results(batch.error_file_id)
    assert (failed["custom_id"], failed["error"], failed["response"]["status_code"]) == ("id-2", None, 400)
    assert failed["response"]["body"]["error"]["code"] == "context_length_exceeded"


async def test_where_every_line_failed_the_batch_itself_says_why(ingress: Receiver) -> None:
    ingress.answer = answering_json(404, b'{"error":{"message":"no such model","code":"model_not_found"}}')
    batch = await done(jsonl(line(1), line(2)), ingress)
    assert (batch.state, batch.output_file_id, batch.completed, batch.failed) == ("completed", "", 0, 2)
    (error,) = batch.errors
    assert (error["code"], error["message"], error["line"]) == ("model_not_found", "2 of 2 lines: no such model", None)


async def test_who_is_busy_is_asked_again(ingress: Receiver) -> None:
    answers: Counter[str] = Counter()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        line_id = handler.headers["X-Request-Id"].rpartition("-")[0]
        answers[line_id] += 1
        answering_json(503 if answers[line_id] < 3 else 200)(handler)

    ingress.answer = answer
    batch = await done(jsonl(line(1), line(2)), ingress)
    assert (batch.completed, batch.failed) == (2, 0)
    assert list(answers.values()) == [3, 3]


async def test_a_line_whose_answer_broke_on_its_way_counts_once(ingress: Receiver) -> None:
    """An engine answered it twice; the batch has one outcome, with the tokens of that answer."""
    torn: set[bytes] = set()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        said = ingress.heard[-1][2]
        if said in torn:
            return answering_json()(handler)
        torn.add(said)
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(ANSWER)))
        handler.end_headers()
        handler.wfile.write(ANSWER[:-10])
        return handler.wfile.flush()

    ingress.answer = answer
    batch = await done(jsonl(*(line(number, f"why {number}?") for number in range(3))), ingress)
    assert (batch.state, batch.completed, batch.failed, batch.output_tokens) == ("completed", 3, 0, 3)
    assert sorted(each["custom_id"] for each in results(batch.output_file_id)) == ["id-0", "id-1", "id-2"]
    assert len(ingress.heard) == 6


async def test_what_kills_engines_is_not_tried_for_ever(ingress: Receiver) -> None:
    ingress.answer = answering_json(500, b"boom")
    batch = await done(jsonl(line(1)), ingress)
    assert (batch.state, batch.failed, len(ingress.heard)) == ("completed", 1, 5)


@pytest.mark.parametrize(
    ("content", "codes"),
    [
        (b"\n", [("empty_file", None)]),
        (jsonl(line(1), b"{"), [("invalid_json_line", 2)]),
        (jsonl(line(1, body={"model": "a\0b"})), [("invalid_json_line", 1)]),
        (jsonl(line(1), line(2, "\ud800")), [("invalid_json_line", 2)]),
        (jsonl(line(1), line(2), line(1)), [("duplicate_custom_id", 3)]),
        (jsonl(line(1, url="/v1/embeddings")), [("url_mismatch", 1)]),
        (jsonl(line(1), line(2, body={"model": "other"})), [("model_not_found", 2)]),
        (jsonl(line(1, body={"model": "nobodys"})), [("model_not_found", 1)]),
        (jsonl(line(1, body={"model": "sim-70b", "stream": True})), [("invalid_value", 1)]),
    ],
)
async def test_a_file_that_is_wrong_fails_with_code_and_line(
    ingress: Receiver, content: bytes, codes: list[tuple[str, int | None]]
) -> None:
    batch = await done(content, ingress)
    assert (batch.state, [(error["code"], error["line"]) for error in batch.errors]) == ("failed", codes)
    assert ingress.heard == []


async def test_lines_of_several_models_are_sent_apart_and_counted_by_model(ingress: Receiver) -> None:
    def begin() -> str:
        serving_fleet(ingress.port)
        row = rows.deployment("night")
        rows.cell("c2", rows.node("n-b"), deployment=row)
        tables_publish(now=NOW)
        lines = [line(number, body={"model": ("sim-70b", "night")[number % 2]}) for number in range(9)]
        return begun(jsonl(*lines), now=timezone.now()).id

    batch_id = await sync_to_async(begin, thread_sensitive=True)()
    await worked_until(lambda: not has_open_batches())
    batch: Batch = await sync_to_async(Batch.objects.get, thread_sensitive=True)(id=batch_id)
    await sync_to_async(connections.close_all, thread_sensitive=True)()
    assert (batch.state, batch.completed, batch.model) == ("completed", 9, "")
    assert batch.lines_by_model == {"sim-70b": 5, "night": 4}
    asked = Counter(json.loads(body)["model"] for _, _, body in ingress.heard)
    assert asked == {"sim-70b": 5, "night": 4}


async def test_a_long_input_is_split_and_has_one_outcome_per_line(ingress: Receiver) -> None:
    small = replace(SOON, shard_lines=5, turn_s=0.0)
    batch = await done(jsonl(*(line(number) for number in range(23))), ingress, settings=small)
    assert (batch.state, batch.errors) == ("completed", [])
    assert (batch.lines, batch.completed, batch.validated_lines) == (23, 23, 23)
    assert Counter(each["custom_id"] for each in results(batch.output_file_id)) == Counter(
        f"id-{number}" for number in range(23)
    )


async def test_a_killed_process_costs_one_part_of_the_results(ingress: Receiver) -> None:
    small = replace(SOON, part_ranges=2, turn_s=0.0, lease_s=0.5)
    read: Counter[int] = Counter()

    def reading(store: FileStore, batch_id: str, number: int, fences: int) -> Iterator[Outcome]:
        read[number] += 1
        if number == 5 and read[number] == 1:
            raise StoreAway("killed")
        return range_outcomes(store, batch_id, number, fences)

    with mock.patch.object(finalizing, "range_outcomes", reading):
        batch = await done(jsonl(*(line(number) for number in range(27))), ingress, settings=small)
    assert (batch.state, batch.completed, batch.output_tokens, batch.merged) == ("completed", 27, 27, {})
    assert read == {0: 1, 1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 1}
    found = Counter(each["custom_id"] for each in results(batch.output_file_id))
    assert found == Counter(f"id-{number}" for number in range(27))
    assert list(file_store().names("batches")) == []


async def test_an_id_that_is_in_two_shards_fails_the_batch_with_its_line(ingress: Receiver) -> None:
    small = replace(SOON, shard_lines=5)
    content = jsonl(*(line(number) for number in range(12)), line(3), line(99))
    batch = await done(content, ingress, settings=small)
    assert (batch.state, [(error["code"], error["line"]) for error in batch.errors]) == (
        "failed",
        [("duplicate_custom_id", 13)],
    )
    assert (ingress.heard, list(file_store().names("batches"))) == ([], [])


async def test_more_errors_than_a_batch_lists_are_in_its_error_file(ingress: Receiver) -> None:
    small = replace(SOON, shard_lines=5, max_line_errors=3, max_error_lines=7)
    batch = await done(jsonl(*([b"{"] * 20)), ingress, settings=small)
    assert (batch.state, [error["line"] for error in batch.errors]) == ("failed", [1, 2, 3])
    found = [(each["custom_id"], each["error"]["line"]) for each in results(batch.error_file_id)]
    assert found == [(None, number) for number in range(1, 8)]


async def test_a_batch_that_nobody_can_validate_fails_after_a_few_attempts(
    ingress: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = mock.Mock(side_effect=[StoreAway("away"), DataError("no such number"), OverflowError, RuntimeError])
    monkeypatch.setattr("traffic.batches.services.validation.shard_index", reading)
    batch = await done(jsonl(line(1)), ingress, settings=replace(SOON, lease_s=0.2))
    assert (batch.state, [error["code"] for error in batch.errors]) == ("failed", ["validation_failed"])
    assert reading.call_count == 4


async def test_partial_results_of_a_cancelled_batch_are_there(ingress: Receiver) -> None:
    release, heard = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if len(ingress.heard) >= 2:
            loop.call_soon_threadsafe(heard.set)
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(60)
        answering_json()(handler)

    ingress.answer = answer

    def begin() -> Batch:
        serving_fleet(ingress.port)
        return begun(jsonl(*(line(number) for number in range(6))), now=timezone.now())

    batch = await sync_to_async(begin, thread_sensitive=True)()

    def cancel_once_begun() -> bool:
        if heard.is_set() and Batch.objects.get(id=batch.id).state == "in_progress":
            batch_end_early(batch=batch, now=timezone.now())
        return not has_open_batches()

    try:
        await worked_until(cancel_once_begun)
    finally:
        release.set()
    await sync_to_async(batch.refresh_from_db, thread_sensitive=True)()
    await sync_to_async(connections.close_all, thread_sensitive=True)()
    assert (batch.state, batch.completed + batch.failed) == ("cancelled", 6)
    assert batch.completed >= 1
    unsent = results(batch.error_file_id)
    assert {each["error"]["code"] for each in unsent} == {"batch_cancelled"}
    answered = results(batch.output_file_id)
    assert sorted(each["custom_id"] for each in [*answered, *unsent]) == [f"id-{number}" for number in range(6)]
