"""A host with a running release, and a server that has another one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_agent.node.machine.paths import HostPaths
from engine_agent.node.machine.releases import point
from tests.engine_agent.node.machine.made_releases import OLD, Server, files, put


@pytest.fixture
def paths(tmp_path: Path) -> HostPaths:
    """A host that runs the old release."""
    made = HostPaths(tmp_path / "code")
    made.home.mkdir(parents=True)
    put(made, "old", files(OLD))
    point(made.current, made.releases / "old")
    return made


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()
