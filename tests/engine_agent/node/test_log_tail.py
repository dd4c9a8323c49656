"""A node shows its last lines while somebody reads them, and only then."""

from pathlib import Path

import pytest

from engine_agent.node import log_tail as module
from engine_agent.node.log_tail import AGAIN_AFTER_S, LONGEST_REQUEST_S, LogTailSender, log_tail
from engine_agent.protocol.codec import MAX_FRAME_BYTES, encode
from engine_agent.protocol.messages import Desired, LogRequest
from tests.engine_agent.orders import assignment


class Clock:
    now_s = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "monotonic", lambda: clock.now_s)
    monkeypatch.setattr(module, "time", lambda: clock.now_s)
    return clock


def wished(until: float | None) -> Desired:
    return Desired("n-1", 1, assignment(), LogRequest(until) if until is not None else None)


def test_nothing_is_said_without_a_wish(tmp_path: Path, clock: Clock) -> None:
    sender = LogTailSender(tmp_path)
    assert [sender.due(order) for order in (None, wished(None), wished(clock.now_s))] == [None] * 3


def test_new_lines_are_said_at_once_and_old_ones_now_and_then(tmp_path: Path, clock: Clock) -> None:
    sender, order = LogTailSender(tmp_path), wished(clock.now_s + 60)
    (tmp_path / "engine.log").write_text("one\n")
    first = sender.due(order)
    assert first is not None
    assert first.logs == {"engine": ("one",)}
    assert sender.due(order) is None
    (tmp_path / "engine.log").write_text("one\ntwo\n")
    assert sender.due(order) is not None
    clock.now_s += AGAIN_AFTER_S
    assert sender.due(order) is not None


def test_a_wish_for_ever_is_not_followed_for_ever(tmp_path: Path, clock: Clock) -> None:
    sender, order = LogTailSender(tmp_path), wished(10.0**12)
    assert sender.due(order) is not None
    clock.now_s += LONGEST_REQUEST_S + 1
    assert sender.due(order) is None
    assert sender.due(wished(10.0**12 + 1)) is not None, "a reader who is still there wishes again"


def test_lines_carry_no_secret_and_no_control_character(tmp_path: Path) -> None:
    order = assignment()
    (tmp_path / "proxy.log").write_text(f"hello \x1b[31m {order.secret}\n")
    (line,) = log_tail(tmp_path, order, 5).logs["proxy"]
    assert order.secret not in line
    assert "\x1b" not in line


def test_the_longest_tail_fits_into_a_frame(tmp_path: Path) -> None:
    for name in module.LOGS:
        (tmp_path / f"{name}.log").write_bytes(b'\xff"\\x\n' * 100_000)
    assert len(encode(log_tail(tmp_path, assignment(), 10**6))) < MAX_FRAME_BYTES / 2
