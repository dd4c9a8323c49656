"""The program `llama-cpp` of engine generic: starts llama-cpp-python's server with the options that engines are given.

Copied into the environment that has llama-cpp-python, and run by its Python; standard library until then.
"""

import sys
from collections.abc import Sequence
from typing import Any

RENAMED = {"--alias": "--model_alias", "--context-length": "--n_ctx"}


def translated(argv: Sequence[str]) -> list[str]:
    """The same options as that server spells them."""
    return [RENAMED.get(word, "--" + word[2:].replace("-", "_")) if word.startswith("--") else word for word in argv]


def take_any_request_id() -> None:
    """That server answers 400 to every request whose X-Request-ID is no UUID, and cells pass their clients' own on."""
    from starlette_context.plugins import RequestIdPlugin

    RequestIdPlugin.validate_uuid = lambda plugin, text: None


class KnownModels:
    """An ASGI application before that server's own: its list of models, once it has given it, for good. It gives none
    while it generates, and is asked for it every second by who wants to know whether it is well."""

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
        said: list[Any] = []

        async def noted(message: Any) -> None:
            said.append(message)
            await send(message)

        await self._app(scope, receive, noted)
        if said and said[0].get("status") == 200:
            self._known = said


def main(argv: Sequence[str]) -> None:
    from llama_cpp.server import __main__ as server

    take_any_request_id()
    create_app = server.create_app
    server.create_app = lambda *stated, **named: KnownModels(create_app(*stated, **named))
    sys.argv = ["llama-cpp", *translated(argv)]
    server.main()


if __name__ == "__main__":
    main(sys.argv[1:])
