"""Reads the dynamic section of 64-bit ELF files: needed libraries, search paths, and required symbol versions. Format:
https://refspecs.linuxfoundation.org/LSB_5.0.0/LSB-Core-generic/LSB-Core-generic/symversion.html. Reads single places,
because libraries of engines have up to a gigabyte."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

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
