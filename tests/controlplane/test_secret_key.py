"""Nothing signs with a key that the public knows, and what serves does not start without one."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.core import signing
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command

from tests.docs.pages import ROOT

CELERY = """
import sys
from controlplane.celery import app

for arguments in (["worker", "--pool", "solo"], ["beat", "--pidfile=", "--schedule", sys.argv[1]]):
    try:
        app.start(arguments)
    except SystemExit as ended:
        print(arguments[0], ended.code, file=sys.__stdout__)  # beat redirects its own
"""


def run(program: str, *arguments: str, key: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "SWITCHYARD_SECRET_KEY": key}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "why"),
    [("", "is not set"), ("short", "has 5 characters"), (60 * "x", "has 60 characters, 1 different")],
)
def test_web_does_not_start_with_a_key_that_could_be_guessed(key: str, why: str) -> None:
    ended = run("import controlplane.asgi", key=key)
    assert ended.returncode == 1
    assert ended.stderr.strip().splitlines()[-1].startswith(f"SWITCHYARD_SECRET_KEY {why}: ")


@pytest.mark.slow
def test_neither_do_worker_and_beat(tmp_path: Path) -> None:
    ended = run(CELERY, str(tmp_path / "schedule"), key="")
    for name in ("worker", "beat"):
        assert f"{name} SWITCHYARD_SECRET_KEY is not set: " in ended.stdout, ended.stderr


@pytest.mark.parametrize("command", ["sender", "batch"])
def test_neither_do_commands_that_serve(command: str, settings: Any) -> None:
    settings.SECRET_KEY = ""
    with pytest.raises(SystemExit, match="SWITCHYARD_SECRET_KEY is not set"):
        call_command(command)


def test_without_a_key_nothing_is_signed(settings: Any) -> None:
    settings.SECRET_KEY = ""
    with pytest.raises(ImproperlyConfigured, match="SECRET_KEY setting must not be empty"):
        signing.dumps("x")


def test_the_settings_of_tests_have_one_of_their_own() -> None:
    assert len(settings.SECRET_KEY) >= 50
