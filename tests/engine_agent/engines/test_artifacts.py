"""Artifacts in folders, and the machine's cache: one process fills an entry, entries in use stay, the least recently
used go first."""

import fcntl
import hashlib
import json
import os
import threading
from pathlib import Path

import pytest

from engine_agent.engines import artifacts
from engine_agent.engines.artifacts import (
    FREE_RESERVE_BYTES,
    CannotFetch,
    Entry,
    acquire,
    describe_folder,
    entry_of,
    make_room,
    mark_damaged,
    read_manifest,
    size_limit,
    verify_folder,
    write_manifest,
)
from engine_agent.protocol.manifest import MANIFEST_NAME, BadArtifact, Manifest

SOURCE = {"file": "model.gguf"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "weights").write_bytes(b"1234")
    (tmp_path / "sub" / "tokens").write_bytes(b"abc")
    write_manifest(tmp_path, describe_folder(tmp_path, SOURCE))
    return tmp_path


def test_the_digest_is_that_of_sha256sums_lines() -> None:
    lines = "aa  x\nbb  a\n"
    assert Manifest({"a": "bb", "x": "aa"}, {}).digest == "sha256:" + hashlib.sha256(lines.encode()).hexdigest()


def test_a_whole_folder_gives_its_manifest(folder: Path) -> None:
    manifest = verify_folder(folder)
    assert set(manifest.files) == {"weights", "sub/tokens"}
    assert manifest.source == SOURCE
    assert verify_folder(folder, manifest.digest) == manifest


def test_the_same_files_have_the_same_digest_whatever_they_were_made_from(folder: Path) -> None:
    assert describe_folder(folder, {"file": "other"}).digest == read_manifest(folder).digest


def test_a_changed_file_is_named(folder: Path) -> None:
    (folder / "weights").write_bytes(b"1235")
    with pytest.raises(BadArtifact, match="weights is corrupt"):
        verify_folder(folder)


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "sub" / "tokens").unlink()
    with pytest.raises(BadArtifact, match="sub/tokens is missing"):
        verify_folder(folder)


def test_a_file_that_nobody_listed_is_named(folder: Path) -> None:
    (folder / "code.py").write_text("")
    with pytest.raises(BadArtifact, match=r"code\.py is not in manifest\.json"):
        verify_folder(folder)


def test_another_artifact_than_the_one_asked_for_is_refused(folder: Path) -> None:
    with pytest.raises(BadArtifact, match="sha256:00 was requested"):
        verify_folder(folder, "sha256:00")


def test_a_folder_without_a_manifest_is_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(BadArtifact, match="not an artifact"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"files": {"a": 1}, "source": {}, "digest": "x"}', '{"files": {}}'])
def test_what_is_not_a_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST_NAME).write_text(text)
    with pytest.raises(BadArtifact, match="is not a manifest"):
        read_manifest(tmp_path)


def test_a_manifest_that_names_another_digest_than_its_own_is_refused(folder: Path) -> None:
    path = folder / MANIFEST_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {"digest": "sha256:00"}))
    with pytest.raises(BadArtifact, match="but names sha256:00"):
        read_manifest(folder)


LIMIT_S = 10.0
"""Longer than any step here takes, however busy the machine is."""


def entry(cache: Path, name: str) -> Entry:
    return entry_of(f"sha256:{name * 64}", cache)


def fill(one: Entry, size: int, used_at_s: int) -> Entry:
    """Creates a complete entry of so many bytes that was last used at that time."""
    one.folder.mkdir(parents=True)
    (one.folder / "weights").write_bytes(b"x" * size)
    one.lock.touch()
    os.utime(one.lock, (used_at_s, used_at_s))
    return one


def coming(cache: Path, name: str) -> Entry:
    """An entry that a download of this process is about to fill."""
    one = entry(cache, name)
    one.partial.mkdir(parents=True)
    return one


def left(cache: Path) -> set[str]:
    return {path.name[0] for path in cache.iterdir() if path.is_dir() and not path.name.endswith(".partial")}


def nobody() -> None:
    raise AssertionError("there is nobody to wait for")


@pytest.mark.parametrize("digest", ["", "sha256:", "a" * 64, "sha256:../../etc/passwd", f"sha256:{'A' * 64}"])
def test_only_a_digest_becomes_a_path(digest: str, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="is not the digest of an artifact; it must be sha256: and 64 hexadecimal digits"
    ):
        entry_of(digest, tmp_path)


def test_what_was_used_longest_ago_goes_first_and_no_more_than_needed(tmp_path: Path) -> None:
    for name, used_at_s in (("a", 300), ("b", 100), ("c", 200)):
        fill(entry(tmp_path, name), 1000, used_at_s)
    make_room(coming(tmp_path, "d"), 1500, limit=3600)
    assert left(tmp_path) == {"a", "c"}
    assert not entry(tmp_path, "b").lock.exists()


def test_what_is_in_use_stays_however_long_ago_it_was_started(tmp_path: Path) -> None:
    old, new = fill(entry(tmp_path, "a"), 1000, 100), fill(entry(tmp_path, "b"), 1000, 200)
    kept = acquire(old, nobody, nobody)
    os.utime(old.lock, (100, 100))
    make_room(coming(tmp_path, "c"), 1000, limit=2500)
    assert left(tmp_path) == {"a"}
    assert old.lock.stat().st_mtime > 200  # so that it is not evicted when its engine exits
    os.close(kept)
    assert not new.folder.exists()


