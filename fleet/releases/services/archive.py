"""Releases of the agent: the source of each in a folder of its own, for agents of this computer, and one archive of it
for hosts that joined: with what it imports, unpacked, the same bytes each time.

One archive for each Python and processor. That of the control plane's own is packed from its own environment, which
`requirements.lock` pins; others are fetched once, by the lock's hashes, when an operator orders them
(`manage.py agent_archive`). A host asks nobody else for anything.
"""

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
"""Of the services that botocore describes: those that artifacts are fetched by. The others are most of it."""
_BLOCK = re.compile(r"^([a-z0-9._-]+)(?:\[[^]]*\])?==[^\n]*(?:\n[ \t]+[^\n]*)*", re.MULTILINE)

_STATED = {
    "version": (
        "engine_agent/node/telemetry/fingerprint.py",
        re.compile(r'^AGENT_VERSION = "([^"\n]{1,14})"$', re.MULTILINE),
    ),
    "protocol": ("engine_agent/protocol/messages.py", re.compile(r"^PROTOCOL_VERSION = ([0-9]{1,4})$", re.MULTILINE)),
}
"""Where a source says what it is; other code than ours is read and not imported."""

_building = threading.Lock()


class NoRelease(Exception):
    """A folder holds no source of the agent that can be a release; the text says why."""


class ArchiveUnavailable(Exception):
    """There is no archive for this Python and processor; the text says which, and how one is made."""


class AgentArchive(NamedTuple):
    """An archive on disk. `tag` is as `cp311-x86_64`; `digest` the SHA-256 of the file, in hexadecimal."""

    tag: str
    path: Path
    digest: str


def own_tag() -> str:
    """The Python and processor of this process."""
    return f"cp{sys.version_info.major}{sys.version_info.minor}-{platform.machine()}"


def own_release() -> Release:
    """The release of this checkout, whose source is kept."""
    return source_keep(settings.BASE_DIR)


def checkout_release() -> Release:
    """The release of this checkout, whether its source is kept or not. Reads the source once in a process's life."""
    return _release_of(settings.BASE_DIR)


def source_keep(checkout: Path) -> Release:
    """Keep the source of a checkout's agent as a release, once.

    Raises:
        NoRelease: it does not say which version and protocol it is.
        OSError: it cannot be copied; nothing is left of the attempt.
    """
    release = _release_of(checkout)
    folder = release_folder(release.id)
    with _building:
        if release_in(folder) == release:
            return release
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".", ignore_cleanup_errors=True) as beside:
            made = Path(beside) / release.id
            for name, file in _source(checkout):
                (made / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, made / name)
            (made / RELEASE_FILE).write_bytes(msgspec.json.encode(release))
            _let_read(folder.parent, made)
            _put(made, folder, release)
    return release


def _let_read(releases: Path, made: Path) -> None:
    """Engines have accounts of their own, and run this code too; it is no secret."""
    releases.chmod(0o711)
    for path in (made, *made.rglob("*")):
        path.chmod(0o755 if path.is_dir() else path.stat().st_mode | 0o444)


def _put(made: Path, folder: Path, release: Release) -> None:
    """Another process may have kept it meanwhile, and what is damaged gives way."""
    try:
        made.rename(folder)
    except OSError:
        if release_in(folder) != release:
            shutil.rmtree(folder)
            made.rename(folder)


def release_folder(release: str) -> Path:
    """Where the source of a release is kept, with its `release.json`."""
    home: Path = settings.SWITCHYARD_HOME
    return home / "releases" / release


def archives(release: str = "") -> list[AgentArchive]:
    """Every archive of a release that is on disk, that of our own Python first; it is packed if it can be. Without a
    release: of this checkout's."""
    chosen = release or own_release().id
    own = _path(own_tag(), chosen)
    with _building:
        if not own.exists() and _is_ours_to_pack(chosen):
            _pack(own, _installed(), release_folder(chosen))
    found = sorted(own.parent.glob(f"*-{chosen}.tar.gz"), key=lambda path: (path != own, path))
    return [AgentArchive(path.name.removesuffix(f"-{chosen}.tar.gz"), path, _digest(path)) for path in found]


def archive_of(tag: str, release: str = "") -> AgentArchive:
    """The archive for one Python and processor.

    Raises:
        ArchiveUnavailable: there is none.
    """
    for archive in archives(release):
        if archive.tag == tag:
            return archive
    raise ArchiveUnavailable(f"there is no archive for {tag[:40]!r}; `manage.py agent_archive {tag[:40]}` fetches one")


def archive_by_digest(digest: str, release: str) -> AgentArchive | None:
    """The archive of a release with this SHA-256; None if it is not here, such as on a host that packed another one."""
    if not is_release_id(release):
        return None
    return next((archive for archive in archives(release) if archive.digest == digest), None)


