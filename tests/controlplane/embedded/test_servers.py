from pathlib import Path
from urllib.parse import urlsplit

import pytest

from controlplane.embedded.configuration import CannotStart, read_configuration
from controlplane.embedded.postgres import APPLICATION, OWNER
from controlplane.embedded.servers import choose_servers, without_password
from controlplane.embedded.state_directory import StateDirectory


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgres://u:secret@db:5432/x", "postgres://u:***@db:5432/x"),
        ("redis://:secret@cache/0", "redis://:***@cache/0"),
        ("postgres://u@db/x", "postgres://u@db/x"),
        ("unix:///tmp/v.sock?db=0", "unix:///tmp/v.sock?db=0"),
    ],
)
def test_a_password_is_never_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({}, ["postgres", "valkey"]),
        ({"DATABASE_URL": "postgres://db/x"}, ["valkey"]),
        ({"REDIS_URL": "redis://r"}, ["postgres"]),
        ({"DATABASE_URL": "postgres://db/x", "REDIS_URL": "redis://r"}, []),
    ],
)
def test_a_server_that_the_environment_names_is_not_started(
    given: dict[str, str], ours: list[str], tmp_path: Path
) -> None:
    configuration = read_configuration({**given, "SWITCHYARD_HOME": str(tmp_path)})
    servers = choose_servers(configuration, StateDirectory(configuration.home))
    assert [service.name for service in servers.services({})] == ours
    assert servers.database_url == given.get("DATABASE_URL", servers.database_url)


@pytest.mark.parametrize("named", ["", "postgres://me@db/x"])
def test_the_fleet_runs_as_another_than_the_owner_where_the_database_is_ours(named: str, tmp_path: Path) -> None:
    configuration = read_configuration({"DATABASE_URL": named, "SWITCHYARD_HOME": str(tmp_path)})
    servers = choose_servers(configuration, StateDirectory(configuration.home))
    users = urlsplit(servers.database_url).username, urlsplit(servers.owner_url).username
    assert users == (("me", "me") if named else (APPLICATION, OWNER))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("variable", "url"),
    [
        ("DATABASE_URL", "postgres://u:secret@127.0.0.1:1/x"),
        ("REDIS_URL", "redis://:secret@127.0.0.1:1/0"),
    ],
)
async def test_a_named_server_that_does_not_answer_is_one_clear_sentence(
    variable: str, url: str, tmp_path: Path
) -> None:
    given = {"DATABASE_URL": "postgres://unused", "REDIS_URL": "redis://unused", variable: url}
    other = "REDIS_URL" if variable == "DATABASE_URL" else "DATABASE_URL"
    configuration = read_configuration({**given, other: "", "SWITCHYARD_HOME": str(tmp_path)})
    servers = choose_servers(configuration, StateDirectory(configuration.home))
    with pytest.raises(CannotStart) as refusal:
        await servers.wait_until_ready()
    sentence = str(refusal.value)
    assert sentence.startswith(f"{variable} names ")
    assert "does not answer" in sentence
    assert f"unset {variable}" in sentence
    assert "secret" not in sentence
