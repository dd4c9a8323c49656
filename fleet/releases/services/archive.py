"""Stores releases of the agent: the source of each in its own folder, for agents on this computer, and one archive for
each Python and processor, for hosts. Archives contain all imports and have the same bytes each time. The archive for
this process's Python is packed from its own environment, as pinned by `requirements.lock`; others are downloaded by the
lock's hashes when an operator orders them (`manage.py agent_archive`), and so is a Python for hosts whose own is too
old. Hosts download nothing else."""

import gzip
import hashlib
import io
import platform
import re
import secrets
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import msgspec
from django.conf import settings

from engine_agent.protocol.machine_messages import RELEASE_FILE, Release, is_release_id, release_in

PYTHONS = ("cp311", "cp312", "cp313", "cp314")
PROCESSORS = ("x86_64", "aarch64")
TAG = re.compile(r"cp3(1[1-9])-(x86_64|aarch64)")
FETCH_LIMIT_S = 300.0
LEFT_AFTER_S = 3600.0
_FETCHED = "fetched-"
SERVICES_KEPT = frozenset({"s3", "sts", "sso", "sso-oidc"})
"""botocore's services for fetching artifacts; the others are most of its size."""
_BLOCK = re.compile(r"^([a-z0-9._-]+)(?:\[[^]]*\])?==[^\n]*(?:\n[ \t]+[^\n]*)*", re.MULTILINE)

_STATED = {
    "version": (
        "engine_agent/node/telemetry/fingerprint.py",
        re.compile(r'^AGENT_VERSION = "([^"\n]{1,14})"$', re.MULTILINE),
    ),
    "protocol": ("engine_agent/protocol/messages.py", re.compile(r"^PROTOCOL_VERSION = ([0-9]{1,4})$", re.MULTILINE)),
}
"""Other sources are read, never imported."""

_building = threading.Lock()


class NoRelease(Exception):
    """A folder has no source that can be a release; the text says why."""


class ArchiveUnavailable(Exception):
    """No archive for this Python and processor; the text says how to make one."""


class CarriedPython(NamedTuple):
    """A Python for hosts whose own is too old, as an archive on disk. `processor`: as `uname -m` names it."""

    processor: str
    least_glibc: str
    path: Path
    digest: str


class AgentArchive(NamedTuple):
    """An archive on disk. `tag`: such as `cp311-x86_64`; `digest`: the file's SHA-256, in hexadecimal."""

    tag: str
    path: Path
    digest: str


def own_tag() -> str:
    """Returns the Python and processor of this process."""
    return f"cp{sys.version_info.major}{sys.version_info.minor}-{platform.machine()}"


def own_release() -> Release:
    """Returns this checkout's release, and keeps its source."""
    return source_keep(settings.BASE_DIR)


def checkout_release() -> Release:
    """Returns this checkout's release. Reads the source once in a process."""
    return _release_of(settings.BASE_DIR)


def source_keep(checkout: Path) -> Release:
    """Keeps the source of a checkout's agent as a release, once. Raises NoRelease if it does not state version and
    protocol. Raises OSError if it cannot be copied; nothing is left behind."""
    release = _release_of(checkout)
    folder = release_folder(release.id)
    with _building:
        if release_in(folder) == release:
            return release
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".", ignore_cleanup_errors=True) as temporary:
            made = Path(temporary) / release.id
            for name, file in _source_files(checkout):
                (made / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, made / name)
            (made / RELEASE_FILE).write_bytes(msgspec.json.encode(release))
            _let_read(folder.parent, made)
            _store_source(made, folder, release)
    return release


def _let_read(releases: Path, made: Path) -> None:
    """Engines have own accounts and run this code, which is not secret."""
    releases.chmod(0o711)
    for path in (made, *made.rglob("*")):
        path.chmod(0o755 if path.is_dir() else path.stat().st_mode | 0o444)


def _store_source(made: Path, folder: Path, release: Release) -> None:
    """Another process may have stored it; a damaged copy is replaced."""
    try:
        made.rename(folder)
    except OSError:
        if release_in(folder) != release:
            shutil.rmtree(folder)
            made.rename(folder)


def release_folder(release: str) -> Path:
    """Returns the folder of a release's source, with its `release.json`."""
    home: Path = settings.SWITCHYARD_HOME
    return home / "releases" / release


