"""The launcher serves only the one verified GGUF file, and renders Triton's command line and model repository."""

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine_agent.engines.llama_cpp.serve import EXIT_BAD_ARTIFACT
from engine_agent.engines.triton.repository import config, write_repository
from engine_agent.engines.triton.serve import main, parse, server_command, server_environment
from tests.models_registry.rows import artifact

OWN = ["--node-id", "n-1", "--model-dir", "/w", "--digest", "", "--served-model", "tiny", "--folder", "/f"]
PORTS = ["--port", "4000", "--server-port", "4001", "--metrics-port", "4002", "--"]
PLAIN = ["--context-length", "512", "--parallel", "3"]


def test_triton_listens_on_loopback_alone_and_nobody_may_change_it() -> None:
    command = server_command(parse([*OWN, *PORTS, *PLAIN]), Path("/packages"), "mine-")
    assert command[:5] == (
        *("/packages/pytriton/tritonserver/bin/tritonserver", "--model-repository", "/f"),
        *("--backend-directory", "/packages/pytriton/tritonserver/backends"),
    )
    stated = dict(pairwise(command))
    assert (stated["--http-address"], stated["--http-port"]) == ("127.0.0.1", "4001")
    assert (stated["--metrics-address"], stated["--metrics-port"]) == ("127.0.0.1", "4002")
    assert (stated["--allow-grpc"], stated["--backend-config"]) == ("false", "python,shm-region-prefix-name=mine-")
    closed, _, key = stated["--http-restricted-api"].partition(":key=")
    assert {"model-repository", "shared-memory", "trace", "logging"} <= set(closed.split(","))
    assert len(key) == 32


def test_the_backend_gets_this_python() -> None:
    found = server_environment(Path("/python/lib"), {}, {"LD_LIBRARY_PATH": "/given", "PATH": "/bin"})
    assert found["LD_LIBRARY_PATH"] == "/python/lib:/given"
    assert found["PATH"] == f"{Path(sys.executable).parent}:/bin"


def test_a_configuration_keeps_every_character_of_a_parameter() -> None:
    text = config({"settings": json.dumps({"model.path": 'C:\\a "b"\n/é'})})
    assert 'backend: "python"' in text
    assert "model_transaction_policy { decoupled: true }" in text
    line = next(line for line in text.splitlines() if line.startswith("parameters"))
    quoted = line.partition("string_value: ")[2].removesuffix(" } }")
    assert json.loads(json.loads(quoted)) == {"model.path": 'C:\\a "b"\n/é'}


def test_a_repository_is_written_anew(tmp_path: Path) -> None:
    for name in ("model.pid", "llama.sock"):
        (tmp_path / name).write_text("1")
    for threads in (1, 2):
        write_repository(tmp_path, {"cpuparams.n_threads": threads}, 512, Path("/code"))
    assert '\\"cpuparams.n_threads\\": 2' in (tmp_path / "llm" / "config.pbtxt").read_text()
    assert "sys.path.insert(0, '/code')" in (tmp_path / "llm" / "1" / "model.py").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["llm"]


@pytest.mark.parametrize("words", [["--sleep-idle-seconds", "9"], ["--threads", "x"], ["--seed", "-1"]])
def test_a_wrong_option_is_refused_before_anything_is_loaded(words: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse([*OWN, *PORTS, *PLAIN, *words])
    assert words[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "digest", "said"),
    [
        ({"m.gguf": b"GGUF"}, "sha256:" + "0" * 64, "was requested"),
        ({"m.safetensors": b"x"}, "", "has no .gguf file"),
    ],
)
def test_what_is_not_the_plans_gguf_ends_with_the_reason(
    files: dict[str, bytes], digest: str, said: str, tmp_path: Path, capsys: Any
) -> None:
    artifact(tmp_path / "w", files)
    own = ["--node-id", "n-1", "--model-dir", str(tmp_path / "w"), "--digest", digest, "--served-model", "t"]
    assert main([*own, "--folder", str(tmp_path / "f"), *PORTS, *PLAIN]) == EXIT_BAD_ARTIFACT
    assert said in capsys.readouterr().err
    assert not (tmp_path / "f").exists()
