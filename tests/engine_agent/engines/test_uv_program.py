"""uv's failures become one sentence, and a hung uv is killed."""

from pathlib import Path

import pytest

from engine_agent.engines.uv_install import UvFailed, UvProgram, failure_reason

pytestmark = pytest.mark.processes

LIMIT_S = 60.0


def test_the_reason_is_what_uv_calls_the_error() -> None:
    lines = ["Using Python 3.11", "error: Failed to fetch", "cause: dns error", "", "hint: try again"]
    assert failure_reason(lines) == "Failed to fetch cause: dns error"


def test_the_drawing_of_an_error_tree_is_taken_off() -> None:
    cross, arrow = (
        "\N{MULTIPLICATION SIGN}",
        "\N{BOX DRAWINGS LIGHT ARC UP AND RIGHT}\N{BOX DRAWINGS LIGHT HORIZONTAL}▶",
    )
    lines = [
        f"{cross} No solution found:",
        f"{arrow} Because x was not found,",
        "we can conclude that it is unsatisfiable.",
    ]
    assert failure_reason(lines) == (
        "No solution found: Because x was not found, we can conclude that it is unsatisfiable."
    )


def test_silence_is_no_reason() -> None:
    assert failure_reason([]) == "uv gave no reason"


def test_a_real_failure_tells_what_could_not_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    uv = UvProgram(print)
    with pytest.raises(UvFailed, match="no-such-package was not found"):
        uv.run(("pip", "install", "--target", str(tmp_path), "no-such-package"), LIMIT_S)


def test_a_uv_that_takes_too_long_is_ended() -> None:
    uv = UvProgram(print)
    with pytest.raises(UvFailed, match="killed by signal 9"):
        uv.run(("run", "--no-project", "python", "-c", "import time; time.sleep(600)"), 0.5)
