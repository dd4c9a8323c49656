"""What the bench of kills takes for right and wrong."""

import json
from typing import Any

import pytest

from bench.batch_kills import Kill, judged, resumed_after_s

IDS = frozenset({"a", "b", "c"})


def row(name: str, status: int = 200, tokens: int = 2) -> bytes:
    body = {"usage": {"completion_tokens": tokens}}
    return (
        json.dumps({"custom_id": name, "response": {"status_code": status, "body": body}, "error": None}).encode()
        + b"\n"
    )


def shown(completed: int = 2, failed: int = 1, tokens: int = 4) -> dict[str, Any]:
    counts = {"total": 3, "completed": completed, "failed": failed}
    return {"request_counts": counts, "usage": {"output_tokens": tokens}}


def test_every_line_once_with_equal_counts_and_usage_is_right() -> None:
    assert judged(shown(), IDS, row("a") + row("b"), row("c", 400)) == []


@pytest.mark.parametrize(
    ("said", "output", "errors"),
    [
        (shown(completed=1), row("a"), row("c", 400)),
        (shown(), row("a") + row("a"), row("c", 400)),
        (shown(), row("a") + row("x"), row("c", 400)),
        (shown(completed=3), row("a") + row("b"), row("c", 400)),
        (shown(tokens=5), row("a") + row("b"), row("c", 400)),
    ],
)
def test_anything_else_is_wrong(said: dict[str, Any], output: bytes, errors: bytes) -> None:
    assert judged(said, IDS, output, errors)


def test_work_has_resumed_with_the_next_line_that_is_answered() -> None:
    kill = Kill("web", 10.0, 1)
    assert resumed_after_s(kill, [(9.0, 1), (10.0, 2), (12.5, 3)], 100.0) == 2.5
    assert resumed_after_s(kill, [(9.0, 1)], 100.0) == 90.0
