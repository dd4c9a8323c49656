"""Packs an installed engine with its Python into a build: a folder that runs from any place, as an archive in parts.

A virtual environment cannot move, so the interpreter's own prefix is copied and the packages are put into it. Its
libraries that are no part of glibc are carried along, and the search paths in its ELF files become relative
(https://man7.org/linux/man-pages/man8/ld.so.8.html). The same input gives the same bytes. Runs no code of the packages.
"""

import contextlib
import fcntl
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine_agent.engines.artifacts import write_manifest
from engine_agent.engines.builds.elf import CannotPack, elf_files, least_glibc, relocate
from engine_agent.engines.uv_install import removed_on_failure
from engine_agent.protocol.engine_builds import (
    BUILD_FILE,
    PART_BYTES,
    PART_PREFIX,
    BuildFacts,
    part_names,
    wrong_facts,
)
from engine_agent.protocol.manifest import Manifest

Say = Callable[[str], None]

INTERPRETER = "bin/python"
LEFT_OUT = frozenset({"test", "idlelib", "tkinter", "turtledemo", "ensurepip", "site-packages", "__pycache__"})
"""Of the standard library, and its folders `config-*`, which are for embedding. No engine imports them."""
LEFT_OUT_EXTENSIONS = ("_tkinter.", "nis.", "_crypt.", "_test", "_ctypes_test.", "_xxtestfuzz.", "xxlimited")
"""Their libraries need newer versions of glibc than the interpreter, and X11."""
LEFT_OUT_OF_ENVIRONMENTS = frozenset(
    {"bin", "lib64", "include", "pyvenv.cfg", "CACHEDIR.TAG", ".gitignore", ".lock", "installed", "__pycache__"}
)
COMPILE_LIMIT_S = 1800.0
COMPILE_LISTS = 8
GZIP_LEVEL = 4
"""Of zlib. On packages of vLLM, level 6 takes twice the time of level 4 and saves 3 % of the bytes; level 1 takes 0.7
of it and costs 8 %."""
MOST_PACKERS = 8
"""Threads that compress, and so parts in memory: at most ten of 64 MiB."""
_GZIP = 31
"""`wbits` of zlib for a gzip file: it has no time and no name."""
PIECE_BYTES = 1024**2
"""Read and compressed in one go; a thread of a stopped process finishes no more than this."""
SAY_EVERY_BYTES = 10**9


@dataclass(frozen=True, slots=True)
class PackSource:
    """What is packed. `environment`: an installed virtual environment of this process's Python, whose packages are
    taken. `files`: further files by their path in the build; a script among them may be the program. `host_python`: the
    version of a host's Python that the program starts; empty: the build brings its own."""

    serves: str
    version: str
    platform: str
    environment: Path | None = None
    program: str = INTERPRETER
    files: Mapping[str, Path] | None = None
    cpu_flags: tuple[str, ...] = ()
    least_driver: str = ""
    host_python: str = ""


