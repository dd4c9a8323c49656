"""Nothing signs with a key that the public knows, and what serves does not start without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from django.conf import settings

from tests.docs.pages import ROOT

SERVING = {
    "web": ["-c", "import controlplane.asgi"],
    "worker": ["-m", "celery", "-A", "controlplane.celery:app", "worker", "--pool", "solo"],
    "beat": ["-m", "celery", "-A", "controlplane.celery:app", "beat", "--pidfile="],
    "sender": ["manage.py", "sender"],
    "controller": ["manage.py", "controller"],
}


def run(arguments: list[str], key: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "SWITCHYARD_SECRET_KEY": key}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("key", "why"),
    [("", "is not set"), ("short", "has 5 characters"), (60 * "x", "has 60 characters, 1 different")],
)
def test_web_does_not_start_with_a_key_that_could_be_guessed(key: str, why: str) -> None:
    ended = run(SERVING["web"], key)
    assert ended.returncode == 1
    assert ended.stderr.strip().splitlines()[-1].startswith(f"SWITCHYARD_SECRET_KEY {why}: ")


@pytest.mark.parametrize("process", ["worker", "beat", "sender", "controller"])
def test_neither_does_any_other_process_that_serves(process: str, tmp_path: Path) -> None:
    schedule = ["--schedule", str(tmp_path / "schedule")] if process == "beat" else []
    ended = run([*SERVING[process], *schedule], "")
    assert ended.returncode != 0
    assert "SWITCHYARD_SECRET_KEY is not set" in ended.stdout + ended.stderr


def test_without_a_key_nothing_is_signed() -> None:
    program = "import django; django.setup(); from django.core import signing; print(signing.dumps('x'))"
    ended = run(["-c", program], "")
    assert ended.returncode != 0
    assert "SECRET_KEY setting must not be empty" in ended.stderr


def test_the_settings_of_tests_have_one_of_their_own() -> None:
    assert len(settings.SECRET_KEY) >= 50
