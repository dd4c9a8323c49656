"""Both ends of the wire: what one sends, the other counts."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.traffic.proxies import wire_ask, wire_build, wire_cells

pytestmark = pytest.mark.processes

PORT = 27900
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "why?"}], "max_tokens": 5}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    built = wire_build(tmp_path_factory.mktemp("wire"))
    with wire_cells(built, PORT, 1):
        _wait_for(PORT)
        yield built


def test_a_closed_loop_counts_what_it_was_answered(program: Path) -> None:
    seen = wire_ask(program, "closed", PORT, 2, 0.1, ASK)

    assert seen.requests > 0
    assert (seen.errors, seen.events, seen.complaint) == (0, 0, "")


def test_streams_at_a_rate_are_counted_with_their_events_and_first_tokens(program: Path) -> None:
    seen = wire_ask(program, "rate", PORT, 100, 0.2, {**ASK, "stream": True, "seed": 1000})

    assert seen.requests == len(seen.first_us) > 0
    assert (seen.errors, seen.events) == (0, 5 * seen.requests)


def test_nobody_there_is_an_error_and_not_a_result(program: Path) -> None:
    seen = wire_ask(program, "rate", PORT + 50, 50, 0.1, ASK)

    assert seen.requests == 0
    assert seen.errors > 0
    assert "no connection" in seen.complaint


def _wait_for(port: int) -> None:
    ends_at = time.monotonic() + 10
    while time.monotonic() < ends_at:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            continue
        return
    raise AssertionError(f"nothing listens on {port}")
