"""A small server with OpenAI's API over transformers and torch, for engine `generic`: the last choice of `prove` on a
machine where nothing else can be started. One request after the other, greedy, float32 on CPU and bfloat16 on CUDA. It
runs in the machine's own Python, so it needs only torch, transformers and the standard library."""

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MOST_BODY_BYTES = 1 << 20
MOST_TOKENS = 512


class Model:
    def __init__(self, folder: str, device: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._torch = torch
        self._device = device
        self._one_at_a_time = threading.Lock()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()

    def prompt(self, body: dict[str, Any]) -> list[int]:
        """The tokens of a prompt or of a conversation."""
        if "messages" in body:
            text = self._tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
        else:
            text = body["prompt"]
        return list(self._tokenizer(text)["input_ids"])

    def pieces(self, prompt: list[int], most: int) -> Iterator[str]:
        """Yields the text of each token as it is computed."""
        torch, ids, cache, text = self._torch, list[int](), None, ""
        with self._one_at_a_time, torch.inference_mode():
            step = torch.tensor([prompt], device=self._device)
            for _ in range(most):
                output = self._model(input_ids=step, past_key_values=cache, use_cache=True)
                cache, token = output.past_key_values, int(output.logits[0, -1].argmax())
                if token == self._tokenizer.eos_token_id:
                    return
                ids.append(token)
                step = torch.tensor([[token]], device=self._device)
                before, text = text, self._tokenizer.decode(ids)
                yield text[len(before) :]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200, {"object": "list", "data": [{"id": given.alias, "object": "model"}]})

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if length > MOST_BODY_BYTES or self.path not in ("/v1/completions", "/v1/chat/completions"):
            self.close_connection = True
            self._answer(404, {"error": {"message": f"no {self.path}, or a body of {length} bytes", "code": 404}})
            return
        body = json.loads(self.rfile.read(length))
        prompt = model.prompt(body)
        pieces = model.pieces(prompt, min(int(body.get("max_tokens") or 16), MOST_TOKENS))
        if body.get("stream"):
            self._stream(len(prompt), pieces)
            return
        found = list(pieces)
        choice = self._choice("".join(found), streamed=False) | {"finish_reason": "length"}
        self._answer(200, self._object([choice]) | {"usage": _usage(len(prompt), len(found))})

    def _stream(self, prompt: int, pieces: Iterator[str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        count = 0
        for piece in pieces:
            count += 1
            self._chunk(json.dumps(self._object([self._choice(piece, streamed=True) | {"finish_reason": None}])))
        self._chunk(json.dumps(self._object([self._choice("", streamed=True) | {"finish_reason": "length"}])))
        self._chunk(json.dumps(self._object([]) | {"usage": _usage(prompt, count)}))
        self._chunk("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, text: str) -> None:
        data = f"data: {text}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _choice(self, text: str, *, streamed: bool) -> dict[str, Any]:
        if "chat" not in self.path:
            return {"index": 0, "text": text}
        return {"index": 0, "delta" if streamed else "message": {"role": "assistant", "content": text}}

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = "chat.completion" if "chat" in self.path else "text_completion"
        return {"id": "1", "object": name, "created": int(time.time()), "model": given.alias, "choices": choices}

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Writes no access log: it would list health probes."""


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("model", "alias", "host", "port", "context-length", "device"):
        parser.add_argument(f"--{name}")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    model = Model(given.model, given.device or "cpu")
    ThreadingHTTPServer((given.host, int(given.port)), Handler).serve_forever()
