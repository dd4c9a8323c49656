"""The packages that hand prompts over are installed next to the engine's environment, whole or not at all; a store of
KV blocks keeps its limit."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.engines.uv_install import CannotInstall, UvFailed
from engine_agent.engines.vllm import kv_transfer
from engine_agent.engines.vllm.kv_transfer import UNUSED_BLOCK_S, StoredBlock, blocks_to_evict, store_key


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


@given(BLOCKS, st.integers(-10, 500))
def test_an_eviction_keeps_the_limit_and_the_latest_blocks(blocks: list[StoredBlock], limit: int) -> None:
    evicted = set(blocks_to_evict(blocks, limit, NOW_S))
    kept = [each for each in blocks if each.path not in evicted]
    assert sum(each.bytes for each in kept) <= max(0, limit)
    assert all(NOW_S - each.used_at_s <= UNUSED_BLOCK_S for each in kept)
    oldest_s = min((each.used_at_s for each in kept), default=NOW_S)
    assert all(each.used_at_s <= oldest_s for each in blocks if each.path in evicted)


def test_what_fits_stays() -> None:
    blocks = [StoredBlock(Path(str(number)), 10, NOW_S - number) for number in range(10)]
    assert blocks_to_evict(blocks, 100, NOW_S) == []
    assert blocks_to_evict(blocks, 99, NOW_S) == [Path("9"), Path("8")]  # down to nine tenths
    assert blocks_to_evict(blocks, 100, NOW_S + UNUSED_BLOCK_S - 8) == [Path("9")]


def test_engines_with_other_weights_arguments_or_vllm_share_no_blocks() -> None:
    stated = [("vllm 1", "sha256:1", ["--dtype"]), ("vllm 2", "sha256:1", ["--dtype"]), ("vllm 1", "sha256:2", [])]
    assert len({store_key(*each) for each in stated}) == 3
    assert store_key(*stated[0]) == store_key(*stated[0])
