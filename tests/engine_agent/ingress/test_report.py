"""Reports of the use of keys."""

import pytest

from engine_agent.ingress.report import KEY_COUNTS_INTERVAL_S, KEYS_PER_REPORT, TURN_S, KeyCounting, read_key_counts
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, pool
from tests.engine_agent.ingress.keyed import keyed
from tests.engine_agent.ingress.traffic import BODY

pytestmark = pytest.mark.processes

TABLE = """# table: keys, type: string, size:131072, used:1
0x2ca09410: key=0a1b2c3d use=0 exp=599318 shard=0 conn_cur=0 http_req_cnt=7 gpc0=2 gpc1=1
"""


def test_the_table_of_a_worker_is_read() -> None:
    assert read_key_counts(TABLE) == {"0a1b2c3d": (7, 2, 1)}


def test_counts_are_due_again_after_a_while_and_at_once_of_another_worker() -> None:
    counts = KeyCounting()
    counts.update("7@1", {}, now_s=100.0)
    assert not counts.is_due("7@1", 100.0 + KEY_COUNTS_INTERVAL_S / 2)
    assert counts.is_due("7@1", 100.0 + KEY_COUNTS_INTERVAL_S)
    assert counts.is_due("8@1", 100.0)


def test_without_use_nothing_is_said() -> None:
    assert KeyCounting().report(1.0) is None


def test_many_keys_take_turns_until_each_was_told() -> None:
    counts = KeyCounting()
    everything = {f"{number:08x}": (1, 0, 0) for number in range(2 * KEYS_PER_REPORT + 10)}
    counts.update("7@1", everything, now_s=0.0)
    turns = [turn for number in range(4) if (turn := counts.report(number * TURN_S))]
    assert len(turns) == 4
    assert counts.report(3.5 * TURN_S) == turns[3]
    assert {turn.since for turn in turns} == {"7@1"}
    assert max(len(turn.totals) for turn in turns) == KEYS_PER_REPORT
    assert {prefix for turn in turns[:3] for prefix in turn.totals} == set(everything)


@pytest.mark.asyncio
async def test_a_real_ingress_reports_requests_refusals_and_errors_of_each_key(ingress: RunningIngress) -> None:
    limited, failing = keyed("0a0a0a0a", requests_per_min=2), keyed("0b0b0b0b")
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell), keys=(limited.entry, failing.entry))
        await ingress.sees(**{cell.name: "up"})
        for _ in range(3):
            await ingress.post(BODY, **limited.headers)
        cell.refuses = True
        assert (await ingress.post(BODY, **failing.headers)).status_code == 503
        wanted = {"0a0a0a0a": (3, 1, 0), "0b0b0b0b": (1, 0, 1)}
        await eventually(lambda: (keys := ingress.reports[-1].telemetry.keys) and keys.totals == wanted)
