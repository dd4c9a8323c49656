"""The check of an archive while its parts arrive: what the packer writes passes however it is cut, and nothing else."""

import gzip
import io
import json
import tarfile
from collections.abc import Callable

import pytest

from engine_agent.protocol.engine_builds import PART_BYTES, BadBuild
from models_registry.builds.planner import ArchiveWalk
from tests.engine_agent.engines.builds.packed import Member, facts, tar_of

LONG = "lib/" + "d" * 120 + "/" + "f" * 120
WHOLE: tuple[Member, ...] = (("bin/sh", "../serve"), (LONG, b"x" * 700), ("lib/ü", b"y"), ("serve", b"#!/bin/sh\n"))


def walked(archive: bytes, *, piece: int = 0, unpacked_bytes: int = 1000) -> ArchiveWalk:
    """Each piece is a part, after which the check is stored and loaded."""
    walk = ArchiveWalk.start(facts(unpacked_bytes=unpacked_bytes))
    length = piece or max(1, len(archive))
    for first in range(0, len(archive), length):
        walk.read_part([gzip.compress(archive[first : first + length], mtime=0)])
        walk = ArchiveWalk.load(json.loads(json.dumps(walk.stored())))
    walk.finish()
    return walk


@pytest.mark.parametrize("piece", [0, 1, 100, 511, 512, 513, 1024])
def test_what_the_packer_writes_passes_however_it_is_cut(piece: int) -> None:
    walk = walked(tar_of(*WHOLE), piece=piece)
    assert (walk.members, walk.left) == (4, 1000 - 711)


def member(name: str = "serve", **columns: object) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    for column, value in columns.items():
        setattr(entry, column, value)
    return entry


def pax(**records: str) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(member(pax_headers=records))
    return content.getvalue()


@pytest.mark.parametrize(
    ("archive", "why"),
    [
        (lambda: tar_of(("../serve", b"")), "outside of the build"),
        (lambda: tar_of(("/serve", b"")), "outside of the build"),
        (lambda: tar_of(("a/./b", b"")), "not a plain path"),
        (lambda: tar_of(("bin", "../.."), ("serve", b"")), "outside of the build"),
        (lambda: tar_of(("bin", "/etc"), ("serve", b"")), "outside of the build"),
        (lambda: tar_of(("bin", "lib/../.."), ("serve", b"")), "outside of the build"),
        (lambda: tar_of(("lib", "."), ("lib/serve", b"")), "leads through 'lib', which is no folder"),
        (lambda: tar_of(("lib", b""), ("lib/a/b", b""), ("serve", b"")), "leads through 'lib', which is no folder"),
        (lambda: tar_of(("serve", b""), ("serve", b"")), "'serve' after 'serve'; paths must be sorted, each once"),
        (lambda: tar_of(("lib", "."), ("m", b""), ("lib/serve", b"")), "'lib/serve' after 'm'"),
        (lambda: tar_of(("lib-x", b""), ("lib/a", b""), ("serve", b"")), "'lib/a' after 'lib-x'"),
        (lambda: tar_of(member(type=tarfile.LNKTYPE, linkname="x")), "not a file, a folder or a symbolic link"),
        (lambda: tar_of(member(type=tarfile.BLKTYPE)), "not a file, a folder or a symbolic link"),
        (lambda: tar_of(member(type=tarfile.FIFOTYPE)), "not a file, a folder or a symbolic link"),
        (lambda: tar_of(member(mode=0o4755)), "has the mode 4755"),
        (lambda: tar_of(("serve", b"x" * 1001)), "more files or bytes"),
        (lambda: tar_of(("other", b"")), "has no serve"),
        (lambda: tar_of(member(type=tarfile.DIRTYPE)), "has no serve"),
        (lambda: tar_of(("serve", b""))[:512], "cut off"),
        (lambda: tar_of(("serve", b"x"))[:700], "cut off"),
        (lambda: tar_of(("serve", b"")) + b"x", "data after its end"),
        (lambda: tar_of(("serve", b"")) + tar_of(("more", b"")), "data after its end"),
        (lambda: b"x" * 512, "is damaged"),
        (lambda: b"", "cut off"),
        (lambda: pax(size="5"), "only path and linkpath"),
        (lambda: pax(**{"GNU.sparse.major": "1"}), "only path and linkpath"),
        (lambda: pax(path="../serve"), "outside of the build"),
    ],
)
def test_hostile_and_damaged_archives_are_refused(archive: Callable[[], bytes], why: str) -> None:
    with pytest.raises(BadBuild, match=why):
        walked(archive())


@pytest.mark.parametrize(
    ("packed", "why"),
    [
        (b"plain", "not compressed with gzip"),
        (gzip.compress(b"\0" * 1024)[:-9], "cut off"),
        (gzip.compress(b"\0" * 1024) + b"more", "other data after it"),
        (gzip.compress(b"\0" * 1024) + gzip.compress(b"\0"), "other data after it"),
    ],
    ids=["plain", "short", "more", "two"],
)
def test_a_part_is_one_whole_gzip_member(packed: bytes, why: str) -> None:
    with pytest.raises(BadBuild, match=why):
        ArchiveWalk.start(facts()).read_part([packed])


@pytest.mark.long
def test_a_part_that_inflates_to_more_than_a_part_is_refused() -> None:
    with pytest.raises(BadBuild, match="has more than"):
        ArchiveWalk.start(facts()).read_part([gzip.compress(bytes(PART_BYTES + 1), 1)])
