"""Weights are checked before another project's engine runs, which gets no secret."""

from pathlib import Path
from typing import Any

import pytest

from engine_agent.engines.artifacts import describe_folder, write_manifest
from engine_agent.engines.checked_start import EXIT_BAD_ARTIFACT, EXIT_CANNOT_RUN, main


@pytest.fixture
def weights(tmp_path: Path) -> tuple[Path, str]:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"abc")
    manifest = describe_folder(folder, {})
    write_manifest(folder, manifest)
    return folder, manifest.digest


def words(folder: Path, digest: str, *more: str) -> list[str]:
    return ["--node-id", "n-1", "--model-dir", str(folder), "--digest", digest, *more]


def test_it_becomes_the_command_with_its_files_and_without_secrets(
    weights: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SWITCHYARD_CELL_SECRET", "PYTHONPATH", "NCCL_DEBUG"):
        monkeypatch.setenv(name, "x")
    link, file = tmp_path / "own" / "llama", tmp_path / "own" / "config.yml"
    became: list[Any] = []
    more = ("--link", str(link), "--file", str(file), "{}", "--", "/bin/engine", "--port", "1")
    for _ in range(2):  # a second start finds the first one's files
        main(words(*weights, *more), lambda *given: became.append(given))
    program, command, env = became[1]
    assert (program, command) == ("/bin/engine", ["/bin/engine", "--port", "1"])
    assert (link.resolve(), file.read_text()) == (weights[0].resolve(), "{}")
    assert env["NCCL_DEBUG"] == "x"
    assert not {"SWITCHYARD_CELL_SECRET", "PYTHONPATH"} & env.keys()


def test_what_cannot_run_says_why(weights: tuple[Path, str], capfd: pytest.CaptureFixture[str]) -> None:
    folder, digest = weights
    assert main(words(folder, digest)) == 2
    assert main(words(folder, digest, "--", str(folder / "missing"))) == EXIT_CANNOT_RUN
    assert "missing" in capfd.readouterr().err
    (folder / "model.safetensors").write_bytes(b"xyz")
    assert main(words(folder, digest, "--", "/bin/true")) == EXIT_BAD_ARTIFACT
    assert "model.safetensors" in capfd.readouterr().err
