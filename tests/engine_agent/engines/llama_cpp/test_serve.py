"""The launcher turns options into llama.cpp's parameters, and serves nothing but the one verified GGUF file."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_agent.engines.llama_cpp.serve import (
    EXIT_BAD_ARTIFACT,
    apply_settings,
    context_problem,
    environment,
    gguf_in,
    main,
    parse,
    server_settings,
)
from engine_agent.protocol.engine_options import LLAMA_CPP
from engine_agent.protocol.manifest import BadArtifact
from tests.models_registry.rows import artifact

OWN = ["--node-id", "n-1", "--model-dir", "/w", "--digest", "", "--served-model", "tiny", "--port", "4000", "--"]
PLAIN = ["--context-length", "512", "--parallel", "3"]
VALUES = {
    "batch-size": ("n_batch", "64", 64),
    "cache-prompt": ("cache_prompt", None, True),
    "cache-ram": ("cache_ram_mib", "100", 100),
    "cache-type-k": ("cache_type_k", "q8_0", "q8_0"),
    "cache-type-v": ("cache_type_v", "f32", "f32"),
    "embeddings": ("embedding", None, True),
    "flash-attn": ("flash_attn_type", "on", "on"),
    "gpu-layers": ("n_gpu_layers", "0", 0),
    "kv-unified": ("kv_unified", None, True),
    "min-p": ("sampling.min_p", "0.1", 0.1),
    "pooling": ("pooling_type", "mean", "mean"),
    "repeat-penalty": ("sampling.penalty_repeat", "1.1", 1.1),
    "seed": ("sampling.seed", "7", 7),
    "sleep-idle-seconds": ("sleep_idle_seconds", "60", 60),
    "temperature": ("sampling.temp", "0.2", 0.2),
    "threads": ("cpuparams.n_threads", "1", 1),
    "threads-batch": ("cpuparams_batch.n_threads", "4", 4),
    "top-k": ("sampling.top_k", "40", 40),
    "top-p": ("sampling.top_p", "0.9", 0.9),
    "ubatch-size": ("n_ubatch", "32", 32),
}


def settings(*options: str, cores: int = 6) -> dict[str, Any]:
    return server_settings(parse([*OWN, *PLAIN, *options]), Path("/w/m.gguf"), cores)


def test_a_slot_has_the_whole_context_and_there_is_one_for_each_request() -> None:
    found = settings()
    assert (found["n_ctx"], found["n_parallel"]) == (3 * 512, 3)
    assert (found["model.path"], found["model_alias"], found["port"]) == ("/w/m.gguf", {"tiny"}, 4000)
    assert found["hostnames"] == ["127.0.0.1"]
    assert (found["endpoint_metrics"], found["endpoint_slots"], found["ui"]) == (True, False, False)


def test_threads_are_those_of_the_node_unless_the_version_says_so() -> None:
    names = ("cpuparams.n_threads", "cpuparams_batch.n_threads")
    assert [settings()[name] for name in names] == [6, 6]
    assert [settings("--threads", "2")[name] for name in names] == [2, 2]
    assert [settings("--threads", "2", "--threads-batch", "4")[name] for name in names] == [2, 4]


@pytest.mark.parametrize("name", sorted(LLAMA_CPP.keys() - {"context-length", "parallel"}))
def test_every_option_of_a_version_reaches_llama_cpp(name: str) -> None:
    place, text, value = VALUES[name]
    found = settings(f"--{name}", *(() if text is None else (text,)))[place]
    assert (found, type(found)) == (value, type(value))


def test_values_of_enums_get_the_names_of_the_library() -> None:
    library = SimpleNamespace(
        ggml_type={"GGML_TYPE_Q8_0": 8}, llama_flash_attn_type={"LLAMA_FLASH_ATTN_TYPE_ENABLED": 1}
    )
    params = SimpleNamespace(sampling=SimpleNamespace(temp=0.8), cache_type_k=0, flash_attn_type=-1)
    apply_settings(params, {"sampling.temp": 0.1, "cache_type_k": "q8_0", "flash_attn_type": "on"}, library)
    assert (params.sampling.temp, params.cache_type_k, params.flash_attn_type) == (0.1, 8, 1)


@pytest.mark.parametrize(
    "words", [["--threads", "x"], ["--nonsense", "1"], ["--seed", "-1"], ["--kv-unified", "yes"], ["--thread", "1"]]
)
def test_a_wrong_option_is_refused_before_anything_is_loaded(words: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse([*OWN, *PLAIN, *words])
    assert words[0] in capsys.readouterr().err


def test_waiting_threads_leave_the_processor_unless_the_plan_says_otherwise() -> None:
    assert environment({}) == {"OMP_WAIT_POLICY": "passive"}
    assert environment({"OMP_WAIT_POLICY": "active"}) == {}


def test_a_model_with_a_shorter_context_is_refused() -> None:
    assert context_problem(2048, 2048) == ""
    assert context_problem(2304, 2048) == "", "llama.cpp rounds up"
    assert context_problem(2048, 4096) == (
        "the model has a context of 2048 tokens, and its version states context_length 4096"
    )


def test_the_folder_has_one_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(BadArtifact, match=r"has no \.gguf file; engine llama-cpp serves one GGUF file"):
        gguf_in(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"GGUF and more")
    assert gguf_in(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(BadArtifact, match=r"has 2 \.gguf files, such as a\.gguf and b\.gguf"):
        gguf_in(tmp_path)
    (tmp_path / "b.gguf").unlink()
    (tmp_path / "a.gguf").write_bytes(b"\x80\x04pickle")
    with pytest.raises(BadArtifact, match="is no GGUF file"):
        gguf_in(tmp_path)


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
    own = ["--node-id", "n-1", "--model-dir", str(tmp_path / "w"), "--digest", digest]
    assert main([*own, "--served-model", "t", "--port", "1", "--", *PLAIN]) == EXIT_BAD_ARTIFACT
    assert said in capsys.readouterr().err
