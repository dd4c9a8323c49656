"""Server and token of a command: explicit options first, and no token is sent to another server."""

import json
from pathlib import Path

import pytest

from controlplane.cli.errors import Failure
from controlplane.cli.profiles import Profile, Profiles
from controlplane.cli.server_target import ConnectionOptions, Target, checked_server, find_target

PRODUCTION = Profiles("production", {"production": Profile("https://prod.example.com", "sw_prod")})
NONE = Profiles()


@pytest.fixture
def own(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine where `make up` runs on port 9000."""
    (tmp_path / "operator-token").write_text("sw_local\n")
    (tmp_path / "up.json").write_text(json.dumps({"port": 9000}))
    return {"SWITCHYARD_HOME": str(tmp_path)}


def test_what_make_up_left_on_this_machine_is_found_by_itself(own: dict[str, str]) -> None:
    found = find_target(ConnectionOptions(), own, NONE)
    assert (found.server, found.token) == ("http://127.0.0.1:9000", "sw_local")
    assert found.source.endswith("operator-token")


def test_a_profile_counts_before_this_machine(own: dict[str, str]) -> None:
    assert find_target(ConnectionOptions(), own, PRODUCTION) == Target(
        "https://prod.example.com", "sw_prod", "profile production"
    )


@pytest.mark.parametrize("server", ["http://127.0.0.1:9000", "localhost:9000", "http://[::1]:9000"])
def test_the_own_token_goes_to_this_machine_by_any_of_its_names(own: dict[str, str], server: str) -> None:
    assert find_target(ConnectionOptions(server=server), own, PRODUCTION).token == "sw_local"


@pytest.mark.parametrize("server", ["https://evil.example.com", "http://prod.example.com", "127.0.0.1:9001"])
def test_no_token_goes_to_another_server(own: dict[str, str], server: str) -> None:
    assert find_target(ConnectionOptions(server=server), own, PRODUCTION).token == ""


def test_what_is_said_counts_first(own: dict[str, str]) -> None:
    environ = {**own, "SWITCHYARD_SERVER": "https://a.example.com", "SWITCHYARD_TOKEN": "sw_env"}
    assert find_target(ConnectionOptions(), environ, PRODUCTION) == Target(
        "https://a.example.com", "sw_env", "SWITCHYARD_TOKEN"
    )
    options = ConnectionOptions(server="https://b.example.com", token="sw_said")
    assert find_target(options, environ, PRODUCTION) == Target("https://b.example.com", "sw_said", "--token")
    assert (
        find_target(ConnectionOptions(profile="production"), environ, PRODUCTION).server == "https://prod.example.com"
    )


def test_a_profile_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(Failure, match="profile 'staging' does not exist; there are: production"):
        find_target(ConnectionOptions(profile="staging"), {}, PRODUCTION)


@pytest.mark.parametrize(
    ("text", "server"),
    [
        ("switchyard.example.com", "https://switchyard.example.com"),
        ("localhost:8000", "http://localhost:8000"),
        ("https://a.example.com/api/v1/", "https://a.example.com"),
        ("https://user:secret@a.example.com", "https://a.example.com"),
    ],
)
def test_an_address_is_completed(text: str, server: str) -> None:
    assert checked_server(text) == server


@pytest.mark.parametrize("text", ["ftp://a", "http://", "http://a:port", ""])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(Failure, match="is not a server"):
        checked_server(text)
