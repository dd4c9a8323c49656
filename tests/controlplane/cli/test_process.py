"""The command as a separate process, against web as in production."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kernel.models import Event
from tests.controlplane.dashboard.web import ROOT, web_process
from tests.fleet import rows

pytestmark = pytest.mark.processes

COMMAND = [sys.executable, "-m", "controlplane.cli"]
LIGHT = (
    "import sys; from controlplane.cli.main import main; code = main(['get', '--help']);"
    "heavy = {'django', 'httpx', 'rich', 'yaml', 'asyncio'} & set(sys.modules); sys.exit(f'{heavy}' if heavy else code)"
)


def test_help_loads_nothing_that_takes_time() -> None:
    ended = subprocess.run([sys.executable, "-c", LIGHT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "switchyard get cells -r us-east-1" in ended.stdout


@pytest.mark.long
def test_help_of_what_can_be_created_works_without_a_server(tmp_path: Path) -> None:
    environ = {**os.environ, "HOME": str(tmp_path), "SWITCHYARD_SERVER": "http://127.0.0.1:9", "PYTHONPATH": str(ROOT)}
    environ.pop("XDG_CACHE_HOME", None)
    command = [*COMMAND, "create", "region", "--help"]
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "--ingress-url" in ended.stdout


@pytest.mark.django_db(transaction=True)
def test_it_reads_completes_follows_and_ends_cleanly(tmp_path: Path, token: str) -> None:
    cell = rows.cell("sim-70b-us-east-1-1", rows.node("n-00000001"), rows.node("n-00000002"))
    with web_process(tmp_path / "web.log") as server:
        environ = {
            **os.environ,
            "HOME": str(tmp_path),
            "SWITCHYARD_SERVER": server,
            "SWITCHYARD_TOKEN": token,
            "PYTHONPATH": str(ROOT),
        }

        def ended(*arguments: str, **more: str) -> str:
            done = subprocess.run(
                [*COMMAND, *arguments],
                cwd=tmp_path,
                env={**environ, **more},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        assert [one["id"] for one in json.loads(ended("get", "cells", "-o", "json"))] == [cell.id]
        variables = {
            "_SWITCHYARD_COMPLETE": "complete_bash",
            "COMP_WORDS": "switchyard get cells sim",
            "COMP_CWORD": "3",
        }
        assert ended(**variables).split() == [cell.id]
        _follows_until_interrupted(environ, tmp_path)


LISTENING = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
"""Shells start background jobs with Ctrl-C ignored, which their children inherit."""


def _follows_until_interrupted(environ: dict[str, str], folder: Path) -> None:
    command = [sys.executable, "-c", LISTENING, *COMMAND, "events", "-f", "-n", "1", "-o", "json"]
    Event.objects.create(at=rows.NOW, kind="k", message="before")
    with subprocess.Popen(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as following:
        assert following.stdout is not None
        assert following.stderr is not None
        try:
            assert json.loads(following.stdout.readline())["message"] == "before"
            Event.objects.create(at=rows.NOW, kind="k", message="meanwhile")
            assert json.loads(following.stdout.readline())["message"] == "meanwhile"
        finally:
            following.send_signal(signal.SIGINT)
        assert following.wait(60) == 130
        assert following.stderr.read() == ""
