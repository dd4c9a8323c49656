"""Every request has one line of JSON in a rotated file, and HAProxy never waits for it. Failed requests count once, at
their cell or at the ingress that the client connected to."""

import asyncio
import contextlib
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from engine_agent.ingress import request_samples
from engine_agent.ingress.access_log import (
    LOG_FILE,
    MOST_ACCOUNTS,
    LogLine,
    LogPipe,
    RefusalCounting,
    is_refused,
    open_pipe,
)
from engine_agent.ingress.settings import QUEUES
from engine_agent.node.telemetry.exposition import agent_exposition
from engine_agent.protocol.ingress_messages import Refusals, RefusedAccount
from engine_agent.protocol.states import ServingClass
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import AWAY, HOME, RunningIngress, pool, read_stream
from tests.engine_agent.ingress.keyed import keyed

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def lines(ingress: RunningIngress) -> list[dict[str, Any]]:
    path = ingress.settings.state_dir / LOG_FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def logged(ingress: RunningIngress, count: int) -> list[dict[str, Any]]:
    await eventually(lambda: len(lines(ingress)) >= count, what=f"{count} lines")
    return lines(ingress)


@pytest.mark.asyncio
@pytest.mark.processes
async def test_a_line_says_who_asked_what_and_how_it_went(ingress: RunningIngress) -> None:
    async with FakeCell("a").running() as cell, ingress.client() as client:
        await ingress.route(pool(cell, serving_class="near_realtime"))
        await ingress.sees(a="up")
        answer = await ingress.post(b'{"model": "demo"}', **{"X-Request-Id": "mine-1", "traceparent": TRACE})
        assert answer.headers["x-request-id"] == "mine-1"
        assert cell.requests[0].headers["traceparent"] == TRACE
        assert cell.requests[0].headers["x-switchyard-class"] == "near_realtime"
        await read_stream(client)
        first, second = await logged(ingress, 2)
    assert first | {
        "request_id": "mine-1", "traceparent": TRACE, "method": "POST", "path": "/v1/chat/completions", "model": "demo",
        "pool": "pool.demo", "deployment": "demo", "cell": "a", "region": HOME, "server": "a-g1", "status": 200,
        "class": "near_realtime", "hop": "-", "tenant": "-", "retries": 0, "ended": "--", "prompt_tokens": -1,
    } == first  # fmt: skip
    assert first["response_bytes"] > 0
    assert min(first["queue_ms"], first["ttft_ms"], first["total_ms"]) >= 0
    assert len(second["request_id"]) == 36, "who brings no id gets one"


@pytest.mark.asyncio
@pytest.mark.processes
async def test_what_failed_has_a_line_too_and_nothing_from_outside_breaks_it(ingress: RunningIngress) -> None:
    async with FakeCell("a").running() as cell:
        await ingress.route(pool(cell))
        await ingress.sees(a="up")
        nasty = '"quote\\ \x01 ü€' + "x" * 150
        unknown = await ingress.post(
            json.dumps({"model": nasty}).encode(), **{"X-Request-Id": 'a" b', "traceparent": '"'}
        )
        assert len(unknown.headers["x-request-id"]) == 36
        await ingress.http.get('/v1/"%22', headers={"x-switchyard-tenant": "outsider"})
        long = await ingress.post(b'{"model": "demo", "prompt": "%s"}' % (b"x" * 300_000))
        assert long.headers["x-request-id"] == cell.requests[-1].headers["x-request-id"]
        await ingress.http.get("/healthz")
        forged = [("X-Request-Id", "fit"), ("X-Request-Id", '","tenant":"forged')]
        twice = await ingress.http.get("/v1/twice", headers=forged)
        assert len(twice.headers["x-request-id"]) == 36
        reader, writer = await asyncio.open_connection("127.0.0.1", ingress.settings.port)
        writer.write(b"no http\r\n\r\n")
        await reader.read()
        writer.close()
        seen = await logged(ingress, 5)
    statuses = [(line["status"], line["cell"]) for line in seen]
    assert statuses == [(404, "-"), (404, "-"), (200, "a"), (404, "-"), (400, "-")]
    assert [line["tenant"] for line in seen] == ["-"] * 5
    assert seen[0]["model"].startswith('"quote\\ ')
    assert seen[1]["tenant"] == "-"
    assert (seen[2]["model"], seen[2]["deployment"]) == ("demo", "demo")


