from pathlib import Path

from engine_agent.engines.uv_install import pip_settings, uv_environment

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
