"""The agent as one archive for hosts that join: our source and what it imports, unpacked, the same bytes each time.

One archive for each Python and processor. That of the control plane's own is packed from its own environment, which
`requirements.lock` pins; others are fetched once, by the lock's hashes, when an operator orders them
(`manage.py agent_archive`). A host asks nobody else for anything.
"""

import gzip
import hashlib
import io
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from django.conf import settings

PYTHONS = ("cp311", "cp312", "cp313", "cp314")
PROCESSORS = ("x86_64", "aarch64")
TAG = re.compile(r"cp3(1[1-9])-(x86_64|aarch64)")
FETCH_LIMIT_S = 300.0
SERVICES_KEPT = frozenset({"s3", "sts", "sso", "sso-oidc"})
"""Of the services that botocore describes: those that artifacts are fetched by. The others are most of it."""
_BLOCK = re.compile(r"^([a-z0-9._-]+)(?:\[[^]]*\])?==[^\n]*(?:\n[ \t]+[^\n]*)*", re.MULTILINE)

_building = threading.Lock()


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


def archives() -> list[AgentArchive]:
    """Every archive of this release that is on disk, that of our own Python first; it is packed if it must be."""
    with _building:
        own = _path(own_tag())
        if not own.exists():
            _pack(own, _installed())
    paths = [own, *(path for path in sorted(own.parent.glob(f"*-{_release()}.tar.gz")) if path != own)]
    return [AgentArchive(path.name.removesuffix(f"-{_release()}.tar.gz"), path, _digest(path)) for path in paths]


def archive_of(tag: str) -> AgentArchive:
    """The archive for one Python and processor.

    Raises:
        ArchiveUnavailable: there is none.
    """
    for archive in archives():
        if archive.tag == tag:
            return archive
    raise ArchiveUnavailable(f"there is no archive for {tag[:40]!r}; `manage.py agent_archive {tag[:40]}` fetches one")


def archive_fetch(tag: str) -> AgentArchive:
    """Make the archive for another Python or processor, from a package index, by the hashes of our lock.

    Raises:
        ArchiveUnavailable: not a tag, or a package has no such wheel or cannot be fetched.
    """
    known = TAG.fullmatch(tag)
    if known is None:
        raise ArchiveUnavailable(f"{tag!r} is none of {', '.join(PYTHONS)} with - and {' or '.join(PROCESSORS)}")
    path = _path(tag)
    if tag != own_tag() and not path.exists():
        with tempfile.TemporaryDirectory(dir=_folder()) as folder:
            _fetch(Path(folder), minor=known[1], processor=known[2])
            _pack(path, _files_below(Path(folder) / "site", PurePosixPath("site")))
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


def _source() -> Iterator[tuple[PurePosixPath, Path]]:
    return _files_below(settings.BASE_DIR / "engine_agent", PurePosixPath("engine_agent"))


def _pack(path: Path, packages: Iterator[tuple[PurePosixPath, Path]]) -> None:
    """Write the archive: sorted, without times, owners or a trace of where it was made."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, file in sorted((str(name), file) for name, file in (*packages, *_source())):
            entry = tarfile.TarInfo(name)
            entry.mode = 0o755 if file.stat().st_mode & 0o100 else 0o644
            entry.size = file.stat().st_size
            with file.open("rb") as opened:
                tar.addfile(entry, opened)
    beside = path.with_suffix(".part")
    with beside.open("wb") as output, gzip.GzipFile(fileobj=output, mode="wb", filename="", mtime=0) as packed:
        packed.write(content.getvalue())
    beside.replace(path)


@cache
def _release() -> str:
    """A name of what is packed: our source, and the versions of what it imports."""
    known = hashlib.sha256((settings.BASE_DIR / "requirements.lock").read_bytes())
    for name, file in sorted(_source()):
        known.update(f"{name}\n".encode())
        known.update(file.read_bytes())
    return known.hexdigest()[:16]


@cache
def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _path(tag: str) -> Path:
    return _folder() / f"{tag}-{_release()}.tar.gz"


def _folder() -> Path:
    folder: Path = settings.SWITCHYARD_CACHE / "agent"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