@pytest.mark.asyncio
@pytest.mark.processes
async def test_what_is_written_while_there_is_no_agent_is_found_by_the_next(tmp_path: Path) -> None:
    async with FakeCell().running() as cell:
        earlier = RunningIngress(tmp_path / "home")
        async with earlier.running():
            await earlier.route(pool(cell))
            await earlier.sees(**{cell.name: "up"})
            await earlier.post(b'{"model": "demo"}', **{"X-Request-Id": "before"})
            await logged(earlier, 1)
            await earlier.die()
            await earlier.post(b'{"model": "demo"}', **{"X-Request-Id": "meanwhile"})
            later = RunningIngress(tmp_path / "home")
            later.use(earlier.settings)
            async with later.running():
                assert [line["request_id"] for line in await logged(later, 2)] == ["before", "meanwhile"]


@pytest.mark.asyncio
@pytest.mark.processes
async def test_nobody_reading_does_not_make_haproxy_wait(tmp_path: Path) -> None:
    async with FakeCell().running() as cell:
        ingress = RunningIngress(tmp_path / "home")
        async with ingress.running():
            await ingress.route(pool(cell))
            await ingress.sees(**{cell.name: "up"})
            await ingress.die()
            pipe = open_pipe(ingress.settings.state_dir)
            try:
                while True:
                    os.write(pipe, b"x" * 4096)
            except BlockingIOError:
                pass  # full
            finally:
                os.close(pipe)
            assert (await ingress.post(b'{"model": "demo"}')).status_code == 200


@pytest.mark.asyncio
@pytest.mark.processes
async def test_files_are_rotated_by_size_and_the_oldest_go(tmp_path: Path) -> None:
    def newest() -> str:
        older = tmp_path / f"{LOG_FILE}.1"
        return older.read_text() if older.exists() else ""

    carrier = LogPipe(tmp_path, max_file_bytes=10)
    pipe = open_pipe(tmp_path)
    task = asyncio.create_task(carrier.carry())
    try:
        for number in range(7):
            os.write(pipe, b'{"number":%d}\n' % number)
            await eventually(lambda number=number: f":{number}" in newest())  # type: ignore[misc]
    finally:
        task.cancel()
        os.close(pipe)
        await asyncio.gather(task, return_exceptions=True)
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith(LOG_FILE)) == [
        f"{LOG_FILE}.{number}" for number in range(1, 5)
    ]


BODY = b'{"model": "demo"}'
LINE = LogLine(503, "-", "pool.demo", "-", "-", "realtime", "-", "no_ready_cell", -1, -1, "LR")
KEY = keyed()


def counted(ingress: RunningIngress) -> dict[str, dict[str, int]]:
    refusals = ingress.reports[-1].telemetry.refusals
    return refusals.codes if refusals else {}


async def counts(ingress: RunningIngress, **codes: int) -> None:
    await eventually(lambda: counted(ingress).get("demo") == codes, what=f"{codes} in {counted(ingress)}")


@contextlib.asynccontextmanager
async def hasty(folder: Path) -> AsyncIterator[RunningIngress]:
    """Its requests wait for a second, one per cell, and for an answer as long."""
    ingress = RunningIngress(folder / "home")
    queue = replace(QUEUES[ServingClass.REALTIME], wait_s=1, waiting_per_cell=1)
    times = replace(ingress.settings.times, silence_s=1)
    ingress.use(replace(ingress.settings, queues={**QUEUES, ServingClass.REALTIME: queue}, times=times))
    async with ingress.running() as running:
        yield running


