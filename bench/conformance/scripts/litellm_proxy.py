"""LiteLLM as a proxy in front of the ingress, asked by openai-python."""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
from cases import BASE_URL, KEY, MESSAGES, MODEL, beside_this_python, case, expect, expect_error, main

STARTS_WITHIN_S = 180
PROXY_KEY = f"sk-{secrets.token_hex(16)}"
"""Of LiteLLM itself, which does not start without one."""


@contextlib.contextmanager
def proxy() -> Iterator[openai.OpenAI]:
    ours = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": KEY}
    with tempfile.TemporaryDirectory() as folder, socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        held.close()
        config = Path(folder, "config.json")
        config.write_text(json.dumps({"model_list": [{"model_name": "ours", "litellm_params": ours}]}))
        command = [beside_this_python("litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        with Path(folder, "log").open("wb") as log:
            running = subprocess.Popen(
                command,
                env={**os.environ, "LITELLM_MASTER_KEY": PROXY_KEY},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
            )
        try:
            wait_until_up(f"http://127.0.0.1:{port}/health/liveliness", running, Path(folder, "log"))
            yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=PROXY_KEY, max_retries=0, timeout=120)
        finally:
            running.kill()
            running.wait()


def wait_until_up(url: str, running: "subprocess.Popen[bytes]", log: Path) -> None:
    ends_at = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < ends_at and running.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url).is_success:
                return
        time.sleep(0.5)
    raise AssertionError(f"LiteLLM's proxy did not start: …{log.read_text()[-300:]}")


with proxy() as client:

    @case("chat")
    def chat() -> None:
        answer = client.chat.completions.create(model="ours", messages=MESSAGES, max_tokens=16)
        expect(answer.choices[0].message.content and answer.usage.completion_tokens <= 16, answer)

    @case("stream")
    def stream() -> None:
        chunks = client.chat.completions.create(model="ours", messages=MESSAGES, max_tokens=16, stream=True)
        expect("".join(c.choices[0].delta.content or "" for c in chunks if c.choices), "no text")

    @case("bad_request")
    def bad_request() -> None:
        expect_error(
            openai.BadRequestError,
            lambda: client.chat.completions.create(model="ours", messages=MESSAGES, max_tokens=-1),
        )

    main()
