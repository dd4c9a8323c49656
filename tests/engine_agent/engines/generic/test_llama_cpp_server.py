"""What we put before llama.cpp's server: its options as it spells them, and a list of models that is always there."""

import asyncio
from typing import Any

from engine_agent.engines.generic.llama_cpp_server import KnownModels, translated


class Server:
    """Gives its list while it is free, and counts how often it was asked for anything."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.asked = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked += 1
        await send({"type": "http.response.start", "status": self.statuses.pop(0), "headers": []})
        await send({"type": "http.response.body", "body": b"[]"})


def get(app: KnownModels, path: str = "/v1/models", method: str = "GET") -> int:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app({"type": "http", "method": method, "path": path}, None, send))
    assert sent[1]["body"] == b"[]"
    return int(sent[0]["status"])


def test_options_are_spelt_as_that_server_does() -> None:
    argv = ["--alias", "m", "--context-length", "512", "--n-threads", "2"]
    assert translated(argv) == ["--model_alias", "m", "--n_ctx", "512", "--n_threads", "2"]


def test_its_list_of_models_is_asked_for_until_it_is_given_once() -> None:
    server = Server(503, 200, 200)
    app = KnownModels(server)
    assert [get(app) for _ in range(5)] == [503, 200, 200, 200, 200]
    assert server.asked == 2


def test_all_else_is_the_servers() -> None:
    server = Server(200, 404, 405)
    app = KnownModels(server)
    assert [get(app, "/v1/completions", "POST"), get(app, "/v1"), get(app, method="POST")] == [200, 404, 405]
    assert server.asked == 3
