"""The bench of streams that continue: a small run of each dialect, with real HAProxy, relays and `sim` cells."""

from pathlib import Path

import pytest
import uvloop

from bench.traffic import continuation, killable_cells
from bench.traffic.stream_reader import DIALECTS
from engine_agent.cell_proxy.departures import AT_ONCE

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.timeout(1200)]


def test_no_stream_is_cut_and_every_token_is_counted_once(tmp_path: Path) -> None:
    with killable_cells.fleet(tmp_path, killable_cells.sim()) as fleet:
        for name in DIALECTS:
            row = uvloop.run(continuation.measure(fleet, name, streams=12, at_once=12, every_s=2.5))
            assert (row["cut"], row["errors"]) == (0, {})
            assert row["texts_that_differ"] == row["events_that_differ"] == row["usages_that_differ"] == 0
            assert row["tokens_of_clients"] == row["tokens_counted"]
        drained = uvloop.run(continuation.drain(fleet, 40, tokens=400, after_s=1.0))
        assert drained["streams_of_the_cell"] > AT_ONCE
        assert (drained["cut"], drained["errors"]) == (0, {})
        assert drained["texts_that_differ"] == drained["events_that_differ"] == drained["usages_that_differ"] == 0
        assert drained["counts"]["continued:leaving"] > AT_ONCE