def test_nothing_is_removed_where_that_would_not_suffice(tmp_path: Path) -> None:
    fill(entry(tmp_path, "a"), 1000, 100)
    used = fill(entry(tmp_path, "b"), 1000, 200)
    kept = acquire(used, nobody, nobody)
    with pytest.raises(CannotFetch, match=r"the cache may have .* in use: raise SWITCHYARD_ARTIFACT_CACHE_GIB"):
        make_room(coming(tmp_path, "c"), 1500, limit=2400)
    assert left(tmp_path) == {"a", "b"}
    os.close(kept)


def test_a_full_disk_makes_room_too_and_counts_what_others_are_fetching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(entry(tmp_path, "a"), 1000, 100)
    other = coming(tmp_path, "b")
    (other.partial / "total").write_text("5000")
    free = FREE_RESERVE_BYTES + 5600
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": free})())
    with other.lock.open("w") as downloads:
        fcntl.flock(downloads, fcntl.LOCK_EX)
        make_room(coming(tmp_path, "c"), 1400, limit=None)
        assert left(tmp_path) == set()
        with pytest.raises(CannotFetch, match=r"has room for .* free space; artifacts in use are never removed"):
            make_room(coming(tmp_path, "d"), 10_000, limit=None)
    assert other.partial.exists()


def test_a_download_that_nobody_goes_on_with_is_removed_like_an_artifact(tmp_path: Path) -> None:
    stale = coming(tmp_path, "a")
    (stale.partial / "parts").write_bytes(b"x" * 1000)
    make_room(coming(tmp_path, "b"), 1000, limit=1500)
    assert not stale.partial.exists()


def test_what_a_crash_left_of_a_removal_goes_with_the_next_one(tmp_path: Path) -> None:
    (tmp_path / ".gone-x").mkdir()
    make_room(coming(tmp_path, "a"), 1, limit=None)
    assert not (tmp_path / ".gone-x").exists()


def test_two_starts_at_once_fill_it_once(tmp_path: Path) -> None:
    one, fills, began, may_end = entry(tmp_path, "a"), list[str](), threading.Event(), threading.Event()

    def slowly() -> None:
        fills.append("first")
        began.set()
        assert may_end.wait(LIMIT_S)
        one.folder.mkdir()

    def does_not_matter() -> None:
        pass

    held: list[int] = []
    first = threading.Thread(target=lambda: held.append(acquire(one, slowly, does_not_matter)))
    first.start()
    assert began.wait(LIMIT_S)
    held.append(acquire(one, lambda: fills.append("second"), may_end.set))
    first.join(LIMIT_S)
    assert not first.is_alive()
    for descriptor in held:
        os.close(descriptor)
    assert (len(held), fills) == (2, ["first"])


def test_who_waited_is_not_held_up_by_the_one_that_filled_it_and_keeps_it(tmp_path: Path) -> None:
    one, held = entry(tmp_path, "a"), list[int]()
    filling = os.open(one.lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(filling, fcntl.LOCK_EX)

    def it_is_filled_and_kept() -> None:
        one.folder.mkdir()
        fcntl.flock(filling, fcntl.LOCK_SH)

    waiting = threading.Thread(target=lambda: held.append(acquire(one, nobody, it_is_filled_and_kept)), daemon=True)
    waiting.start()
    waiting.join(LIMIT_S)
    assert len(held) == 1
    for descriptor in (*held, filling):
        os.close(descriptor)


def test_a_start_that_failed_leaves_the_next_one_to_try(tmp_path: Path) -> None:
    one = entry(tmp_path, "a")

    def fails() -> None:
        raise CannotFetch("no network")

    with pytest.raises(CannotFetch, match="no network"):
        acquire(one, fails, nobody)
    os.close(acquire(one, one.folder.mkdir, nobody))


def test_an_entry_that_is_removed_again_and_again_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(CannotFetch, match="was removed 5 times before it could be read"):
        acquire(entry(tmp_path, "a"), lambda: None, nobody)


def test_what_an_engine_found_damaged_is_the_beginning_of_the_next_download(tmp_path: Path) -> None:
    one = fill(entry(tmp_path, "a"), 10, 100)
    mark_damaged(one.folder)
    assert not one.is_complete

    def repaired() -> None:
        assert (one.partial / "files" / "weights").exists()
        (one.partial / "files").rename(one.folder)

    os.close(acquire(one, repaired, nobody))
    assert one.is_complete


def test_a_folder_that_is_not_of_a_cache_is_never_marked(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    mark_damaged(tmp_path / "models")
    assert [path.name for path in tmp_path.iterdir()] == ["models"]


def test_the_limit_is_whole_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    assert size_limit("") is None
    assert size_limit("200") == 200 * 1024**3
    for wrong in ("0", "-1", "1.5", "x", "9" * 30, "²"):
        with pytest.raises(CannotFetch, match=f"{artifacts.LIMIT_VARIABLE} is .* whole number of GiB above 0"):
            size_limit(wrong)
