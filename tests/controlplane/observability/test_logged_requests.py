"""The log lines of unauthenticated requests, in both forms that the control plane writes."""

import io
import logging
import logging.config
from collections.abc import Iterator
from typing import Any

import pytest
from django.conf import settings
from django.test import Client

pytestmark = pytest.mark.django_db


@pytest.fixture(params=["line", "json"])
def written(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    """The log from now on, in the form of the settings."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    formatters: Any = settings.LOGGING["formatters"]
    handler.setFormatter(logging.config.DictConfigurator({}).configure_formatter(dict(formatters[request.param])))
    logging.getLogger().addHandler(handler)
    yield stream
    logging.getLogger().removeHandler(handler)


def test_a_path_with_newlines_and_escapes_writes_one_line(written: io.StringIO) -> None:
    Client().post("/nothing%0AERROR%20audit:%20forged%1b%5b2K%E2%80%A8")
    (line,) = written.getvalue().splitlines()
    assert line.isprintable()


def test_a_long_path_writes_a_short_line(written: io.StringIO) -> None:
    Client().post("/" + "x" * 60_000)
    assert len(written.getvalue()) < 6_000


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/login/", {"Host": "evil.example"}),
        ("/login/", {"Content-Type": "multipart/form-data; boundary="}),
        ("/nothing", {}),
        ("/api/v1/regions/", {}),
    ],
)
def test_a_request_that_is_refused_leaves_no_traceback(
    written: io.StringIO, path: str, headers: dict[str, str]
) -> None:
    assert 400 <= Client(raise_request_exception=False).post(path, headers=headers).status_code < 500
    assert "Traceback" not in written.getvalue()
