"""The first half of a rank's life: weights come, and the process becomes the engine."""

from pathlib import Path

import pytest

from engine_agent.engines.neuron.launch import EXIT_BAD_ARTIFACT, main
from engine_agent.engines.s3_artifact import cached_folder
from engine_agent.protocol.messages import Artifact
from tests.engine_agent.engines.s3_server import empty_bucket, s3_server, upload


class Became:
    """Notes what the process would have become."""

    def __init__(self) -> None:
        self.argv: list[str] = []

    def __call__(self, program: str, argv: list[str]) -> None:
        assert program == argv[0]
        self.argv = argv


def fetching(*artifacts: Artifact, cache: Path) -> list[str]:
    fetch = [word for item in artifacts for word in ("--fetch", item.uri, item.digest)]
    return [
        "--python",
        "/neuron/bin/python",
        "--artifacts",
        str(cache),
        *fetch,
        "--",
        "--rank",
        "0",
        "--",
        "--seed",
        "1",
    ]


def test_weights_come_from_s3_and_the_rest_of_the_line_is_the_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    became = Became()
    with s3_server() as url:
        artifact = upload(empty_bucket(url, monkeypatch), tmp_path / "source", {"a.bin": b"weights"})
        assert main(fetching(artifact, Artifact("file:///draft", "sha256:2"), cache=tmp_path / "cache"), became) == 0
    assert (cached_folder(artifact, tmp_path / "cache") / "a.bin").read_bytes() == b"weights"
    serve = ["/neuron/bin/python", "-m", "engine_agent.engines.neuron.serve"]
    assert became.argv == [*serve, "--rank", "0", "--", "--seed", "1"]


def test_weights_on_disk_are_left_to_the_engine_to_check(tmp_path: Path) -> None:
    became = Became()
    assert main(fetching(Artifact("file:///not/looked/at", "sha256:1"), cache=tmp_path), became) == 0
    assert became.argv[-2:] == ["--seed", "1"]


def test_there_is_a_place_for_the_compiled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = tmp_path / "neuron" / "compiled" / "key" / "rank-0"
    monkeypatch.setenv("NEURON_COMPILED_ARTIFACTS", str(compiled))
    assert main(fetching(cache=tmp_path), Became()) == 0
    assert compiled.parent.is_dir()
    assert not compiled.exists()


def test_a_place_that_is_none_ends_it_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(fetching(Artifact("s3://", "sha256:1"), cache=tmp_path), Became()) == EXIT_BAD_ARTIFACT
    assert "it must be s3://bucket/prefix" in capsys.readouterr().err