@pytest.mark.processes
@pytest.mark.asyncio
async def test_every_5xx_that_clients_saw_is_counted_once_by_its_code(tmp_path: Path) -> None:
    async with hasty(tmp_path) as ingress, FakeCell(max_connections=1).running() as cell:
        await ingress.route(pool(), keys=(KEY.entry,))
        seen: Counter[str] = Counter()

        def saw(answer: httpx.Response) -> str:
            assert answer.status_code >= 500
            seen[answer.headers["x-switchyard-error"]] += 1
            return answer.headers["x-switchyard-error"]

        assert saw(await ingress.post(BODY)) == "no_ready_cell"
        assert saw(await ingress.post(BODY, **KEY.headers)) == "no_ready_cell"
        assert saw(await ingress.post(b'{"model": "demo", "prompt": "%s"}' % (b"x" * 300_000))) == "no_ready_cell"
        await ingress.route(pool(cell), keys=(KEY.entry,))
        await ingress.sees(**{cell.name: "up"})
        cell.release.clear()
        answers = await asyncio.gather(*(ingress.post(BODY) for _ in range(5)))
        # On a busy machine it is chance which of them waits, and for how long.
        codes = {saw(answer) for answer in answers}
        assert "cell_silent" in codes
        assert codes <= {"cell_silent", "no_free_cell", "queue_full"}
        cell.release.set()
        await counts(ingress, **seen)
        refusals = ingress.reports[-1].telemetry.refusals
        assert refusals is not None
        by_key = {(each.key, each.serving_class): each.total for each in refusals.accounts}
        assert by_key["0a1b2c3d", ""] == 1
        assert sum(by_key.values()) == seen.total()
        metrics = agent_exposition("i-1", True, ingress.reports[-1])
        for code, count in seen.items():
            labels = f'agent="i-1",code="{code}",deployment="demo"'
            other = f'agent="i-1",deployment="demo",code="{code}"'
            assert any(f"switchyard_ingress_refused_total{{{each}}} {count}\n" in metrics for each in (labels, other))


@pytest.mark.processes
@pytest.mark.asyncio
async def test_what_a_cell_failed_is_its_own_and_what_it_handed_back_is_counted_if_nothing_better_came(
    ingress: RunningIngress,
) -> None:
    async with FakeCell("a").running() as good, FakeCell("b").running() as bad:
        await ingress.route(pool(bad))
        await ingress.sees(b="up")
        bad.fails = True
        assert (await ingress.post(BODY)).status_code == 500
        bad.fails, bad.refuses = False, True
        answer = await ingress.post(BODY)
        assert answer.status_code == 503
        codes = {answer.headers.get("x-switchyard-error", "status_503"): 1}
        await counts(ingress, **codes)
        await ingress.route(pool(good, bad))
        await ingress.sees(a="up", b="up")
        for _ in range(4):
            assert (await ingress.post(BODY)).status_code == 200
        await ingress.post(b"{")  # another line: the lines before it have been read then
        await counts(ingress, **codes)


@pytest.mark.processes
@pytest.mark.asyncio
async def test_faults_of_clients_are_sampled_and_no_errors_of_the_deployment(
    ingress: RunningIngress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_samples, "WINDOW_S", 0.1)
    expired = keyed("11111111", tenant="ads", expires_at=1.0)
    await ingress.route(pool(), keys=(KEY.entry, expired.entry))
    wrong = {"Authorization": f"Bearer sw_ffffffffffffff_{'0' * 48}"}
    assert (await ingress.post(BODY, **wrong)).status_code == 401
    assert (await ingress.post(b'{"model": "other"}')).status_code == 404
    assert (await ingress.post(b"{")).status_code == 400
    assert (await ingress.post(BODY, **{"X-Switchyard-Class": "batch"})).status_code == 503
    assert (await ingress.post(BODY)).status_code == 503
    assert (await ingress.post(BODY, **KEY.headers)).status_code == 503
    assert (await ingress.post(BODY, **expired.headers)).status_code == 401
    nested = b'{"model": "demo", "x": ' + b"[" * 900 + b"]" * 900 + b"}"
    assert (await ingress.post(nested, **KEY.headers)).status_code == 400
    await counts(ingress, no_ready_cell=2)

    def sampled() -> set[tuple[int, str, str, str]]:
        rows = [row for window in ingress.windows for row in window.samples]
        assert {row.path for row in rows} == {"/v1/chat/completions"}
        return {(row.status, row.reason, row.key, row.deployment) for row in rows}

    await eventually(
        lambda: (
            sampled()
            == {
                (401, "invalid_api_key", "", ""),
                (404, "model_not_found", "", ""),
                (400, "invalid_json", "", ""),
                (503, "no_ready_cell", "", "demo"),
                (503, "no_ready_cell", KEY.entry.prefix, "demo"),
                (401, "expired_api_key", "11111111", ""),
                (400, "invalid_json", KEY.entry.prefix, "demo"),
            }
        )
    )


