"""Starts llama.cpp's server on one node: `python -m engine_agent.engines.llama_cpp.serve --node-id … [-- options]`.

Run by the engine's Python. It checks the weights and the options, then runs the server in this process until a signal
ends it: it listens on loopback and answers 503 to /health while it loads. Nothing but the standard library is loaded
before llama.cpp.

Exit status: 2 bad command line, 3 no llama.cpp here, 4 bad artifact, 5 address in use, 70 the model cannot be served
as its version states."""

import argparse
import json
import os
import signal
import socket
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_agent.engines.artifacts import mark_damaged, verify_folder
from engine_agent.protocol.engine_options import LLAMA_CPP, Bounds, OneOf, Switch
from engine_agent.protocol.manifest import BadArtifact

EXIT_NOT_INSTALLED = 3
EXIT_BAD_ARTIFACT = 4
EXIT_ADDRESS_IN_USE = 5
EXIT_CANNOT_SERVE = 70
LOOPBACK = "127.0.0.1"
SPARE_HTTP_THREADS = 8
"""Besides one for each slot: health, metrics, and clients that send a request while every slot is taken."""
PROPS_LIMIT_S = 10.0
MAGIC = b"GGUF"
"""The first bytes of every GGUF file."""


@dataclass(frozen=True)
class ServeOptions:
    """The launcher's options; `engine` has those after `--` by name, without unset ones."""

    node_id: str
    model_dir: Path
    digest: str
    served_model: str
    port: int
    engine: Mapping[str, Any]

    @property
    def slots(self) -> int:
        return int(self.engine["parallel"])

    @property
    def context_length(self) -> int:
        return int(self.engine["context-length"])


def parse(argv: Sequence[str]) -> ServeOptions:
    """Reads the command line. Exits with status 2 if it is wrong, after a sentence on standard error."""
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="engine_agent.engines.llama_cpp.serve", allow_abbrev=False)
    parser.add_argument("--node-id", required=True, help="node this engine runs on")
    parser.add_argument("--model-dir", required=True, type=Path)
    parser.add_argument("--digest", required=True, help="digest of the weights' manifest; empty accepts any")
    parser.add_argument("--served-model", required=True, help="the model's name in requests")
    parser.add_argument("--port", required=True, type=int)
    own = parser.parse_args(words[:place])
    return ServeOptions(**vars(own), engine=read_engine_options(words[place + 1 :], parser.prog, LLAMA_CPP))


def read_engine_options(words: list[str], prog: str, known: Mapping[str, Bounds | OneOf | Switch]) -> Mapping[str, Any]:
    """Reads a version's options. Exits as `parse` does."""
    parser = argparse.ArgumentParser(prog=f"{prog} -- …", allow_abbrev=False)
    for name, allowed in known.items():
        required = name in ("context-length", "parallel")
        if isinstance(allowed, Switch):
            parser.add_argument(f"--{name}", dest=name, action="store_true", default=None)
        else:
            parser.add_argument(f"--{name}", dest=name, required=required)
    given = {name: value for name, value in vars(parser.parse_args(words)).items() if value is not None}
    for name, value in given.items():
        allowed = known[name]
        if wrong := allowed.problem(value):
            parser.error(f"argument --{name} is {value!r}; it {wrong}")
        if isinstance(allowed, Bounds):
            given[name] = int(float(value)) if allowed.whole else float(value)
    return given


