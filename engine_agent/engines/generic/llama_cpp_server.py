"""The program `llama-cpp` of engine generic: starts llama-cpp-python's server with the options that engines are given.

Copied into the environment that has llama-cpp-python, and run by its Python; standard library until then.
"""

import sys
from collections.abc import Sequence

RENAMED = {"--alias": "--model_alias", "--context-length": "--n_ctx"}


def translated(argv: Sequence[str]) -> list[str]:
    """The same options as that server spells them."""
    return [RENAMED.get(word, "--" + word[2:].replace("-", "_")) if word.startswith("--") else word for word in argv]


def take_any_request_id() -> None:
    """That server answers 400 to every request whose X-Request-ID is no UUID, and cells pass their clients' own on."""
    from starlette_context.plugins import RequestIdPlugin

    RequestIdPlugin.validate_uuid = lambda plugin, text: None


def main(argv: Sequence[str]) -> None:
    from llama_cpp.server.__main__ import main as serve

    take_any_request_id()
    sys.argv = ["llama-cpp", *translated(argv)]
    serve()


if __name__ == "__main__":
    main(sys.argv[1:])