def archives(release: str = "") -> list[AgentArchive]:
    """Returns the archives of a release on disk, that of this process's Python first, packed if possible. Default: this
    checkout's release."""
    chosen = release or own_release().id
    own = _archive_path(own_tag(), chosen)
    with _building:
        if not own.exists() and _is_ours_to_pack(chosen):
            _pack_archive(own, _installed_files(), release_folder(chosen))
    found = sorted(own.parent.glob(f"*-{chosen}.tar.gz"), key=lambda path: (path != own, path))
    return [AgentArchive(path.name.removesuffix(f"-{chosen}.tar.gz"), path, _file_digest(path)) for path in found]


def archive_of(tag: str, release: str = "") -> AgentArchive:
    """Returns the archive for one Python and processor. Raises ArchiveUnavailable if there is none."""
    for archive in archives(release):
        if archive.tag == tag:
            return archive
    raise ArchiveUnavailable(f"there is no archive for {tag[:40]!r}; `manage.py agent_archive {tag[:40]}` fetches one")


PYTHON = re.compile(r"python-(x86_64|aarch64)-glibc([0-9.]{1,8})\.tgz")


def carried_pythons() -> list[CarriedPython]:
    """Returns the Pythons that `python_pack` has made, one for a processor."""
    found = (PYTHON.fullmatch(path.name) for path in sorted(_archive_folder().glob("python-*.tgz")))
    paths = [(known[1], known[2], _archive_folder() / known[0]) for known in found if known is not None]
    return [CarriedPython(processor, glibc, path, _file_digest(path)) for processor, glibc, path in paths]


def python_pack() -> CarriedPython:
    """Packs this process's Python, once. Raises ArchiveUnavailable if this computer lacks something for it."""
    with _building:
        for known in carried_pythons():
            if known.processor == platform.machine():
                return known
        made = _archive_folder() / f"{secrets.token_hex(8)}.part"
        floor = _pack_python(made)
        made.replace(_archive_folder() / f"python-{platform.machine()}-glibc{floor}.tgz")
    return carried_python(platform.machine())


