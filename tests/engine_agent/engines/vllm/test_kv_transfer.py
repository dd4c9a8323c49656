"""The packages that hand prompts over are installed next to the engine's environment, whole or not at all; a store of
KV blocks keeps its limit."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.engines.artifacts import FREE_RESERVE_BYTES
from engine_agent.engines.uv_install import CannotInstall, UvFailed
from engine_agent.engines.vllm import kv_transfer
from engine_agent.engines.vllm.kv_transfer import (
    SCAN_SHARE,
    UNUSED_BLOCK_S,
    StoredBlock,
    blocks_to_evict,
    delete_unused_blocks,
    store_bounds,
    store_key,
)


def test_packages_are_installed_once_and_again_for_another_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    class Uv:
        def __init__(self, say: object) -> None: ...

        def run(self, arguments: tuple[str, ...], *, limit_s: float) -> None:
            made.append(Path(arguments[arguments.index("--target") + 1]))
            made[-1].mkdir()
            (made[-1] / f"version-{len(made)}").touch()

    monkeypatch.setattr(kv_transfer, "UvProgram", Uv)
    for _ in range(2):
        assert kv_transfer.install(tmp_path, print) == tmp_path / "engines" / "vllm-kv-transfer"
    assert len(made) == 1

    (tmp_path / "lock").write_text("nixl==2")
    monkeypatch.setattr(kv_transfer, "LOCK", tmp_path / "lock")
    kv_transfer.install(tmp_path, print)

    assert sorted(os.listdir(made[0])) == ["installed", "version-2"]


def test_a_package_that_cannot_be_installed_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Uv:
        def __init__(self, say: object) -> None: ...

        def run(self, arguments: tuple[str, ...], *, limit_s: float) -> None:
            Path(arguments[arguments.index("--target") + 1]).mkdir()
            raise UvFailed("out of room")

    monkeypatch.setattr(kv_transfer, "UvProgram", Uv)
    with pytest.raises(CannotInstall, match="out of room"):
        kv_transfer.install(tmp_path, print)
    assert os.listdir(tmp_path / "engines") == ["vllm-kv-transfer.lock"]


NOW_S = 1e6
AGES_S = st.floats(0, 2 * UNUSED_BLOCK_S).map(lambda age_s: NOW_S - age_s)
BLOCKS = st.lists(st.builds(StoredBlock, st.uuids().map(lambda name: Path(str(name))), st.integers(0, 50), AGES_S))


@given(BLOCKS, st.integers(0, 500))
def test_an_eviction_keeps_the_limit_and_the_latest_blocks(blocks: list[StoredBlock], limit: int) -> None:
    evicted = set(blocks_to_evict(blocks, limit))
    kept = [each for each in blocks if each.path not in evicted]
    assert sum(each.bytes for each in kept) <= limit
    oldest_s = min((each.used_at_s for each in kept), default=NOW_S)
    assert all(each.used_at_s <= oldest_s for each in blocks if each.path in evicted)


def test_what_fits_stays() -> None:
    blocks = [StoredBlock(Path(str(number)), 10, NOW_S - number) for number in range(10)]
    assert blocks_to_evict(blocks, 100) == []
    assert blocks_to_evict(blocks, 99) == [Path("9"), Path("8")]  # down to nine tenths


SIZES = st.integers(0, 2**45)


@given(SIZES, SIZES, SIZES)
def test_what_is_written_until_the_next_scan_leaves_the_reserve_of_the_disk(limit: int, stored: int, free: int) -> None:
    allowed, until_scan = store_bounds(limit, stored, free)
    assert 0 <= allowed <= limit
    assert allowed + until_scan <= max(0, stored + free - FREE_RESERVE_BYTES)
    if free > limit + FREE_RESERVE_BYTES + limit // SCAN_SHARE:
        assert (allowed, until_scan) == (limit, limit // SCAN_SHARE)


def test_blocks_of_cells_that_left_are_deleted_after_a_day_and_nothing_else(tmp_path: Path) -> None:
    store, outside = tmp_path / "kv", tmp_path / "outside"
    old, new = store / "version/0/old.bin", store / "version/1/new.bin"
    for path in (old, new, outside / "journal.json", outside / "0" / "old.bin"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"block")
    for link, target in ((store / "above", outside), (store / "version/file", outside / "journal.json")):
        link.symlink_to(target)
    for path in (old, outside / "journal.json", outside / "0" / "old.bin"):
        os.utime(path, (NOW_S - UNUSED_BLOCK_S - 1, NOW_S - UNUSED_BLOCK_S - 1))
    os.utime(new, (NOW_S, NOW_S))
    os.mkfifo(store / "version/pipe")
    os.utime(old.parent, (0, 0))
    os.utime(new.parent, (0, 0))
    delete_unused_blocks(store, NOW_S)
    assert sorted(path.relative_to(store).as_posix() for path in store.rglob("*") if not path.is_symlink()) == [
        "version", "version/1", "version/1/new.bin", "version/pipe",
    ]  # fmt: skip
    assert len([path for path in outside.rglob("*") if path.is_file()]) == 2
    delete_unused_blocks(tmp_path / "none", NOW_S)
    delete_unused_blocks(store / "above", NOW_S)
    assert (outside / "0" / "old.bin").exists()


def test_engines_with_other_weights_arguments_or_vllm_share_no_blocks() -> None:
    stated = [("vllm 1", "sha256:1", ["--dtype"]), ("vllm 2", "sha256:1", ["--dtype"]), ("vllm 1", "sha256:2", [])]
    assert len({store_key(*each) for each in stated}) == 3
    assert store_key(*stated[0]) == store_key(*stated[0])
