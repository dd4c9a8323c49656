"""Requests with bodies longer than the serving HAProxy's buffers go through a body parser, without any visible
difference."""

import asyncio
import csv
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from engine_agent.ingress.config import MAX_HEAD_BYTES
from engine_agent.ingress.settings import BODY_PARSERS
from engine_agent.ingress.supervisor import HaproxySupervisor
from engine_agent.node import procfs
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, pool, waits

pytestmark = pytest.mark.processes

KIB = 1024
LONGEST_SHORT, SHORTEST_READ = 32 * KIB, 32 * KIB + 1
MIDDLE, LONGEST_MIDDLE = 100 * KIB, 256 * KIB
LONG = 300 * KIB
LIMIT = 4 * KIB * KIB
MEDIUM_PARSER, LARGE_PARSER = (tier.name for tier in BODY_PARSERS)


@pytest_asyncio.fixture
async def ingress(tmp_path: Path) -> AsyncIterator[RunningIngress]:
    async with RunningIngress(tmp_path / "home", body_parsers=BODY_PARSERS).running() as running:
        yield running


def body_of(size: int, model: str = "demo", *, model_first: bool = False, stream: bool = False) -> bytes:
    """A request of exactly this size."""
    fields = [f'"stream": {json.dumps(stream)}, "messages": "%s"', f'"model": {json.dumps(model)}']
    text = "{" + ", ".join(reversed(fields) if model_first else fields) + "}"
    return text.replace("%s", "x" * (size - len(text) + 2)).encode()


async def in_pieces(body: bytes) -> AsyncIterator[bytes]:
    """A body of unknown length."""
    for start in range(0, len(body), 50_000):
        yield body[start : start + 50_000]


@pytest.mark.asyncio
async def test_a_long_body_reaches_a_cell_of_its_model_whole(ingress: RunningIngress) -> None:
    async with FakeCell().running() as one, FakeCell().running() as other:
        await ingress.route(pool(one), pool(other, name="other", models=("org/other",)))
        await ingress.sees(**{one.name: "up", other.name: "up"})
        sizes = (LONGEST_SHORT, SHORTEST_READ, MIDDLE, LONGEST_MIDDLE, LONGEST_MIDDLE + 1, KIB * KIB, LIMIT)
        for size in sizes:
            for cell, model in ((one, "demo"), (other, "org/other")):
                for model_first in (False, True):
                    body = body_of(size, model, model_first=model_first)
                    answer = await ingress.post(body)
                    assert (answer.status_code, answer.headers["x-switchyard-cell"]) == (200, cell.name)
                    assert cell.requests[-1].body == body
        assert len(one.requests) == len(other.requests) == 2 * len(sizes)


async def went_through(ingress: RunningIngress) -> dict[str, int]:
    """How many requests each body parser has received."""
    said = await ingress.ingress.serving.process.admin.send("show stat -1 2 -1")
    rows = csv.DictReader(said.lstrip("# ").splitlines())
    return {row["pxname"]: int(row["stot"]) for row in rows if row["pxname"] in (MEDIUM_PARSER, LARGE_PARSER)}


@pytest.mark.asyncio
async def test_a_body_takes_the_body_parser_with_the_shortest_buffers_that_hold_it(ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        taken = {}
        for size in (LONGEST_SHORT, SHORTEST_READ, LONGEST_MIDDLE, LONGEST_MIDDLE + 1):
            for kind, sent in (("said", body_of(size)), ("unsaid", in_pieces(body_of(size)))):
                before = await went_through(ingress)
                answer = await ingress.http.post("/v1/chat/completions", content=sent)
                assert answer.status_code == 200
                after = await went_through(ingress)
                taken[size, kind] = [name for name in after if after[name] > before[name]]
        assert taken == {
            (LONGEST_SHORT, "said"): [],
            (LONGEST_SHORT, "unsaid"): [],
            (SHORTEST_READ, "said"): [MEDIUM_PARSER],
            (SHORTEST_READ, "unsaid"): [LARGE_PARSER],
            (LONGEST_MIDDLE, "said"): [MEDIUM_PARSER],
            (LONGEST_MIDDLE, "unsaid"): [LARGE_PARSER],
            (LONGEST_MIDDLE + 1, "said"): [LARGE_PARSER],
            (LONGEST_MIDDLE + 1, "unsaid"): [LARGE_PARSER],
        }


@pytest.mark.asyncio
async def test_a_length_that_is_said_beside_chunks_counts_for_nothing(ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        body = body_of(LONG)
        for said in (5, SHORTEST_READ, LIMIT + 1):
            head = f"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: {said}\r\nConnection: close\r\n"
            chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
            incoming, outgoing = await asyncio.open_connection("127.0.0.1", ingress.settings.port)
            outgoing.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk)
            assert (await asyncio.wait_for(incoming.read(), 60)).startswith(b"HTTP/1.1 200 ")
            outgoing.close()
            assert cell.requests[-1].body == body


@pytest.mark.asyncio
async def test_a_long_body_of_unknown_length_is_served_too_and_answers_stream(ingress: RunningIngress) -> None:
    async with FakeCell(chunks=3).running() as cell:
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        for size in (100, MIDDLE, LONG, LIMIT):
            body = body_of(size, stream=True)
            answer = await ingress.http.post("/v1/chat/completions", content=in_pieces(body))
            assert answer.text.count('"content": ') == 3
            assert answer.text.endswith("data: [DONE]\n\n")
            assert cell.requests[-1].body == body


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [MIDDLE, LONG])
async def test_what_is_wrong_with_a_long_body_is_said_as_of_a_short_one(ingress: RunningIngress, size: int) -> None:
    good = body_of(size, "nobody")
    cases = [
        (good, 404, "model_not_found"),
        (good.replace(b'"model"', b'"mode1"')[:-1], 400, "invalid_json"),
        (good.replace(b'"model"', b'"mode1"') + b"x", 400, "invalid_json"),
        (good.replace(b'"nobody"', b"5"), 400, "invalid_type"),
        (good.replace(b'"model"', b'"mode1"'), 400, "missing_required_parameter"),
        (body_of(LIMIT + 1), 413, "request_too_large"),
    ]
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell))
        for body, status, code in cases:
            for sent in (body, in_pieces(body)):
                answer = await ingress.http.post("/v1/chat/completions", content=sent)
                assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), body[-80:]
        await ingress.sees(**{cell.name: "up"})
        escaped = body_of(size).replace(b'"demo"', b'"d\\u0065mo"')
        assert (await ingress.post(escaped)).status_code == 200
        assert len(cell.requests) == 1


