"""Starts one PostgreSQL and one Valkey for each process that runs tests, before Django is set up, and orders the tests.

The servers run in a process of their own, which the kernel ends with this one, even when this one is killed. Where
DATABASE_URL or REDIS_URL is set already, that server is used instead.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.embedded_servers import EmbeddedServers
from tests.layers import FastThenSlow, layer_of

ROOT = Path(__file__).resolve().parent.parent

_servers = pytest.StashKey[EmbeddedServers]()
_home = pytest.StashKey[Path]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Point the settings at this process's servers and home, then load them."""
    if _only_hands_out(config):
        return
    home = Path(tempfile.mkdtemp(prefix="switchyard-tests-"))
    config.stash[_home] = home
    servers = EmbeddedServers(home / "servers")
    config.stash[_servers] = servers
    addresses = servers.start()
    os.environ.setdefault("DATABASE_URL", addresses["database_url"])
    os.environ.setdefault("REDIS_URL", addresses["redis_url"])
    # Tests that commit empty all tables after them; the table of audit records takes that only when told so.
    os.environ.setdefault("PGOPTIONS", "-c switchyard.audit_truncate=on")
    os.environ["SWITCHYARD_HOME"] = str(home / "home")
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    sys.path.insert(0, str(ROOT))
    _load_django()


def _only_hands_out(config: pytest.Config) -> bool:
    """Whether this process leaves all tests to workers of pytest-xdist."""
    return bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FastThenSlow:
    """Who runs what when there are several workers."""
    return FastThenSlow(config, log)


def _load_django() -> None:
    import django

    django.setup()
    from tests.quickened import quicken

    quicken()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the servers and remove what they stored."""
    if servers := config.stash.get(_servers, None):
        servers.stop()
    if home := config.stash.get(_home, None):
        shutil.rmtree(home, ignore_errors=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast layers first; within a layer the order is pytest-randomly's."""
    items.sort(key=layer_of)
