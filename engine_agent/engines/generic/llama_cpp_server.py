"""The program `llama-cpp` of engine generic: starts llama-cpp-python's server with the options that engines get. It is
copied into the environment of llama-cpp-python and run by its Python."""

import sys
from collections.abc import Sequence
from typing import Any

RENAMED = {"--alias": "--model_alias", "--context-length": "--n_ctx"}


def translated(argv: Sequence[str]) -> list[str]:
    """Returns the options under that server's names."""
    return [RENAMED.get(word, "--" + word[2:].replace("-", "_")) if word.startswith("--") else word for word in argv]


def take_any_request_id() -> None:
    """Accepts any X-Request-ID: that server answers 400 unless it is a UUID, and cells forward their clients' ids."""
    from starlette_context.plugins import RequestIdPlugin

    RequestIdPlugin.validate_uuid = lambda plugin, text: None


class KnownModels:
    """ASGI middleware that caches the list of models: the server cannot answer while it generates, and the list is the
    health check of every second."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._known: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or (scope["method"], scope["path"]) != ("GET", "/v1/models"):
            await self._app(scope, receive, send)
            return
        for message in self._known:
            await send(message)
        if self._known:
            return
        sent: list[Any] = []

        async def noted(message: Any) -> None:
            sent.append(message)
            await send(message)

        await self._app(scope, receive, noted)
        if sent and sent[0].get("status") == 200:
            self._known = sent


def main(argv: Sequence[str]) -> None:
    from llama_cpp.server import __main__ as server

    take_any_request_id()
    create_app = server.create_app
    server.create_app = lambda *stated, **named: KnownModels(create_app(*stated, **named))
    sys.argv = ["llama-cpp", *translated(argv)]
    server.main()


if __name__ == "__main__":
    main(sys.argv[1:])