def gguf_in(folder: Path) -> Path:
    """Returns the only GGUF file of a folder. Raises BadArtifact if there is none, several, or its content is not
    GGUF."""
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise BadArtifact(f"{folder} has no .gguf file; engine llama-cpp serves one GGUF file")
    if len(files) > 1:
        raise BadArtifact(
            f"{folder} has {len(files)} .gguf files, such as {files[0].name} and {files[1].name}; engine llama-cpp "
            "serves one: merge the parts, or leave the others out"
        )
    with files[0].open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise BadArtifact(f"{files[0]} does not begin with {MAGIC.decode()}, so it is no GGUF file")
    return files[0]


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Returns variables to set before llama.cpp is loaded, except those that the plan has `given`: waiting threads must
    not use the processor, which nodes share."""
    return {} if "OMP_WAIT_POLICY" in given else {"OMP_WAIT_POLICY": "passive"}


def server_settings(options: ServeOptions, model: Path, cores: int) -> dict[str, Any]:
    """Returns llama.cpp's parameters by their dotted name in `CommonParams`. Enums are named by their last word.

    Args:
        options: the launcher's options.
        model: the GGUF file.
        cores: processors that this process may use."""
    engine = options.engine
    settings: dict[str, Any] = {
        "model.path": str(model),
        "model_alias": {options.served_model},
        "hostnames": [LOOPBACK],
        "port": options.port,
        "n_parallel": options.slots,
        "n_ctx": options.context_length * options.slots,
        "n_threads_http": options.slots + SPARE_HTTP_THREADS,
        "cpuparams.n_threads": cores,
        "cpuparams_batch.n_threads": cores,
        "endpoint_metrics": True,
        "endpoint_slots": False,  # it lists what every slot computes
        "ui": False,
        "fit_params": False,  # it would shrink the context to the free memory
        "cache_prompt": False,
        "cache_ram_mib": 0,  # by default up to 8 GiB of prompts that left their slot
        "cache_idle_slots": False,
        "sse_ping_interval": -1,  # each ping would count as a token
    }
    for name, value in engine.items():
        if name in SETTINGS:
            settings[SETTINGS[name]] = value
    if "threads" in engine and "threads-batch" not in engine:
        settings["cpuparams_batch.n_threads"] = engine["threads"]
    if engine.get("cache-ram"):
        settings["cache_idle_slots"] = True
    return settings


SETTINGS: Mapping[str, str] = {
    "batch-size": "n_batch",
    "cache-prompt": "cache_prompt",
    "cache-ram": "cache_ram_mib",
    "cache-type-k": "cache_type_k",
    "cache-type-v": "cache_type_v",
    "embeddings": "embedding",
    "flash-attn": "flash_attn_type",
    "gpu-layers": "n_gpu_layers",
    "kv-unified": "kv_unified",
    "min-p": "sampling.min_p",
    "pooling": "pooling_type",
    "repeat-penalty": "sampling.penalty_repeat",
    "seed": "sampling.seed",
    "sleep-idle-seconds": "sleep_idle_seconds",
    "temperature": "sampling.temp",
    "threads": "cpuparams.n_threads",
    "threads-batch": "cpuparams_batch.n_threads",
    "top-k": "sampling.top_k",
    "top-p": "sampling.top_p",
    "ubatch-size": "n_ubatch",
}
"""Options of a version -> llama.cpp's parameter."""
ENUMS: Mapping[str, tuple[str, str]] = {
    "cache_type_k": ("ggml_type", "GGML_TYPE_"),
    "cache_type_v": ("ggml_type", "GGML_TYPE_"),
    "flash_attn_type": ("llama_flash_attn_type", "LLAMA_FLASH_ATTN_TYPE_"),
    "pooling_type": ("llama_pooling_type", "LLAMA_POOLING_TYPE_"),
}
ON_OFF: Mapping[str, str] = {"on": "ENABLED", "off": "DISABLED"}


def apply_settings(params: Any, settings: Mapping[str, Any], library: Any) -> None:
    for dotted, stated in settings.items():
        value = stated
        if dotted in ENUMS:
            kind, prefix = ENUMS[dotted]
            value = getattr(library, kind)[prefix + ON_OFF.get(stated, stated.upper())]
        *path, name = dotted.split(".")
        target = params
        for part in path:
            target = getattr(target, part)
        setattr(target, name, value)


def context_problem(served: int, wanted: int) -> str:
    """Why slots of `served` tokens are too short; empty if they are long enough. llama.cpp shortens them silently to
    the context that the model was trained for."""
    if served >= wanted:
        return ""
    return f"the model has a context of {served} tokens, and its version states context_length {wanted}"


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    try:
        verify_folder(options.model_dir, options.digest or None)
        model = gguf_in(options.model_dir)
    except (BadArtifact, OSError) as error:
        mark_damaged(options.model_dir)
        return _failed(EXIT_BAD_ARTIFACT, str(error))
    if not is_free(options.port):
        return _failed(EXIT_ADDRESS_IN_USE, f"{LOOPBACK}:{options.port} is in use")
    os.environ.update(environment(os.environ))
    try:
        import xllamacpp
    except ImportError as error:
        return _failed(EXIT_NOT_INSTALLED, f"{sys.executable} has no llama.cpp: {error}")
    params = xllamacpp.CommonParams()
    apply_settings(params, server_settings(options, model, len(os.sched_getaffinity(0))), xllamacpp)
    try:
        server = xllamacpp.Server(params)
        problem = context_problem(_served_context(server.listening_address), options.context_length)
    except (OSError, RuntimeError, ValueError) as error:
        problem = f"llama.cpp cannot serve {model}: {error}"
    if problem:
        return _failed(EXIT_CANNOT_SERVE, problem)
    while True:
        signal.pause()


def _served_context(address: str) -> int:
    """Tokens of a slot."""
    with urllib.request.urlopen(f"{address}/props", timeout=PROPS_LIMIT_S) as answer:  # noqa: S310 - its own server
        return int(json.load(answer)["default_generation_settings"]["n_ctx"])


def is_free(port: int) -> bool:
    """llama.cpp itself shares a port with another server that allows that."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def _failed(status: int, reason: str) -> int:
    """Ends without the destructors of llama.cpp, which would wait for its threads."""
    sys.stderr.write(f"{reason}\n")
    sys.stderr.flush()
    if "xllamacpp" in sys.modules:
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
