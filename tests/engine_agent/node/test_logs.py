"""Log files stay short, and their last lines reach operators without secrets."""

from pathlib import Path

import pytest

from engine_agent.node import logs
from engine_agent.node.logs import (
    AGAIN_AFTER_S,
    LONGEST_REQUEST_S,
    MAX_LINE_CHARS,
    REDACTED,
    TAIL_BYTES,
    LogTailSender,
    bound,
    last_lines,
    log_tail,
    redacted,
    set_aside,
)
from engine_agent.protocol.codec import MAX_FRAME_BYTES, encode
from engine_agent.protocol.messages import Desired, LogRequest
from tests.engine_agent.orders import assignment


def test_the_last_lines_that_say_something(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("one\n\n  two \nthree\n\n")
    assert last_lines(log, 2) == ["two", "three"]
    assert last_lines(tmp_path / "none.log") == []


def test_long_lines_and_broken_text_are_cut_and_kept_readable(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_bytes(b"x" * (2 * TAIL_BYTES) + b"\n\xff end\n")
    first, last = last_lines(log)
    assert (len(first), last) == (MAX_LINE_CHARS, "\N{REPLACEMENT CHARACTER} end")


def test_a_long_log_becomes_the_earlier_one_and_its_writer_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"before\n")
        assert not bound(log, max_bytes=7)
        assert bound(log, max_bytes=6)
        writer.write(b"after\n")
    assert log.read_bytes() == b"after\n"
    assert (tmp_path / "engine.log.1").read_bytes() == b"before\n"


def test_every_process_begins_a_log_of_its_own_and_the_last_one_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    set_aside(log)
    for text in ("first", "second"):
        log.write_text(text)
        set_aside(log)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("engine.log.1", "second")]


def test_a_log_that_is_not_there_is_short_enough(tmp_path: Path) -> None:
    assert not bound(tmp_path / "engine.log")


class Clock:
    now_s = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(logs, "monotonic", lambda: clock.now_s)
    monkeypatch.setattr(logs, "time", lambda: clock.now_s)
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
    for name in logs.LOGS:
        (tmp_path / f"{name}.log").write_bytes(b'\xff"\\x\n' * 100_000)
    assert len(encode(log_tail(tmp_path, assignment(), 10**6))) < MAX_FRAME_BYTES / 2


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        ("Authorization: Bearer abc.def-123456", "abc.def-123456"),
        ("headers={'authorization': 'Basic dXNlcjpwYXNz'}", "dXNlcjpwYXNz"),
        ("enrolled with sw_0a1b2c3d4e5f60_s3cr3tS3cr3t", "s3cr3tS3cr3t"),
        ("OPENAI_API_KEY=sk-proj-12345678", "sk-proj-12345678"),
        ('{"api_key": "verysecret", "model": "m"}', "verysecret"),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG", "wJalrXUtnFEMI"),
        ("using AKIAIOSFODNN7EXAMPLE for s3", "AKIAIOSFODNN7EXAMPLE"),
        ("HF_TOKEN: hf_AbCdEfGhIj", "hf_AbCdEfGhIj"),
        ("connecting to redis://user:pa55word@cache:6379/0", "pa55word"),
        ("jwt eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0abc.c2lnbmF0dXJl", "eyJzdWIi"),
        ("password = hunter22", "hunter22"),
        ("the cell's secret is 0123456789abcdef", "0123456789abcdef"),
    ],
)
def test_secrets_are_taken_out(line: str, secret: str) -> None:
    found = redacted(line, ("0123456789abcdef",))
    assert secret not in found
    assert REDACTED in found


@pytest.mark.parametrize(
    "line",
    [
        "max_tokens=128 prompt_tokens: 4096",
        "generated 128 tokens in 3.2 s",
        "GET http://127.0.0.1:21000/health 200",
        "loaded weights sha256:0f343b0931126a20",
    ],
)
def test_harmless_lines_stay_as_they_are(line: str) -> None:
    assert redacted(line, ("",)) == line
