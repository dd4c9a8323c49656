"""Nothing signs with a key that the public knows, and what serves does not start without one."""

import os
import subprocess
import sys
from typing import Any

import pytest
from django.conf import settings
from django.core import signing
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command

from tests.docs.pages import ROOT

CELERY = """
from controlplane.celery import app

try:
    app.start(["worker", "--pool", "solo"])
except SystemExit as ended:
    print(ended.code)
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


@pytest.mark.long
def test_nor_does_a_worker() -> None:
    ended = run(CELERY, key="")
    assert "SWITCHYARD_SECRET_KEY is not set: " in ended.stdout, ended.stderr


def test_nor_do_jobs(settings: Any) -> None:
    settings.SECRET_KEY = ""
    with pytest.raises(SystemExit, match="SWITCHYARD_SECRET_KEY is not set"):
        call_command("jobs")


def test_without_a_key_nothing_is_signed(settings: Any) -> None:
    settings.SECRET_KEY = ""
    with pytest.raises(ImproperlyConfigured, match="SECRET_KEY setting must not be empty"):
        signing.dumps("x")


def test_the_settings_of_tests_have_one_of_their_own() -> None:
    assert len(settings.SECRET_KEY) >= 50
