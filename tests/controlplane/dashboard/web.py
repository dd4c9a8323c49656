"""The web process as in production, with the test's database and Valkey, for browser tests."""

import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from django.conf import settings
from django.db import connection

from tests.ports import free_port

ROOT = Path(__file__).parents[3]
UP_WITHIN_S = 120.0
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def browser_binary() -> str | None:
    return next((found for found in map(shutil.which, BROWSERS) if found), None)


@contextmanager
def web_process(log: Path, *, open_files: int = 0, **more: str) -> Iterator[str]:
    """Runs web and returns its URL, also for agents. Its output is in `log`. `open_files`: its limit, default as in
    this process; `more`: additional environment.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "controlplane.web", "--port", str(port)]
    if open_files:
        command = ["sh", "-c", f'ulimit -n {open_files} && exec "$@"', "sh", *command]
    environment = {
        **os.environ,
        "DATABASE_URL": _database_url(),
        "REDIS_URL": settings.REDIS_URL,
        "SWITCHYARD_PORT": str(port),
        "SWITCHYARD_PLAIN_LINKS": "1",
        "SWITCHYARD_SECRET_KEY": settings.SECRET_KEY,
        **more,
    }
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait_until_up(url, process, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def _wait_until_up(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + UP_WITHIN_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"web ended with {process.returncode}: {log.read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(f"{url}/login/", timeout=5):  # noqa: S310 - our own process
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise RuntimeError(f"web did not answer within {UP_WITHIN_S} s: {log.read_text()[-2000:]}")


def _database_url() -> str:
    """The test database's address as a URL; a host that is a folder (a Unix socket) is percent-encoded."""
    at = connection.settings_dict
    secret = f":{quote(at['PASSWORD'], safe='')}" if at["PASSWORD"] else ""
    port = f":{at['PORT']}" if at["PORT"] else ""
    return f"postgres://{quote(at['USER'], safe='')}{secret}@{quote(at['HOST'], safe='')}{port}/{at['NAME']}"