@pytest.mark.processes
@pytest.mark.asyncio
async def test_only_the_ingress_that_the_client_asked_counts(tmp_path: Path) -> None:
    here, there = RunningIngress(tmp_path / "here"), RunningIngress(tmp_path / "there", AWAY)
    async with here.running(), there.running(), FakeCell("c").running() as cell:
        await there.route(pool(cell))
        await there.sees(c="up")
        await here.route(pool(spill=[there]))
        answers = []
        for refuses in (False, True):
            cell.refuses = refuses
            await eventually(lambda: here.reports[-1].observed.revision)
            answers.append(await here.post(BODY))
        while answers[0].status_code == 503:  # until the other region is seen to serve
            answers.append(answers.pop(0))
            cell.refuses = False
            answers.insert(0, await here.post(BODY))
        failed = sum(answer.status_code >= 500 for answer in answers)
        await eventually(lambda: sum(counted(here).get("demo", {}).values()) == failed, what=f"{failed} failed")
        assert failed
        assert counted(there) == {}


@pytest.mark.processes
@pytest.mark.asyncio
async def test_a_new_agent_goes_on_with_the_count(tmp_path: Path) -> None:
    earlier = RunningIngress(tmp_path / "home")
    async with earlier.running():
        await earlier.route(pool())
        await earlier.post(BODY)
        await counts(earlier, no_ready_cell=1)
        await earlier.die()
        await earlier.post(BODY)
        later = RunningIngress(tmp_path / "home")
        later.use(earlier.settings)
        async with later.running():
            await counts(later, no_ready_cell=2)
            before, after = (each.reports[-1].telemetry.refusals for each in (earlier, later))
            assert before
            assert after
            assert before.since == after.since


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"hop": "east"}, "another region's, which counts it"),
        ({"cell": "a"}, "the cell's error"),
        ({"ended": "CQ"}, "the client left before its answer"),
        ({"is_sender": 1}, "the control plane sends it again"),
        ({"serving_class": "batch"}, "sent again until its window is over"),
        ({"error": "deadline_unreachable"}, "its own deadline"),
        ({"status": 429}, "no failure"),
        ({"status": 501}, "a method that does not exist"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_which_lines_do_not_count(change: dict[str, str | int], why: str) -> None:
    assert is_refused(LINE)
    assert not is_refused(replace_line(change)), why


def replace_line(change: dict[str, str | int]) -> LogLine:
    return msgspec.structs.replace(LINE, **change)


def test_memory_and_reports_are_bounded_whatever_keys_come(tmp_path: Path) -> None:
    counting = RefusalCounting(tmp_path)
    lines = [msgspec.structs.replace(LINE, key=f"{number:08x}") for number in range(MOST_ACCOUNTS + 500)]
    counting.note(b"\n".join(msgspec.json.encode(line) for line in lines) + b"\n")
    seen: dict[str, int] = {}
    for turn in range(20):
        report = RefusalCounting(tmp_path).report(0.0) if turn == 0 else counting.report(turn * 15.0)
        assert isinstance(report, Refusals)
        assert len(report.accounts) <= 200
        seen |= {each.key: each.total for each in report.accounts}
    assert sum(seen.values()) == len(lines)
    last = counting.report(300.0)
    assert last is not None
    assert last.codes == {"demo": {"no_ready_cell": len(lines)}}


def test_cut_streams_count_once_and_survive_relays_and_agents(tmp_path: Path) -> None:
    def cut(count: int, key: str = "0a1b") -> RefusedAccount:
        return RefusedAccount("demo", 0, key, "realtime", count)

    counting = RefusalCounting(tmp_path)
    counting.note_cut("first", ())
    assert counting.report(0.0) is None
    counting.note_cut("first", [cut(2)])
    counting.note_cut("first", [cut(2)])
    counting.note_cut("second", [cut(1), cut(4, "")])
    again = RefusalCounting(tmp_path)
    again.note_cut("first", [cut(3)])
    report = again.report(0.0)
    assert report is not None
    assert report.codes == {"demo": {"stream_cut": 8}}
    assert report.accounts == (cut(4, ""), cut(4))
