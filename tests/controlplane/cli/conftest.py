"""Runs the command in this process against the real application, with a real user's token."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer.main

from controlplane.cli.main import main
from controlplane.cli.session import Session


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


Switchyard = Callable[..., Ended]


@pytest.fixture(scope="session", autouse=True)
def _one_tree_of_commands() -> Iterator[None]:
    """Typer would build all commands again for each run."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


@pytest.fixture
def token(db: None) -> str:
    """Token of a user with all permissions."""
    # conftest files are loaded before the settings
    from django.contrib.auth.models import User

    from accounts.models import ApiToken
    from kernel.secrets import secret_issue
    from tests.fleet.rows import NOW

    user = User.objects.create_superuser("operator")
    issued = secret_issue()
    ApiToken.objects.create(prefix=issued.prefix, digest=issued.digest, name="test", user=user, created_at=NOW)
    return issued.text


@pytest.fixture(scope="session")
def kept_schema(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A shared cache: the API is the same for all tests."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def environ(token: str, tmp_path: Path, kept_schema: str) -> dict[str, str]:
    """Environment of the command: an empty home, and the token."""
    return {
        "XDG_CACHE_HOME": kept_schema,
        "HOME": str(tmp_path),
        "SWITCHYARD_HOME": str(tmp_path),
        "SWITCHYARD_TOKEN": token,
        "SWITCHYARD_SERVER": "http://testserver",
    }


@pytest.fixture
def switchyard(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Switchyard:
    from django.test.client import ClientHandler

    # The server logs in this process. A handler of an earlier test whose stream is closed would complain on the
    # command's standard error.
    monkeypatch.setattr(logging, "raiseExceptions", False)

    def application(environ: dict[str, Any], start_response: Any) -> Any:
        """The real application on this thread's connection, so that it sees the test's transaction."""
        response: Any = ClientHandler(enforce_csrf_checks=True)(environ)
        start_response(f"{response.status_code} {response.reason_phrase}", list(response.items()))
        return [response.content]

    def run(*arguments: str) -> Ended:
        capsys.readouterr()
        transport = httpx.WSGITransport(app=application)
        code = main(arguments, Session(environ=environ, transport=transport))
        printed = capsys.readouterr()
        return Ended(code, printed.out, printed.err)

    return run