@pytest.mark.asyncio
async def test_without_a_ready_cell_a_long_request_is_told_so(ingress: RunningIngress) -> None:
    await ingress.route(pool(), retry_after_s=7)
    for size in (MIDDLE, LONG):
        answer = await ingress.post(body_of(size))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_ready_cell")
        assert waits(answer.headers)


@pytest.mark.asyncio
async def test_a_head_that_would_leave_no_room_for_the_body_is_refused(ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        for size in (LONGEST_SHORT, LONGEST_MIDDLE, LIMIT):
            fits = {f"x-{number}": "y" * 1000 for number in range(MAX_HEAD_BYTES // 1000 - 2)}
            assert (await ingress.post(body_of(size), **fits)).status_code == 200
            answer = await ingress.post(body_of(size), **fits, more="y" * 3000)
            assert (answer.status_code, answer.json()["error"]["code"]) == (431, "request_head_too_large")


@pytest.mark.asyncio
async def test_a_request_whose_cell_gives_no_byte_is_sent_again_elsewhere(ingress: RunningIngress) -> None:
    for size in (100, MIDDLE, LONG, LIMIT):
        async with FakeCell().running() as dies, FakeCell().running() as refuses, FakeCell().running() as lives:
            dies.release.clear()
            await ingress.route(pool(dies))
            await ingress.sees(**{dies.name: "up"})
            body = body_of(size)
            sent = asyncio.create_task(ingress.post(body))
            await eventually(lambda dies=dies: dies.in_flight == 1)  # type: ignore[misc]
            await ingress.route(pool(dies, lives))
            await ingress.sees(**{lives.name: "up"})
            await dies.die()
            answer = await sent
            assert (answer.status_code, answer.headers["x-switchyard-cell"]) == (200, lives.name)
            assert lives.requests[-1].body == body
            refuses.refuses = True
            await ingress.route(pool(refuses, lives))
            await ingress.sees(**{refuses.name: "up", lives.name: "up"})
            answers = [await ingress.post(body) for _ in range(6)]
            assert {answer.status_code for answer in answers} == {200}
            assert refuses.requests


@pytest.mark.asyncio
async def test_a_request_whose_only_cell_dies_ends_with_a_clear_error(ingress: RunningIngress) -> None:
    for size in (100, MIDDLE, LONG):
        async with FakeCell().running() as cell:
            await ingress.route(pool(cell))
            await ingress.sees(**{cell.name: "up"})
            cell.release.clear()
            sent = asyncio.create_task(ingress.post(body_of(size)))
            await eventually(lambda cell=cell: cell.in_flight == 1)  # type: ignore[misc]
            await cell.die()
            answer = await sent
            assert answer.status_code in (502, 503)
            assert answer.json()["error"]["type"] == "server_error"


@pytest.mark.asyncio
async def test_the_internal_header_cannot_be_forged(ingress: RunningIngress) -> None:
    async with FakeCell().running() as one, FakeCell().running() as other:
        await ingress.route(pool(one), pool(other, name="other", models=("other",)))
        await ingress.sees(**{one.name: "up", other.name: "up"})
        forged = ("X-Switchyard-Model", "other")
        for size in (100, MIDDLE, LONG):
            for headers in ([forged], [forged, forged], [forged, ("Connection", "x-switchyard-model")]):
                answer = await ingress.http.post("/v1/chat/completions", content=body_of(size), headers=headers)
                assert answer.headers["x-switchyard-cell"] == one.name
                assert one.requests[-1].headers["x-switchyard-model"] == "demo", "what was read in the body"
            unknown = await ingress.post(body_of(size, "nobody"), **{"X-Switchyard-Model": "demo"})
            assert unknown.status_code == 404
        assert not other.requests
        socket = ingress.settings.state_dir / "parsed.sock"
        assert socket.stat().st_mode & 0o077 == 0, "only this user reaches it"


def body_parsers_of(ingress: RunningIngress) -> tuple[HaproxySupervisor, HaproxySupervisor]:
    middle, longest = ingress.ingress.body_parsers
    return middle, longest


def pid_of(haproxy: HaproxySupervisor) -> int:
    assert haproxy.process.pid is not None
    return haproxy.process.pid


async def until_read(ingress: RunningIngress, size: int) -> None:
    """Waits until bodies of this size are served. Meanwhile they get an error, and short ones are served."""
    async with asyncio.timeout(60):
        while (answer := await ingress.post(body_of(size))).status_code != 200:
            # The first one can have reached the parser, and is lost with it.
            assert answer.json()["error"]["code"] in {"long_bodies_unread", "long_body_lost"}
            assert (await ingress.post(body_of(100))).status_code == 200


@pytest.mark.asyncio
async def test_a_killed_body_parser_is_back_soon_and_other_requests_never_notice(ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        middle, longest = body_parsers_of(ingress)
        kept, killed = pid_of(middle), pid_of(longest)
        os.killpg(killed, signal.SIGKILL)
        assert (await ingress.post(body_of(MIDDLE))).status_code == 200
        await until_read(ingress, LONG)
        assert pid_of(longest) != killed
        assert pid_of(middle) == kept


@pytest.mark.asyncio
async def test_while_a_body_parser_of_shorter_bodies_is_away_the_next_one_reads_them(ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        middle, _ = body_parsers_of(ingress)
        killed = pid_of(middle)
        await ingress.die()
        os.killpg(killed, signal.SIGKILL)
        await until_read(ingress, MIDDLE)
        assert (await went_through(ingress))[LARGE_PARSER] >= 1
        assert (await ingress.post(body_of(LONG))).status_code == 200


@pytest.mark.asyncio
async def test_while_there_is_no_body_parser_long_requests_are_told_to_try_again(tmp_path: Path) -> None:
    ingress = RunningIngress(tmp_path / "home", body_parsers=BODY_PARSERS)
    async with FakeCell().running() as cell, ingress.running():
        await ingress.route(pool(cell), retry_after_s=7)
        await ingress.sees(**{cell.name: "up"})
        cell.release.clear()
        lost = asyncio.create_task(ingress.post(body_of(LONG)))
        await eventually(lambda: cell.in_flight == 1)
        await ingress.die()
        parsers = body_parsers_of(ingress)
        workers = [parser.running.worker_pid for parser in parsers if parser.running]
        for parser in parsers:
            os.killpg(pid_of(parser), signal.SIGKILL)
        # A dying worker loses the connections that it has not accepted. Only after its exit are connections refused.
        assert len(workers) == 2
        await eventually(lambda: not any(map(procfs.stat, workers)))
        assert (await lost).json()["error"]["code"] == "long_body_lost"
        cell.release.set()
        # The first request to a dead body parser is refused after its whole body was read, as are later ones.
        for size in (LIMIT, LONG, MIDDLE):
            answer = await ingress.post(body_of(size))
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "long_bodies_unread")
            assert waits(answer.headers)
        assert (await ingress.post(body_of(100))).status_code == 200
        later = RunningIngress(tmp_path / "home", body_parsers=BODY_PARSERS)
        later.use(ingress.settings)
        async with later.running():
            await eventually(lambda: all(parser.process.pid for parser in later.ingress.body_parsers))
            assert later.haproxy.pid == ingress.haproxy.pid
            for size in (MIDDLE, LONG):
                await until_read(ingress, size)


@pytest.mark.asyncio
@pytest.mark.parametrize(("size", "places"), [(MIDDLE, 6), (LONG, 3)])
async def test_long_requests_that_wait_leave_room_for_others(tmp_path: Path, size: int, places: int) -> None:
    ingress = RunningIngress(tmp_path / "home", body_parsers=BODY_PARSERS)
    times = replace(ingress.settings.times, body_parser_wait_s=1)
    ingress.use(replace(ingress.settings, max_connections=24, times=times))
    async with FakeCell().running() as cell, ingress.running():
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        cell.release.clear()
        served = [asyncio.create_task(ingress.post(body_of(size))) for _ in range(places)]
        await eventually(lambda: cell.in_flight == places)
        answer = await ingress.post(body_of(size))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "long_bodies_unread")
        cell.release.set()
        for other in {100, MIDDLE, LONG} - {size}:
            assert (await ingress.post(body_of(other))).status_code == 200
        assert {answer.status_code for answer in await asyncio.gather(*served)} == {200}
