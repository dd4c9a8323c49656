"""The packages that hand prompts over are installed next to the engine's environment, whole or not at all."""

import os
from pathlib import Path

import pytest

from engine_agent.engines.uv_install import CannotInstall, UvFailed
from engine_agent.engines.vllm import kv_transfer


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
