"""The model that Triton's Python backend runs: llama.cpp in the backend's process, one thread for each request. Each
token is an answer of the decoupled model, with the counts so far; Triton's own page of metrics has the totals.

Imported by the backend alone, which has `triton_python_backend_utils` on its path."""

import json
import os
import select
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import numpy as np
import triton_python_backend_utils as backend
import xllamacpp

from engine_agent.engines.llama_cpp.serve import SPARE_HTTP_THREADS, apply_settings, context_problem
from engine_agent.engines.triton.repository import MODEL, OUTPUTS, PID_FILE, SOCKET

COUNTERS: Mapping[str, str] = {
    "switchyard_prompt_tokens_total": "Prompt tokens that the model has read, with cached ones.",
    "switchyard_cached_tokens_total": "Prompt tokens that were in the cache.",
    "switchyard_completion_tokens_total": "Tokens that the model has generated.",
    "switchyard_steps_total": "Steps of llama.cpp.",
}
"""Custom metrics of the model, on Triton's page."""
_OF_LLAMA_CPP = {"stream": True, "stream_options": {"include_usage": True}, "timings_per_token": True}
_STEPS = "llamacpp:n_decode_total "


class TritonPythonModel:
    """The interface that the Python backend wants."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Loads the model. Raises TritonModelException if llama.cpp cannot serve it as its version states."""
        Thread(target=_exit_with, args=(os.getppid(),), daemon=True).start()
        stated = json.loads(args["model_config"])["parameters"]
        given = {name: each["string_value"] for name, each in stated.items()}
        folder, settings = Path(given["folder"]), json.loads(given["settings"])
        os.chdir(folder)  # a socket's path has at most 107 bytes
        params = xllamacpp.CommonParams()
        apply_settings(params, {**settings, "hostnames": [SOCKET]}, xllamacpp)
        try:
            self._server = xllamacpp.Server(params)
        except RuntimeError as error:
            raise backend.TritonModelException(f"llama.cpp cannot serve {settings['model.path']}: {error}") from error
        if problem := context_problem(_served_context(), int(given["context_length"])):
            raise backend.TritonModelException(problem)
        self._threads = ThreadPoolExecutor(settings["n_parallel"] + SPARE_HTTP_THREADS)
        self._cancelled: dict[str, bool] = {}
        """The requests that run, and whether each is to end."""
        self._counted = Lock()
        self._steps = 0
        counter = backend.MetricFamily.COUNTER
        self._families = [
            backend.MetricFamily(name=name, description=text, kind=counter) for name, text in COUNTERS.items()
        ]
        self._counters = [family.Metric(labels={"model": MODEL}) for family in self._families]
        (folder / PID_FILE).write_text(str(os.getpid()))

    def execute(self, requests: list[Any]) -> None:
        """Starts a thread for each request. Answers are sent as they come, so nothing is returned."""
        for request in requests:
            given = {tensor.name(): _text(tensor) for tensor in request.inputs()}
            sender = request.get_response_sender()
            if "cancel" in given:
                if given["cancel"] in self._cancelled:
                    self._cancelled[given["cancel"]] = True
                _send(sender, Answer(), "cancelled")
            else:
                self._cancelled[given["request_key"]] = False
                self._threads.submit(self._answer, given, sender)

    def _answer(self, given: Mapping[str, str], sender: Any) -> None:
        answer = Answer()
        error: Any = None

        def take(piece: Mapping[str, Any]) -> bool:
            """Called by llama.cpp with each event; True ends the request."""
            nonlocal error
            if "choices" not in piece:
                error = piece.get("error", piece)
                return True
            if answer.take(piece):
                _send(sender, answer)
            return self._cancelled[given["request_key"]]

        try:
            body = {**json.loads(given["sampling_parameters"]), **_OF_LLAMA_CPP}
            if self._cancelled[given["request_key"]]:
                pass
            elif "messages" in given:
                body |= {"messages": json.loads(given["messages"]), "reasoning_format": "none"}
                self._server.handle_chat_completions(body, take)
            else:
                self._server.handle_completions({**body, "prompt": given["text_input"]}, take)
        except Exception as failure:
            # Before the first event llama.cpp reads the request: its schema, its template.
            code = 500 if answer.counts[0] else 400
            error = {"code": code, "message": f"llama.cpp cannot answer the request: {failure}"}
        self._count(answer)
        if error is not None:
            _send_error(sender, error)
        else:
            _send(sender, answer, answer.reason or "cancelled")
        del self._cancelled[given["request_key"]]

    def _count(self, answer: "Answer") -> None:
        page = self._server.handle_metrics()
        steps = next((line for line in page.splitlines() if line.startswith(_STEPS)), f"{_STEPS}0")
        with self._counted:
            grown = max(0, int(float(steps.removeprefix(_STEPS))) - self._steps)
            self._steps += grown
        for counter, tokens in zip(self._counters, (*answer.counts, grown), strict=True):
            counter.increment(tokens)


class Answer:
    """What llama.cpp has generated for a request since the last answer was sent, and the counts so far."""

    def __init__(self) -> None:
        self.text = ""
        self.reason = ""
        self.counts = (0, 0, 0)
        """Prompt tokens, those of them that were cached, and generated tokens."""

    def take(self, piece: Mapping[str, Any]) -> bool:
        """Reads an event of a completion or chat. Returns whether it has text."""
        if timings := piece.get("timings"):
            cached = timings["cache_n"]
            self.counts = (cached + timings["prompt_n"], cached, timings["predicted_n"])
        if usage := piece.get("usage"):
            cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
            self.counts = (usage["prompt_tokens"], cached, usage["completion_tokens"])
        for choice in piece["choices"]:
            self.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            self.reason = choice.get("finish_reason") or self.reason
        return bool(self.text)


def _send(sender: Any, answer: Answer, reason: str = "") -> None:
    """Sends the text so far, and with a reason the end of the request."""
    values = (answer.text, reason, *answer.counts)
    tensors = [
        backend.Tensor(name, np.array([value], dtype=np.object_ if isinstance(value, str) else np.uint32))
        for name, value in zip(OUTPUTS, values, strict=True)
    ]
    answer.text = ""
    sender.send(backend.InferenceResponse(tensors), flags=backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL if reason else 0)


def _send_error(sender: Any, error: Any) -> None:
    response = backend.InferenceResponse(error=backend.TritonError(json.dumps(error)))
    sender.send(response, flags=backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _text(tensor: Any) -> str:
    return str(tensor.as_numpy()[0].decode())


def _served_context() -> int:
    """Tokens of a slot, from llama.cpp's own server on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(SOCKET)
        connection.sendall(b"GET /props HTTP/1.0\r\n\r\n")
        with connection.makefile("rb") as answer:
            body = answer.read().partition(b"\r\n\r\n")[2]
    return int(json.loads(body)["default_generation_settings"]["n_ctx"])


def _exit_with(pid: int) -> None:
    """Ends this process when Triton exits, even if llama.cpp computes."""
    waiting = select.poll()
    waiting.register(os.pidfd_open(pid), select.POLLIN)
    waiting.poll()
    os._exit(1)
