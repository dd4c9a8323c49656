"""Parts become a build only if they are the archive that the order names, and nothing in it leaves the build."""

import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_agent.engines.artifacts import (
    CannotFetch,
    Entry,
    acquire,
    entry_of,
    make_room,
)
from engine_agent.engines.builds.store import begin, check_manifest, finish, hold, parts_entry
from engine_agent.protocol.engine_builds import BuildFacts, EngineBuild
from tests.engine_agent.engines.builds.packed import Member, folder_of, ordered, tar_of

PROGRAM: Member = ("serve", b"#!/bin/sh\n")


def device() -> tarfile.TarInfo:
    entry = tarfile.TarInfo("sda")
    entry.type, entry.devmajor, entry.devminor = tarfile.BLKTYPE, 8, 0
    return entry


def arrived(cache: Path, content: bytes, **changes: Any) -> tuple[Entry, EngineBuild, BuildFacts]:
    """A build whose parts have arrived."""
    source = folder_of(cache.parent / "source", content, **{"unpacked_bytes": 1000, **changes})
    build = ordered(source)
    assert build.facts is not None
    entry = entry_of(build.digest, cache)
    cache.mkdir(exist_ok=True)
    begin(entry, build, build.facts, None)
    source.rename(parts_entry(entry).folder)
    return entry, build, build.facts


def unpacked(cache: Path, content: bytes, **changes: Any) -> Entry:
    entry, build, stated = arrived(cache, content, **changes)
    finish(entry, build, stated, lambda _: None)
    return entry


def test_parts_become_a_folder_that_others_can_read(tmp_path: Path) -> None:
    entry = unpacked(tmp_path / "cache", tar_of(PROGRAM, ("lib/x", b"x"), ("bin", "lib")))
    tree = entry.folder / "tree"
    assert (tree / "serve").read_bytes() == b"#!/bin/sh\n"
    assert (tree / "bin" / "x").read_bytes() == b"x"
    assert [(tree / name).stat().st_mode & 0o777 for name in ("serve", "lib")] == [0o755, 0o755]
    assert not entry.partial.exists()


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ((PROGRAM, ("../escaped", b"x")), "outside"),
        ((PROGRAM, ("link", "/etc")), "absolute"),
        ((PROGRAM, ("link", "../../..")), "outside"),
        ((PROGRAM, ("link", "."), ("link/../../escaped", b"x")), "outside"),
        ((PROGRAM, device()), "special file"),
        ((PROGRAM, ("big", b"x" * 1001)), "larger than its 1000 bytes"),
        ((PROGRAM, ("lib", b"x"), ("lib/a", b"x")), "cannot be unpacked"),
        ((PROGRAM, ("lib/a", b"x"), ("lib", b"x")), "cannot be unpacked"),
        ((("other", b"x"),), "has no serve"),
    ],
)
def test_what_leaves_the_build_or_is_none_is_refused_and_removed(
    tmp_path: Path, members: tuple[tarfile.TarInfo | Member, ...], reason: str
) -> None:
    entry, build, stated = arrived(tmp_path / "cache", tar_of(*members))
    with pytest.raises(CannotFetch, match=reason):
        finish(entry, build, stated, lambda _: None)
    assert not entry.is_complete
    assert not list(tmp_path.rglob("escaped"))


@pytest.mark.parametrize("content", [b"", b"no archive", tar_of(PROGRAM)[:700]])
def test_what_is_no_whole_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    entry, build, stated = arrived(tmp_path / "cache", content)
    with pytest.raises(CannotFetch, match=r"cannot be unpacked|has no serve"):
        finish(entry, build, stated, lambda _: None)
    assert not entry.is_complete


def test_facts_that_differ_from_the_order_are_refused(tmp_path: Path) -> None:
    entry, build, stated = arrived(tmp_path / "cache", tar_of(PROGRAM))
    ordered = msgspec.structs.replace(stated, program="other")
    with pytest.raises(CannotFetch, match="is not what the order says"):
        finish(entry, build, ordered, lambda _: None)


def _other_digest(build: EngineBuild) -> EngineBuild:
    return msgspec.structs.replace(build, digest="sha256:" + "0" * 64)


@pytest.mark.parametrize(
    ("change", "parts", "reason"),
    [
        (_other_digest, 2, "but the order says"),
        (lambda build: build, 3, "lists other files than build.json and 3 parts"),
    ],
)
def test_another_manifest_is_refused(
    tmp_path: Path, change: Callable[[EngineBuild], EngineBuild], parts: int, reason: str
) -> None:
    entry, build, stated = arrived(tmp_path / "cache", tar_of(PROGRAM))
    text = (parts_entry(entry).folder / "manifest.json").read_bytes()
    check_manifest(text, build, stated)
    with pytest.raises(CannotFetch, match=reason):
        check_manifest(text, change(build), msgspec.structs.replace(stated, parts=parts))


def test_a_build_in_use_stays_and_an_unused_one_makes_room(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    entry = unpacked(cache, tar_of(PROGRAM))
    lock = hold(entry)
    assert lock is not None
    other = entry_of("sha256:" + "1" * 64, cache)
    other.partial.mkdir()
    with pytest.raises(CannotFetch, match="raise SWITCHYARD_ARTIFACT_CACHE_GIB"):
        make_room(other, 1000, limit=1000)
    os.close(lock)
    make_room(other, 1000, limit=1000)
    assert not entry.folder.exists()
    assert hold(entry) is None


def test_a_build_that_is_being_filled_cannot_be_held(tmp_path: Path) -> None:
    entry, build, stated = arrived(tmp_path / "cache", tar_of(PROGRAM))
    seen: list[int | None] = []

    def fill() -> None:
        finish(entry, build, stated, lambda _: None)
        seen.append(hold(entry))

    os.close(acquire(entry, fill, lambda: None))
    assert seen == [None]