def pack_build(source: PackSource, to: Path, say: Say, *, compiled: bool = True, part_bytes: int = PART_BYTES) -> str:
    """Writes the build to the new folder `to`: `manifest.json`, `build.json` and the parts of its archive. Returns its
    digest. `compiled`: with bytecode, which nodes may not write. Raises CannotPack if a file or tool is missing, the
    result would be no valid build, or another process packs the same folder. Raises OSError if a folder cannot be
    written. Without success `to` does not exist."""
    unfinished = to.with_name(f".{to.name}.unfinished")
    with _held(unfinished), removed_on_failure(unfinished):
        digest = _pack(source, unfinished, say, compiled, part_bytes)
        unfinished.rename(to)
    return digest


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """An empty folder, locked by this process. Removes what a killed process left in it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotPack(f"another process packs into {folder}") from None
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield
    finally:
        os.close(descriptor)


def _pack(source: PackSource, to: Path, say: Say, compiled: bool, part_bytes: int) -> str:
    tree = to / "tree"
    say("copying the packages …" if source.host_python else "copying the interpreter and the packages …")
    if not source.host_python:
        _copy_interpreter(tree)
    if source.environment is not None:
        _copy_packages(source.environment, tree)
    for path, file in (source.files or {}).items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, tree / path)
    if source.host_python:
        files = elf_files(tree)
    else:
        say("making its libraries relocatable …")
        files = relocate(tree)
    if compiled and not source.host_python:
        say("compiling bytecode …")
        _compile(tree)
    if not (tree / source.program).is_file():
        raise CannotPack(f"the build has no program {source.program}")
    unpacked, parts = _write_parts(tree, to, part_bytes, say)
    facts = BuildFacts(
        serves=source.serves,
        version=source.version,
        platform=source.platform,
        program=source.program,
        python=source.host_python or ".".join(map(str, sys.version_info[:3])),
        cpu_arch=os.uname().machine,
        least_glibc=least_glibc(files),
        unpacked_bytes=unpacked,
        packed_bytes=sum(part.bytes for part in parts),
        parts=len(parts),
        cpu_flags=source.cpu_flags,
        least_driver=source.least_driver,
    )
    if wrong := wrong_facts(facts):
        raise CannotPack(f"the build would not be valid: {wrong}")
    shutil.rmtree(tree)
    text = msgspec.json.format(msgspec.json.encode(facts)) + b"\n"
    (to / BUILD_FILE).write_bytes(text)
    digests = dict(zip(part_names(facts), (part.sha256 for part in parts), strict=True))
    listed = {BUILD_FILE: hashlib.sha256(text).hexdigest(), **digests}
    manifest = Manifest(listed, {"engine": source.serves, "version": source.version, "platform": source.platform})
    write_manifest(to, manifest)
    return manifest.digest


def pack_python(to: Path) -> str:
    """Writes this process's Python alone to the archive `to`, for hosts whose own is older. Returns the oldest glibc
    that it runs with. Raises CannotPack if a library or tool is missing. Raises OSError if the disk refuses."""
    with tempfile.TemporaryDirectory(dir=to.parent) as folder:
        tree = Path(folder) / "python"
        _copy_interpreter(tree)
        shutil.rmtree(tree / "include", ignore_errors=True)
        floor = least_glibc(relocate(tree))
        packed = Path(folder) / to.name
        with (
            packed.open("xb") as file,
            gzip.GzipFile("", "wb", GZIP_LEVEL, file, mtime=0) as content,
            tarfile.open(fileobj=content, mode="w|", format=tarfile.PAX_FORMAT) as tar,
        ):
            for path in sorted(tree.rglob("*")):
                _add(tar, path, path.relative_to(tree).as_posix())
        packed.replace(to)
    return floor


# --- the interpreter and the packages ---------------------------------------------------------------------------------


def _copy_interpreter(tree: Path) -> None:
    """The prefix of the Python that runs this, without what engines never import."""
    prefix, name = Path(sys.base_prefix), f"python{sys.version_info.major}.{sys.version_info.minor}"
    (tree / "bin").mkdir(parents=True)
    (tree / "lib").mkdir()
    shutil.copy2(prefix / "bin" / name, tree / "bin" / name)
    for link in (INTERPRETER, "bin/python3"):
        (tree / link).symlink_to(name)
    shared = sysconfig.get_config_var("INSTSONAME")
    if sysconfig.get_config_var("Py_ENABLE_SHARED") and shared:
        found = prefix / "lib" / shared
        at = found if found.exists() else Path(str(sysconfig.get_config_var("LIBDIR"))) / shared
        shutil.copy2(at, tree / "lib" / shared)
    standard = Path(sysconfig.get_path("stdlib", vars={"installed_base": str(prefix), "base": str(prefix)}))
    shutil.copytree(standard, tree / "lib" / name, symlinks=True, ignore=_left_out_of_stdlib(standard))
    (tree / "lib" / name / "site-packages").mkdir(exist_ok=True)
    headers = prefix / "include" / name
    if headers.is_dir():  # torch compiles extensions against them
        shutil.copytree(headers, tree / "include" / name)


def _left_out_of_stdlib(standard: Path) -> Callable[[str, list[str]], set[str]]:
    def ignore(folder: str, names: list[str]) -> set[str]:
        if Path(folder) == standard:
            return {name for name in names if name in LEFT_OUT or name.startswith("config-")}
        unused = LEFT_OUT_EXTENSIONS if Path(folder) == standard / "lib-dynload" else ()
        return {name for name in names if name == "__pycache__" or name.startswith(unused)}

    return ignore


def _copy_packages(environment: Path, tree: Path) -> None:
    """Hard links where possible: nothing below changes a package's file."""

    def ignore(folder: str, names: list[str]) -> set[str]:
        return set(names) & (LEFT_OUT_OF_ENVIRONMENTS if Path(folder) == environment else {"__pycache__"})

    shutil.copytree(environment, tree, symlinks=True, ignore=ignore, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, to: str) -> None:
    try:
        os.link(source, to)
    except OSError:
        shutil.copy2(source, to)


def _compile(tree: Path) -> None:
    """Bytecode that is valid whatever the times of the files, by the packed interpreter. A file's bytes depend on what
    its process compiled before, so the files are always cut into the same lists, with one process each. Files of a
    package that do not compile, such as templates, are left as they are. Raises CannotPack if a process is killed or
    takes too long."""
    until, running = time.monotonic() + COMPILE_LIMIT_S, deque[subprocess.Popen[str]]()
    try:
        for files in _compile_lists(tree):
            if len(running) >= (os.cpu_count() or 1):
                _compiled(running[0], until)
                running.popleft()
            running.append(_compiler(tree, files))
        for process in running:
            _compiled(process, until)
    finally:
        for process in running:
            process.kill()
            process.wait()