def archive_fetch(tag: str) -> AgentArchive:
    """Make the archive for another Python or processor, from a package index, by the hashes of our lock.

    Raises:
        ArchiveUnavailable: not a tag, or a package has no such wheel or cannot be fetched.
    """
    known = TAG.fullmatch(tag)
    if known is None:
        raise ArchiveUnavailable(f"{tag!r} is none of {', '.join(PYTHONS)} with - and {' or '.join(PROCESSORS)}")
    release = own_release().id
    path = _path(tag, release)
    if tag != own_tag() and not path.exists():
        with tempfile.TemporaryDirectory(dir=_folder(), prefix=_FETCHED) as folder:
            _fetch(Path(folder), minor=known[1], processor=known[2])
            _pack(path, _files_below(Path(folder) / "site", PurePosixPath("site")), release_folder(release))
    return archive_of(tag)


def _fetch(folder: Path, *, minor: str, processor: str) -> None:
    wanted = folder / "wanted.lock"
    blocks = {found[1]: found[0] for found in _BLOCK.finditer((settings.BASE_DIR / "requirements.lock").read_text())}
    wanted.write_text("\n".join(blocks[name] for name in _wanted()) + "\n")
    command = (
        *("uv", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:"),
        *("--target", str(folder / "site"), "--python-platform", f"{processor}-manylinux_2_28"),
        *("--python-version", f"3.{minor}", "-r", str(wanted)),
    )
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ArchiveUnavailable(
            f"the packages for Python 3.{minor} on {processor} cannot be fetched: {error}"
        ) from None
    if done.returncode:
        why = done.stderr.strip()[-500:]
        raise ArchiveUnavailable(f"the packages for Python 3.{minor} on {processor} cannot be fetched: {why}")


def _wanted() -> list[str]:
    lines = (settings.BASE_DIR / "engine_agent/requirements.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _installed() -> Iterator[tuple[PurePosixPath, Path]]:
    """Files of the wanted packages in our own environment, by their names in the archive."""
    for name in _wanted():
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


def _source(checkout: Path) -> Iterator[tuple[PurePosixPath, Path]]:
    return _files_below(checkout / "engine_agent", PurePosixPath("engine_agent"))


def _pack(path: Path, packages: Iterator[tuple[PurePosixPath, Path]], source: Path) -> None:
    """Write the archive of a kept source: sorted, without times, owners or a trace of where it was made. Other
    processes may write the same at this moment, so each has a file of its own until it is whole."""
    own = ((PurePosixPath(RELEASE_FILE), source / RELEASE_FILE), *_source(source))
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, file in sorted((str(name), file) for name, file in (*packages, *own)):
            entry = tarfile.TarInfo(name)
            entry.mode = 0o755 if file.stat().st_mode & 0o100 else 0o644
            entry.size = file.stat().st_size
            with file.open("rb") as opened:
                tar.addfile(entry, opened)
    beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        with beside.open("xb") as output, gzip.GzipFile(fileobj=output, mode="wb", filename="", mtime=0) as packed:
            packed.write(content.getvalue())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
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
    """A name of what is packed: a source, and the versions of what it imports, which are our own."""
    known = hashlib.sha256((settings.BASE_DIR / "requirements.lock").read_bytes())
    for name, file in sorted(_source(checkout)):
        known.update(f"{name}\n".encode())
        known.update(file.read_bytes())
    return known.hexdigest()[:16]


def _is_ours_to_pack(release: str) -> bool:
    """Whether its source is here, and was made for the packages of our own environment."""
    return release_in(release_folder(release)) is not None and _id_of(release_folder(release)) == release


@cache
def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unfinished_archives_delete(now_s: float) -> int:
    """Deletes files that killed processes left while packing or fetching, and returns how many. `now_s` as `time.time`.
    Files younger than an hour may still be written by a process of any home that shares the cache."""
    removed = 0
    for path in (*_folder().glob("*.part"), *_folder().glob(f"{_FETCHED}*")):
        with suppress(OSError):  # another controller removes it, too
            if now_s - path.stat().st_mtime > LEFT_AFTER_S:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                removed += 1
    return removed


def archive_files() -> Iterator[tuple[Path, str]]:
    """Every archive in the cache, of any home, with the id of its release."""
    for path in _folder().glob("*.tar.gz"):
        tag, _, release = path.name.removesuffix(".tar.gz").rpartition("-")
        if TAG.fullmatch(tag) and is_release_id(release):
            yield path, release


def _path(tag: str, release: str) -> Path:
    return _folder() / f"{tag}-{release}.tar.gz"


def _folder() -> Path:
    folder: Path = settings.SWITCHYARD_CACHE / "agent"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
