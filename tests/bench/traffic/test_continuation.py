"""The bench of streams that continue: a small run of each dialect, with real HAProxy, relays and `sim` cells."""

from pathlib import Path

import pytest
import uvloop

from bench.traffic import continuation

pytestmark = [pytest.mark.processes, pytest.mark.long]


def test_no_stream_is_cut_and_every_token_is_counted_once(tmp_path: Path) -> None:
    with continuation.fleet(tmp_path) as fleet:
        for name in continuation.DIALECTS:
            row = uvloop.run(continuation.measure(fleet, name, streams=12, at_once=12, every_s=2.5))
            assert (row["cut"], row["errors"]) == (0, {})
            assert row["texts_that_differ"] == row["events_that_differ"] == row["usages_that_differ"] == 0
            assert row["tokens_of_clients"] == row["tokens_counted"]
        drained = uvloop.run(continuation.drain(fleet, 5))
        assert (drained["cut"], drained["texts_that_differ"]) == (0, 0)
        assert drained["counts"]["continued:leaving"] > 0
