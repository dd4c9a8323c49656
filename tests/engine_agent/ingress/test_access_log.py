"""Every request leaves one line of JSON, written into a file that stays short, and none of it makes HAProxy wait."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from engine_agent.ingress.log_pipe import LOG_FILE, LogPipe, open_pipe
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import HOME, RunningIngress, pool, read_stream

pytestmark = pytest.mark.processes

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def lines(ingress: RunningIngress) -> list[dict[str, Any]]:
    path = ingress.settings.state_dir / LOG_FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def logged(ingress: RunningIngress, count: int) -> list[dict[str, Any]]:
    await eventually(lambda: len(lines(ingress)) >= count, what=f"{count} lines")
    return lines(ingress)


@pytest.mark.asyncio
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