def _compile_lists(tree: Path) -> list[list[Path]]:
    """About as many bytes in each, and each folder in as few as possible: processes wait for each other there."""
    files = [(path, path.stat().st_size) for path in sorted((tree / "lib").rglob("*.py")) if path.is_file()]
    lists: list[list[Path]] = [[] for _ in range(COMPILE_LISTS)]
    total, before = sum(size for _, size in files) + 1, 0
    for path, size in files:
        lists[before * COMPILE_LISTS // total].append(path)
        before += size
    return lists


def _compiler(tree: Path, files: list[Path]) -> "subprocess.Popen[str]":
    """`-B`: its own imports leave no other bytecode. Not `-I`: that ignores PYTHONHASHSEED, which fixes the order of
    sets."""
    options = ("-q", "-f", "-j", "1", "--invalidation-mode", "unchecked-hash", "-s", str(tree), "-i", "-")
    process = subprocess.Popen(
        [tree / INTERPRETER, "-B", "-P", "-s", "-m", "compileall", *options],
        env={"PATH": os.environ.get("PATH", ""), "PYTHONHASHSEED": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with contextlib.suppress(BrokenPipeError), process.stdin or io.StringIO() as listed:
        listed.write("".join(f"{file}\n" for file in files))
    return process


def _compiled(process: "subprocess.Popen[str]", until: float) -> None:
    try:
        status = process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise CannotPack(f"its bytecode was not compiled within {COMPILE_LIMIT_S:.0f} s") from None
    if status < 0:
        raise CannotPack(f"signal {-status} killed a process that compiled bytecode")


# --- the archive ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    bytes: int
    sha256: str


def _write_parts(tree: Path, to: Path, part_bytes: int, say: Say) -> tuple[int, list[_Part]]:
    """Writes the archive: sorted, without times, owners or paths of this host. Returns the bytes of its files, and its
    parts."""
    paths, said = sorted(tree.rglob("*")), 0
    total = sum(path.lstat().st_size for path in paths if path.is_file() and not path.is_symlink())
    say(f"packing {total / 1e9:.1f} GB …")
    with _Parts(to, part_bytes) as parts:
        with tarfile.TarFile(fileobj=parts, mode="w", format=tarfile.PAX_FORMAT, copybufsize=PIECE_BYTES) as tar:
            for path in paths:
                _add(tar, path, path.relative_to(tree).as_posix())
                if parts.tell() - said >= SAY_EVERY_BYTES:
                    said = parts.tell()
                    say(f"  packed {said / 1e9:.1f} of {total / 1e9:.1f} GB")
        return total, parts.finish()


class _Parts(io.RawIOBase):
    """Cuts what is written into parts. Each is a complete gzip file, so that cores compress them together, and
    `cat part-* | tar xz` unpacks them."""

    def __init__(self, folder: Path, length: int) -> None:
        self._folder, self._length = folder, length
        self._cores = min(os.cpu_count() or 1, MOST_PACKERS)
        self._taken = 0
        self._pool = ThreadPoolExecutor(self._cores)
        self._stopped = threading.Event()
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._waiting: deque[Future[_Part]] = deque()
        self._parts: list[_Part] = []
        self._number = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._taken

    def write(self, content: Any) -> int:
        size, rest = len(content), content
        self._taken += size
        while len(rest) >= (room := self._length - self._held_bytes):
            self._held.append(rest[:room])
            self._submit()
            rest = rest[room:]
        self._held.append(rest)
        self._held_bytes += len(rest)
        return size

    def finish(self) -> list[_Part]:
        """Writes the last part. Returns all. Raises OSError if one could not be written."""
        if self._held_bytes:
            self._submit()
        self._parts += [each.result() for each in self._waiting]
        return self._parts

    def close(self) -> None:
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)
        super().close()

    def _submit(self) -> None:
        if len(self._waiting) > self._cores:  # bounds the memory
            self._parts.append(self._waiting.popleft().result())
        path = self._folder / f"{PART_PREFIX}{self._number:04d}"
        self._waiting.append(self._pool.submit(self._write_part, path, self._held))
        self._held, self._held_bytes = [], 0
        self._number += 1

    def _write_part(self, path: Path, pieces: list[bytes]) -> _Part:
        """Writes one gzip file; hashes it on the way, so that nothing is read again. Leaves it cut off if the pack is
        stopped."""
        packer, digest, size = zlib.compressobj(GZIP_LEVEL, wbits=_GZIP), hashlib.sha256(), 0
        with path.open("xb") as file:
            for piece in (*pieces, None):
                if self._stopped.is_set():
                    break
                packed = packer.flush() if piece is None else packer.compress(piece)
                digest.update(packed)
                size += file.write(packed)
        return _Part(size, digest.hexdigest())


def _add(tar: tarfile.TarFile, path: Path, name: str) -> None:
    entry = tarfile.TarInfo(name)
    if path.is_symlink():
        entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, os.readlink(path), 0o777
        tar.addfile(entry)
    elif path.is_dir():
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(entry)
    elif path.is_file():
        entry.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
        entry.size = path.stat().st_size
        with path.open("rb") as file:
            tar.addfile(entry, file)
