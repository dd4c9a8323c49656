"""Compile caches on a node: which starts may share one, and its folder as an archive. A cache holds code that engines
execute, so an archive has only plain files, and only those that its engine's account wrote are packed. Opens no
socket."""

import gzip
import hashlib
import json
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from engine_agent.engines.base import Launch, follower_count
from engine_agent.protocol.engine_builds import HostFacts
from engine_agent.protocol.fingerprint import Fingerprint
from engine_agent.protocol.messages import Assignment

LIMIT_VARIABLE = "SWITCHYARD_COMPILE_CACHE_GIB"
DEFAULT_LIMIT_GIB = "20"
MOST_FILES = 100_000
PACK_LEVEL = 1
"""Of gzip: machine code becomes a quarter at some 100 MB/s."""
NOT_COMPILED = ("kernel",)
"""Fields of a fingerprint that do not change what compilers write."""
PASSING = (".lock", ".tmp")
"""Ends of the names of files that are only used while an engine compiles."""


class BadCache(Exception):
    """The cache cannot be packed or unpacked; the text says why."""


@dataclass(frozen=True, slots=True)
class CompilePlace:
    """The facts of a node on which compiled code depends. `devices`: names of its accelerators. `paths`: folders whose
    absolute paths compilers write into their output, or hash."""

    host: HostFacts
    cores: int
    devices: tuple[str, ...]
    paths: tuple[str, ...]


def compile_key(assignment: Assignment, fingerprint: Fingerprint, place: CompilePlace) -> str:
    """The name of the cache of one rank: the SHA-256, in hexadecimal, of everything that its content depends on. Nodes
    share a cache only if all of it is equal.

    `fingerprint` is the rank's: versions of the engine or the digest of its build, drivers, weights, arguments and
    variables (with degrees, shapes and quantization). A draft model is not part of it."""
    plan = assignment.plan
    facts = {
        "engine": plan.engine,
        "role": assignment.cell_role.value,
        "rank": assignment.rank,
        "nodes": follower_count(assignment) + 1,
        "draft": plan.draft.digest if plan.draft is not None else "",
        "stack": {name: value for name, value in fingerprint.items() if name not in NOT_COMPILED},
        "cpu": [place.host.cpu_arch, *sorted(place.host.cpu_flags)],
        "glibc": place.host.glibc,
        "cores": place.cores,
        "devices": sorted(place.devices),
        "paths": list(place.paths),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def own_key(key: str, node_id: str) -> str:
    """The name of a node's folder for an engine whose processes must not share one."""
    return hashlib.sha256(f"{key} {node_id}".encode()).hexdigest()


def with_compile_cache(launch: Launch, given: Mapping[str, str], folder: Path) -> Launch:
    """The launch of an engine that compiles into this folder, except where the plan has `given` another place."""
    if launch.compiles is None:
        return launch
    places = {name: str(folder / below) for name, below in launch.compiles.variables.items() if name not in given}
    return replace(launch, env={**launch.env, **places}, writes=(folder, *launch.writes))


@dataclass(frozen=True, slots=True)
class PackedCache:
    """An archive of a cache. `digest`: `<hex>` of its bytes."""

    digest: str
    packed_bytes: int
    unpacked_bytes: int


def pack(folder: Path, shared: Sequence[str], to: Path, most_bytes: int) -> PackedCache | None:
    """Writes the `shared` folders below `folder` to the archive `to`; None if they have no file. The engine that wrote
    them may be hostile: links, devices and files of other accounts are left out. Raises BadCache if the archive would
    exceed `most_bytes`, or a file changed meanwhile."""
    total = members = 0
    with to.open("wb") as raw:
        hashed = _Hashed(raw)
        with (
            gzip.GzipFile("", "wb", PACK_LEVEL, hashed, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w|") as tar,
        ):
            for name, size, file in _plain_files(folder, shared):
                total, members = total + size, members + 1
                if hashed.bytes > most_bytes or members > MOST_FILES:
                    raise BadCache(f"it has more than {most_bytes} bytes or {MOST_FILES} files")
                member = tarfile.TarInfo(name)
                member.size, member.mtime, member.mode = size, int(os.fstat(file.fileno()).st_mtime), 0o600
                try:
                    tar.addfile(member, file)
                except OSError as error:
                    raise BadCache(f"{name} changed while it was read") from error
    if hashed.bytes > most_bytes:
        raise BadCache(f"it has {hashed.bytes} bytes; the limit is {most_bytes}")
    return PackedCache(hashed.sha256.hexdigest(), hashed.bytes, total) if members else None


def unpack(archive: Path, folder: Path, most_bytes: int) -> None:
    """Unpacks an archive into a new folder. Raises BadCache if it is none, has anything but plain files below that
    folder, or is larger than it states; nothing is left of it."""
    left, members = most_bytes, 0
    try:
        folder.mkdir(mode=0o700, parents=True)
        with tarfile.open(archive, mode="r|gz") as tar:
            for member in tar:
                left, members = left - member.size, members + 1
                if left < 0 or members > MOST_FILES:
                    raise BadCache(f"it has more than {most_bytes} bytes or {MOST_FILES} files")
                if not member.isreg():
                    raise BadCache(f"{member.name[:200]!r} is no plain file")
                tar.extract(member, folder, filter="data")
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, ValueError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise BadCache(str(error)) from None
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def give_to(folder: Path, uid: int, gid: int) -> None:
    """Makes an account the owner of a folder and of everything in it, which no other account can change meanwhile."""
    for _, folders, files, above in os.fwalk(folder):
        for name in (*folders, *files):
            os.chown(name, uid, gid, dir_fd=above, follow_symlinks=False)
    os.chown(folder, uid, gid, follow_symlinks=False)


def _plain_files(top: Path, shared: Sequence[str]) -> Iterator[tuple[str, int, IO[bytes]]]:
    """Path below `top`, size and content of each file, in order. `fwalk` enters no folder through a link."""
    owner = top.stat().st_uid
    for path, folders, names, above in os.fwalk(top):
        here = Path(path).relative_to(top)
        folders[:] = sorted(name for name in folders if _is_on_the_way(here / name, shared))
        for name in sorted(names):
            if name.endswith(PASSING) or not any(here.is_relative_to(below) for below in shared):
                continue
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            try:
                descriptor = os.open(name, flags, dir_fd=above)
            except OSError:  # a link, or gone
                continue
            with os.fdopen(descriptor, "rb") as file:
                found = os.fstat(descriptor)
                if stat.S_ISREG(found.st_mode) and found.st_uid == owner and found.st_nlink == 1:
                    yield str(here / name), found.st_size, file


def _is_on_the_way(folder: Path, shared: Sequence[str]) -> bool:
    return any(folder.is_relative_to(below) or Path(below).is_relative_to(folder) for below in shared)


class _Hashed:
    """A file to write to that counts and hashes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.bytes = 0

    def write(self, content: bytes) -> int:
        self.sha256.update(content)
        self.bytes += len(content)
        return self._file.write(content)

    def flush(self) -> None:
        self._file.flush()
