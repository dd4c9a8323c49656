"""uv runs with pip's configuration; its failures become one sentence, and a hung uv is killed."""

from pathlib import Path

import pytest

from engine_agent.engines.uv_install import UvFailed, UvProgram, failure_reason, pip_settings, uv_environment

LIMIT_S = 60.0


@pytest.mark.processes
def test_the_reason_is_what_uv_calls_the_error() -> None:
    lines = ["Using Python 3.11", "error: Failed to fetch", "cause: dns error", "", "hint: try again"]
    assert failure_reason(lines) == "Failed to fetch cause: dns error"


@pytest.mark.processes
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


@pytest.mark.processes
def test_silence_is_no_reason() -> None:
    assert failure_reason([]) == "uv gave no reason"


@pytest.mark.processes
def test_a_real_failure_tells_what_could_not_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    uv = UvProgram(print)
    with pytest.raises(UvFailed, match="no-such-package was not found"):
        uv.run(("pip", "install", "--target", str(tmp_path), "no-such-package"), LIMIT_S)


@pytest.mark.processes
def test_a_uv_that_takes_too_long_is_ended() -> None:
    uv = UvProgram(print)
    with pytest.raises(UvFailed, match="killed by signal 9"):
        uv.run(("run", "--no-project", "python", "-c", "import time; time.sleep(600)"), 0.5)


LISTING = """\
:env:.find-links='/wheels'
global.find-links='/elsewhere'
global.cert='/etc/ca.pem'
global.index-url='https://mirror/simple'
install.extra-index-url='https://a/simple\\nfile:///b/simple'
freeze.timeout='10'
not a setting
"""


def everything_exists(_: Path) -> bool:
    return True


def nothing_exists(_: Path) -> bool:
    return False


def test_variables_win_over_files_and_other_commands_settings_are_left_out() -> None:
    assert pip_settings(LISTING) == {
        "find-links": "/wheels",
        "cert": "/etc/ca.pem",
        "index-url": "https://mirror/simple",
        "extra-index-url": "https://a/simple\nfile:///b/simple",
    }


def test_settings_become_variables_of_uv() -> None:
    variables, warnings = uv_environment(pip_settings(LISTING), everything_exists)
    assert variables == {
        "UV_DEFAULT_INDEX": "https://mirror/simple",
        "UV_INDEX": "https://a/simple file:///b/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/wheels",
        "SSL_CERT_FILE": "/etc/ca.pem",
    }
    assert warnings == []


def test_places_that_are_not_there_are_left_out_with_a_warning() -> None:
    variables, warnings = uv_environment(pip_settings(LISTING), nothing_exists)
    assert variables["UV_INDEX"] == "https://a/simple"
    assert "UV_FIND_LINKS" not in variables
    assert warnings == [
        "pip's extra-index-url file:///b/simple does not exist and is ignored",
        "pip's find-links /wheels does not exist and is ignored",
    ]


def test_an_unconfigured_pip_changes_nothing() -> None:
    assert uv_environment(pip_settings(""), everything_exists) == ({}, [])


def test_without_an_index_uv_stays_off_the_network() -> None:
    assert uv_environment({"no-index": "true"}, everything_exists) == ({"UV_OFFLINE": "1"}, [])
    assert uv_environment({"no-index": "false"}, everything_exists) == ({}, [])
