"""Checks the archive of a build while its parts arrive, without unpacking anything. Pure: bytes in, a refusal or the
next state out. It accepts only what `engine_agent/engines/builds/pack.py` writes: files, folders and links inside the
build, each once and sorted by path. Nodes check the archive again while they unpack it."""

import posixpath
import tarfile
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine_agent.protocol.engine_builds import PART_BYTES, BadBuild, BuildFacts
from engine_agent.protocol.manifest import wrong_path

BLOCK = tarfile.BLOCKSIZE
MOST_MEMBERS = 1_000_000
MOST_EXTENDED_BYTES = 64 * 1024
_INFLATED_AT_ONCE = 1024 * 1024
_GZIP = 31
"""`wbits` of zlib for one gzip member."""
_KINDS = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE)
_EXTENDED = frozenset({"path", "linkpath"})


@dataclass(slots=True)
class ArchiveWalk:
    """The check between two parts. `left`: bytes of files that may still come. `skip`: bytes before the next header.
    `held`: a header that the end of a part cut. `last`: path of the latest member. Sorted, all paths through a member
    follow it directly, so one path is enough to find those that lead through a file or link."""

    left: int
    program: str
    members: int = 0
    skip: int = 0
    held: bytes = b""
    extended: dict[str, str] = field(default_factory=dict)
    last: str = ""
    last_is_folder: bool = True
    has_program: bool = False
    has_ended: bool = False

    @classmethod
    def start(cls, facts: BuildFacts) -> "ArchiveWalk":
        return cls(left=facts.unpacked_bytes, program=facts.program)

    @classmethod
    def load(cls, stored: Mapping[str, Any]) -> "ArchiveWalk":
        return cls(**{**stored, "held": b64decode(stored["held"])})

    def stored(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in self.__slots__}
        return {**plain, "held": b64encode(self.held).decode()}

    def read_part(self, packed: Iterable[bytes]) -> None:
        """Continue with the chunks of a part. Raises BadBuild if it is not one gzip member of the part's size, or its
        content cannot belong to a build."""
        inflater, length = zlib.decompressobj(_GZIP), 0
        try:
            for chunk in packed:
                left, content = chunk, b""
                while left or len(content) == _INFLATED_AT_ONCE:
                    content = inflater.decompress(left, _INFLATED_AT_ONCE)
                    left = inflater.unconsumed_tail
                    length += len(content)
                    if length > PART_BYTES or inflater.unused_data:
                        raise BadBuild(f"a part has more than {PART_BYTES} bytes of archive, or other data after it")
                    self._read(content)
        except zlib.error as error:
            raise BadBuild(f"a part is not compressed with gzip: {error}") from None
        if not inflater.eof:
            raise BadBuild("a part is cut off")

    def finish(self) -> None:
        """Check the end of the archive. Raises BadBuild."""
        if not self.has_ended or self.held or self.extended:
            raise BadBuild("the archive is cut off")
        if not self.has_program:
            raise BadBuild(f"the archive has no {self.program}")

    def _read(self, content: bytes) -> None:
        data, at = self.held + content if self.held else content, 0
        self.held = b""
        while True:
            step = min(self.skip, len(data) - at)
            at, self.skip = at + step, self.skip - step
            if self.has_ended:
                if any(data[at:]):
                    raise BadBuild("the archive has data after its end")
                return
            header = data[at : at + BLOCK]
            if self.skip or len(header) < BLOCK:
                self.held = header
                return
            length = self._header(header, data[at + BLOCK : at + BLOCK + MOST_EXTENDED_BYTES])
            if length is None:
                self.held = data[at:]
                return
            at += length

    def _header(self, header: bytes, following: bytes) -> int | None:
        """Returns the length of a header; None if its extension has not arrived as a whole."""
        if not any(header):
            self.has_ended = True
            return BLOCK
        try:
            member = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
        except (tarfile.TarError, ValueError) as error:
            raise BadBuild(f"the archive is damaged after {self.members} members: {error}") from None
        if member.type == tarfile.XHDTYPE:
            if member.size > MOST_EXTENDED_BYTES - BLOCK or self.extended:
                raise BadBuild("the archive has a header that is too long, or two in a row")
            if len(following) < _padded(member.size):
                return None
            self.extended = _extended(following[: member.size])
            return BLOCK + _padded(member.size)
        name = self.extended.get("path", member.name).rstrip("/")
        self._check_member(name, self.extended.get("linkpath", member.linkname), member)
        self.extended = {}
        self.skip = _padded(member.size)
        return BLOCK

    def _check_member(self, name: str, target: str, member: tarfile.TarInfo) -> None:
        self.members += 1
        shown = repr(name[:200])
        if member.type not in _KINDS:
            raise BadBuild(f"{shown} in the archive is not a file, a folder or a symbolic link")
        if wrong := wrong_path(name):
            raise BadBuild(f"the archive has {shown}, {wrong.replace('artifact', 'build')}")
        if self.members > 1 and name.split("/") <= self.last.split("/"):
            raise BadBuild(f"the archive has {shown} after {self.last[:200]!r}; paths must be sorted, each once")
        if not self.last_is_folder and name.startswith(f"{self.last}/"):
            raise BadBuild(f"{shown} in the archive leads through {self.last[:200]!r}, which is no folder")
        self.last, self.last_is_folder = name, member.isdir()
        if member.mode & 0o7000:
            raise BadBuild(f"{shown} in the archive has the mode {member.mode:o}")
        if member.issym():
            _check_link(name, target, shown)
        if member.size < 0 or (member.size and not member.isreg()):
            raise BadBuild(f"{shown} in the archive is no file, but has content")
        self.left -= member.size
        if self.left < 0 or self.members > MOST_MEMBERS:
            raise BadBuild("the archive has more files or bytes than its build.json states")
        self.has_program = self.has_program or (name == self.program and not member.isdir())


def _check_link(name: str, target: str, shown: str) -> None:
    down = target
    while down.startswith("../"):
        down = down.removeprefix("../")
    reached = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    climbs = down != ".." and ".." in down.split("/")
    if not target or target.startswith("/") or "\0" in target or climbs or reached.split("/")[0] == "..":
        raise BadBuild(f"{shown} in the archive links to {target[:200]!r}, which is outside of the build")


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _extended(content: bytes) -> dict[str, str]:
    """The records of a pax header: `LENGTH NAME=VALUE` and a line feed, where the length counts the whole record."""
    records: dict[str, str] = {}
    while content:
        length, _, _ = content.partition(b" ")
        size = int(length) if length.isdigit() and len(length) < 6 else 0
        record = content[len(length) + 1 : size - 1]
        if not record or content[size - 1 : size] != b"\n":
            raise BadBuild("the archive has a damaged pax header")
        try:
            name, _, value = record.decode().partition("=")
        except UnicodeDecodeError:
            raise BadBuild("the archive has a pax header that is not UTF-8") from None
        if name not in _EXTENDED or name in records:
            raise BadBuild(f"the archive has a pax header with {name[:40]!r}; builds have only path and linkpath")
        records[name], content = value, content[size:]
    return records
