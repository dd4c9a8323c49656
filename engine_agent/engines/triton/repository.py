"""The model repository that Triton serves: one decoupled model of the Python backend, whose code is `model.py` of this
package. Its tensors are those of NVIDIA's LLM backends where these have them (`text_input`, `text_output`)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODEL = "llm"
"""The model's name in KServe's paths."""
VERSION = "1"
PID_FILE = "model.pid"
"""In the repository: the process of the backend that runs the model, once it has loaded."""
SOCKET = "llama.sock"
"""In the repository: llama.cpp's own HTTP, so that it takes no port."""
INPUTS: Mapping[str, str] = dict.fromkeys(
    ("text_input", "messages", "sampling_parameters", "request_key", "cancel"), "TYPE_STRING"
)
"""A prompt or the JSON of a chat, llama.cpp's options as JSON, and the request's key; or the key of a request to
cancel."""
OUTPUTS: Mapping[str, str] = {
    "text_output": "TYPE_STRING",
    "finish_reason": "TYPE_STRING",
    "prompt_tokens": "TYPE_UINT32",
    "cached_tokens": "TYPE_UINT32",
    "completion_tokens": "TYPE_UINT32",
}
"""Of each answer: the text since the last one, and the counts so far. The last answer has a reason."""
CODE = """import sys

sys.path.insert(0, {code!r})

from engine_agent.engines.triton.model import TritonPythonModel
"""
"""The backend's Python ignores PYTHONPATH."""


def config(parameters: Mapping[str, str]) -> str:
    """Returns config.pbtxt, in protobuf's text format. Parameters reach the model as texts."""
    lines = [
        f"name: {_quoted(MODEL)}",
        'backend: "python"',
        "max_batch_size: 0",
        "model_transaction_policy { decoupled: true }",
        "instance_group [ { kind: KIND_CPU, count: 1 } ]",
        *_tensors("input", INPUTS, ", optional: true"),
        *_tensors("output", OUTPUTS, ""),
        *(
            f"parameters {{ key: {_quoted(name)}, value: {{ string_value: {_quoted(value)} }} }}"
            for name, value in parameters.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def _tensors(kind: str, tensors: Mapping[str, str], more: str) -> list[str]:
    described = (f"  {{ name: {_quoted(name)}, data_type: {of}, dims: [ 1 ]{more} }}" for name, of in tensors.items())
    return [f"{kind} [", ",\n".join(described), "]"]


def _quoted(text: str) -> str:
    """A string of the text format, which has JSON's escapes for ASCII."""
    return json.dumps(text)


def write_repository(folder: Path, settings: Mapping[str, Any], context_length: int, code: Path) -> None:
    """Writes the repository anew.

    Args:
        folder: gets the model and, once it has loaded, the id of its process.
        settings: llama.cpp's parameters by their dotted name.
        context_length: tokens that each request may have.
        code: the folder of the package `engine_agent`."""
    version = folder / MODEL / VERSION
    version.mkdir(parents=True, exist_ok=True)
    for left in (PID_FILE, SOCKET):
        (folder / left).unlink(missing_ok=True)
    parameters = {
        "settings": json.dumps(settings),
        "context_length": str(context_length),
        "folder": str(folder),
    }
    (folder / MODEL / "config.pbtxt").write_text(config(parameters))
    (version / "model.py").write_text(CODE.format(code=str(code)))