def _pack_python(to: Path) -> str:
    """Returns the oldest glibc that it runs with."""
    command = (sys.executable, "-m", "engine_agent.engines.builds", "python", "--to", str(to))
    try:
        done = subprocess.run(
            command, cwd=settings.BASE_DIR, capture_output=True, text=True, timeout=FETCH_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        to.unlink(missing_ok=True)
        why = getattr(error, "stderr", "") or str(error)
        raise ArchiveUnavailable(f"the Python of this computer cannot be packed: {why.strip()[-500:]}") from None
    return done.stdout.strip()


def carried_python(processor: str) -> CarriedPython:
    """Returns the Python for a processor. Raises ArchiveUnavailable if there is none."""
    for known in carried_pythons():
        if known.processor == processor:
            return known
    raise ArchiveUnavailable(f"there is no Python for {processor[:40]!r}; `manage.py agent_archive python` makes one")


def archive_by_digest(digest: str, release: str) -> AgentArchive | None:
    """Returns the archive of a release with this SHA-256; None if this host has another one."""
    if not is_release_id(release):
        return None
    return next((archive for archive in archives(release) if archive.digest == digest), None)


def archive_fetch(tag: str) -> AgentArchive:
    """Makes the archive for another Python or processor from a package index, by the lock's hashes. Raises
    ArchiveUnavailable if it is not a tag, or a package cannot be downloaded or has no such wheel."""
    known = TAG.fullmatch(tag)
    if known is None:
        raise ArchiveUnavailable(f"{tag!r} is not one of {', '.join(PYTHONS)} with - and {' or '.join(PROCESSORS)}")
    release = own_release().id
    path = _archive_path(tag, release)
    if tag != own_tag() and not path.exists():
        with tempfile.TemporaryDirectory(dir=_archive_folder(), prefix=_FETCHED) as folder:
            _download_packages(Path(folder), minor=known[1], processor=known[2])
            _pack_archive(path, _files_below(Path(folder) / "site", PurePosixPath("site")), release_folder(release))
    return archive_of(tag)


def _download_packages(folder: Path, *, minor: str, processor: str) -> None:
    wanted = folder / "wanted.lock"
    blocks = {found[1]: found[0] for found in _BLOCK.finditer((settings.BASE_DIR / "requirements.lock").read_text())}
    wanted.write_text("\n".join(blocks[name] for name in _wanted_packages()) + "\n")
    command = (
        *("uv", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:"),
        *("--target", str(folder / "site"), "--python-platform", f"{processor}-manylinux_2_31"),
        *("--python-version", f"3.{minor}", "-r", str(wanted)),
    )
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ArchiveUnavailable(
            f"the packages for Python 3.{minor} on {processor} cannot be downloaded: {error}"
        ) from None
    if done.returncode:
        why = done.stderr.strip()[-500:]
        raise ArchiveUnavailable(f"the packages for Python 3.{minor} on {processor} cannot be downloaded: {why}")


def _wanted_packages() -> list[str]:
    lines = (settings.BASE_DIR / "engine_agent/requirements.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _installed_files() -> Iterator[tuple[PurePosixPath, Path]]:
    """Files of the packages in this environment, by their names in the archive."""
    for name in _wanted_packages():
        for file in metadata.files(name) or ():
            if _is_kept(file):
                yield PurePosixPath("site") / file, Path(str(file.locate()))


def _is_kept(file: PurePosixPath) -> bool:
    if ".." in file.parts or file.suffix == ".pyc":
        return False
    if file.parts[:2] == ("botocore", "data") and len(file.parts) > 3:
        return file.parts[2] in SERVICES_KEPT
    return True


def _files_below(folder: Path, name: PurePosixPath) -> Iterator[tuple[PurePosixPath, Path]]:
    for path in folder.rglob("*"):
        below = path.relative_to(folder)
        if path.is_file() and "__pycache__" not in below.parts and _is_kept(PurePosixPath(below)):
            yield name / below, path


def _source_files(checkout: Path) -> Iterator[tuple[PurePosixPath, Path]]:
    return _files_below(checkout / "engine_agent", PurePosixPath("engine_agent"))


def _pack_archive(path: Path, packages: Iterator[tuple[PurePosixPath, Path]], source: Path) -> None:
    """Writes an archive: sorted, without times, owners or paths of this host. Each process writes its own file until it
    is complete, because others may write the same."""
    own = ((PurePosixPath(RELEASE_FILE), source / RELEASE_FILE), *_source_files(source))
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, file in sorted((str(name), file) for name, file in (*packages, *own)):
            entry = tarfile.TarInfo(name)
            entry.mode = 0o755 if file.stat().st_mode & 0o100 else 0o644
            entry.size = file.stat().st_size
            with file.open("rb") as opened:
                tar.addfile(entry, opened)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        with temporary.open("xb") as output, gzip.GzipFile(fileobj=output, mode="wb", filename="", mtime=0) as packed:
            packed.write(content.getvalue())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@cache
def _release_of(checkout: Path) -> Release:
    stated = {}
    for name, (file, pattern) in _STATED.items():
        try:
            found = pattern.search((checkout / file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise NoRelease(f"{checkout} has no agent: {error}") from None
        if found is None:
            raise NoRelease(f"{checkout / file} does not state the agent's {name}")
        stated[name] = found[1]
    return Release(_id_of(checkout), stated["version"], int(stated["protocol"]))


def _id_of(checkout: Path) -> str:
    """Hash of the source and of the versions of its imports in this environment."""
    known = hashlib.sha256((settings.BASE_DIR / "requirements.lock").read_bytes())
    for name, file in sorted(_source_files(checkout)):
        known.update(f"{name}\n".encode())
        known.update(file.read_bytes())
    return known.hexdigest()[:16]


def _is_ours_to_pack(release: str) -> bool:
    """Whether its source is here and made for this environment's packages."""
    return release_in(release_folder(release)) is not None and _id_of(release_folder(release)) == release


@cache
def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unfinished_archives_delete(now_s: float) -> int:
    """Deletes files that killed processes left while packing or downloading, and returns how many. `now_s` as
    `time.time`. Files younger than an hour may still be in use by any home that shares the cache."""
    removed = 0
    for path in (*_archive_folder().glob("*.part"), *_archive_folder().glob(f"{_FETCHED}*")):
        with suppress(OSError):  # another controller may remove it
            if now_s - path.stat().st_mtime > LEFT_AFTER_S:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                removed += 1
    return removed


def archive_files() -> Iterator[tuple[Path, str]]:
    """Yields every archive in the cache, of any home, with its release's ID."""
    for path in _archive_folder().glob("*.tar.gz"):
        tag, _, release = path.name.removesuffix(".tar.gz").rpartition("-")
        if TAG.fullmatch(tag) and is_release_id(release):
            yield path, release


def _archive_path(tag: str, release: str) -> Path:
    return _archive_folder() / f"{tag}-{release}.tar.gz"


def _archive_folder() -> Path:
    folder: Path = settings.SWITCHYARD_CACHE / "agent"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
