"""Builds on a node: unpacks the parts of a build into the machine's cache, verified, and keeps them apart by digest. A
build that runs is locked by its engine, and so is never removed; others are removed by size and last use
(`engine_agent.engines.artifacts`). Opens no socket."""

import fcntl
import gzip
import io
import os
import platform
import shutil
import tarfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from engine_agent.engines.artifacts import LIMIT_VARIABLE as WEIGHTS_LIMIT
from engine_agent.engines.artifacts import CannotFetch, Entry, make_room
from engine_agent.protocol.engine_builds import (
    BUILD_FILE,
    BadBuild,
    BuildFacts,
    EngineBuild,
    HostFacts,
    parse_facts,
    part_names,
)
from engine_agent.protocol.manifest import MANIFEST_NAME, BadArtifact, Manifest, is_sha256, parse_manifest

LIMIT_VARIABLE = "SWITCHYARD_BUILD_CACHE_GIB"
_DAMAGE = (
    tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error,
    FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError,
)  # fmt: skip
"""What unpacking raises for a wrong archive, and not for a full disk."""
MOST_MEMBERS = 1_000_000
"""Files of an archive; vLLM for CUDA has 36,000."""


def host_facts(root: Path = Path("/")) -> HostFacts:
    """The facts that decide which builds run here. `root` replaces `/`."""
    name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    return HostFacts(
        cpu_arch=platform.machine(),
        cpu_flags=_cpu_flags(root / "proc/cpuinfo"),
        glibc=version if name == "glibc" else "",
        driver=_line(root / "sys/module/nvidia/version"),
    )


def _cpu_flags(file: Path) -> frozenset[str]:
    with suppress(OSError):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, flags = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(flags.split())
    return frozenset()


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def program_of(entry: Entry, facts: BuildFacts) -> Path:
    return entry.folder / "tree" / facts.program


def entries(folder: Path) -> list[Entry]:
    """The builds of a cache, complete or not. Raises FileNotFoundError if there is no cache yet."""
    return [Entry(folder, path.name) for path in sorted(folder.iterdir()) if is_sha256(path.name)]


def facts_of(entry: Entry) -> BuildFacts | None:
    try:
        return parse_facts((entry.folder / BUILD_FILE).read_bytes(), str(entry.folder))
    except (OSError, BadBuild):
        return None


def hold(entry: Entry) -> int | None:
    """Returns the descriptor of a shared lock on a complete build; None if it is not complete, or is being filled or
    removed."""
    if not entry.is_complete:
        return None
    descriptor = os.open(entry.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink > 0 and entry.is_complete:
            os.utime(descriptor)
            kept, descriptor = descriptor, -1
            return kept
    except BlockingIOError:
        return None
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return None


def parts_entry(entry: Entry) -> Entry:
    """Where the parts of a build arrive: inside its unfinished entry, in the layout of any artifact."""
    return Entry(entry.partial, entry.hex_digest)


def parts_folder(entry: Entry) -> Path:
    """The parts of a complete build, kept for other nodes."""
    return entry.folder / "parts"


def begin(entry: Entry, build: EngineBuild, facts: BuildFacts, limit: int | None) -> Entry:
    """Makes room for the parts and the unpacked build; returns the entry of the parts. The caller holds the lock.
    Raises CannotFetch if the disk or the limit is too small."""
    entry.partial.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.rmtree(entry.partial / "made", ignore_errors=True)
    try:
        make_room(entry, facts.packed_bytes + facts.unpacked_bytes, limit)
    except CannotFetch as error:
        raise CannotFetch(f"build {build.name}: {str(error).replace(WEIGHTS_LIMIT, LIMIT_VARIABLE)}") from None
    return parts_entry(entry)


def check_manifest(text: bytes, build: EngineBuild, facts: BuildFacts) -> Manifest:
    """Parses the manifest of a build. Raises CannotFetch if it is another build's, or lists other files than a build
    has."""
    where = f"the manifest of build {build.name}"
    try:
        manifest = parse_manifest(text, where)
    except BadArtifact as error:
        raise CannotFetch(str(error)) from None
    if manifest.digest != build.digest:
        raise CannotFetch(f"{where} has the digest {manifest.digest}, but the order says {build.digest}")
    if set(manifest.files) != {BUILD_FILE, *part_names(facts)}:
        raise CannotFetch(f"{where} lists other files than {BUILD_FILE} and {facts.parts} parts")
    return manifest


def finish(entry: Entry, build: EngineBuild, facts: BuildFacts, on_bytes: Callable[[int], None]) -> None:
    """Unpacks the arrived parts, whose digests were checked while they arrived, and makes the result the build. Raises
    CannotFetch if they are no archive of this build; nothing is left of it."""
    parts, made = parts_entry(entry).folder, entry.partial / "made"
    shutil.rmtree(made, ignore_errors=True)
    try:
        stated = parse_facts((parts / BUILD_FILE).read_bytes(), f"{BUILD_FILE} of build {build.name}")
        if stated != facts:
            raise CannotFetch(f"build {build.name} is not what the order says: its {BUILD_FILE} differs")
        _unpack(parts, made / "tree", facts, on_bytes)
        if not (made / "tree" / facts.program).is_file():
            raise CannotFetch(f"build {build.name} has no {facts.program}")
    except (BadBuild, *_DAMAGE, ValueError) as error:
        shutil.rmtree(entry.partial, ignore_errors=True)
        raise CannotFetch(f"build {build.name} cannot be unpacked: {error}") from None
    for name in (MANIFEST_NAME, BUILD_FILE):
        shutil.copyfile(parts / name, made / name)
    parts.rename(made / parts_folder(entry).name)
    if entry.folder.is_dir():
        shutil.rmtree(entry.folder)
    made.rename(entry.folder)
    # Engines have their own account and read the build, which is not secret; only this account may change it.
    entry.folder.chmod(0o755)
    shutil.rmtree(entry.partial, ignore_errors=True)


def _unpack(parts: Path, tree: Path, facts: BuildFacts, on_bytes: Callable[[int], None]) -> None:
    """Raises tarfile.TarError or ValueError for a member that is no file, folder or link inside the build, and if there
    is more than the facts state."""
    left, members = facts.unpacked_bytes, 0
    tree.mkdir(parents=True)
    with tarfile.open(fileobj=_Joined(parts, part_names(facts)), mode="r|") as tar:
        for member in tar:
            left, members = left - member.size, members + 1
            if left < 0 or members > MOST_MEMBERS:
                raise ValueError(f"it is larger than its {facts.unpacked_bytes} bytes or has too many files")
            tar.extract(member, tree, filter="data")
            on_bytes(member.size)
    for folder, _, _ in os.walk(tree):  # a thread must not change the umask, which also holds for the agent's secrets
        Path(folder).chmod(0o755)


class _Joined(io.RawIOBase):
    """The archive: the content of its parts, one after the other."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        self._paths = [folder / name for name in reversed(names)]
        self._file: gzip.GzipFile | None = None

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        while True:
            if self._file is None:
                if not self._paths:
                    return b""
                self._file = gzip.GzipFile(self._paths.pop())
            if content := self._file.read(size):
                return content
            self._file.close()
            self._file = None
