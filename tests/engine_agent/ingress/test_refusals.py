"""Every request that ends with 5xx counts once: as an error of its cell, or at the ingress that its client asked."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest

from engine_agent.ingress.refusals import MOST_ACCOUNTS, LogLine, RefusalCounting, is_refused
from engine_agent.ingress.settings import QUEUES
from engine_agent.node.telemetry.exposition import agent_exposition
from engine_agent.protocol.ingress_messages import Refusals
from engine_agent.protocol.states import ServingClass
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import AWAY, RunningIngress, pool
from tests.engine_agent.ingress.keyed import keyed

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
    """Its requests wait for a second, one for each cell, and so long for an answer."""
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
        # Which of them waits, and for how long, is chance on a busy machine.
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
        await ingress.post(b"{")  # another line, so that those before it were read
        await counts(ingress, **codes)


@pytest.mark.processes
@pytest.mark.asyncio
async def test_a_fault_of_the_client_is_no_error_of_the_deployment(ingress: RunningIngress) -> None:
    await ingress.route(pool(), keys=(KEY.entry,))
    wrong = {"Authorization": f"Bearer sw_ffffffff_{'0' * 48}"}
    assert (await ingress.post(BODY, **wrong)).status_code == 401
    assert (await ingress.post(b'{"model": "other"}')).status_code == 404
    assert (await ingress.post(b"{")).status_code == 400
    assert (await ingress.post(BODY, **{"X-Switchyard-Class": "batch"})).status_code == 503
    assert (await ingress.post(BODY)).status_code == 503
    await counts(ingress, no_ready_cell=1)


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
        while answers[0].status_code == 503:  # until it has seen that the other region serves
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
