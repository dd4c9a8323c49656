"""Imports vLLM once, and runs modules in forks of that: `python -m tests.engine_agent.engines.vllm.fork_server`.

Three quarters of a start of vLLM are its imports. A fork has them done, and starts with the module. Run by the
engine's Python; `forks` is its client.

Each line of JSON on standard input gets one in return. A `Start` begins a fork and returns its pid. A pid returns that
process's exit code as of `os.waitstatus_to_exitcode`, or null while it runs. The server exits with its input.
"""

import contextlib
import importlib
import json
import os
import runpy
import sys
from typing import NoReturn, TypedDict

IMPORTED = (
    "engine_agent.engines.vllm.executor",
    "engine_agent.engines.vllm.cell.worker",
    "engine_agent.engines.vllm.executor",
    "engine_agent.engines.vllm.middleware",
    "engine_agent.engines.vllm.middleware",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)


class Start(TypedDict):
    """A module with its arguments, its whole environment, and the file for its output."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    output: str


def main() -> None:
    for module in IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):  # another vLLM has other modules; forks import what they need
            importlib.import_module(module)
    for line in sys.stdin:
        asked: Start | int = json.loads(line)
        print(json.dumps(_status_of(asked) if isinstance(asked, int) else _start(asked)), flush=True)  # noqa: T201


def _start(asked: Start) -> int:
    return os.fork() or _become(asked)


def _become(asked: Start) -> NoReturn:
    """Becomes what `python -m MODULE ARGUMENTS` is in a separate session, except for its imports."""
    os.setsid()
    output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, standard in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, standard)
    os.close(nothing)
    os.close(output)
    os.environ.clear()
    os.environ.update(asked["environment"])
    paths = asked["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    sys.argv = [asked["module"], *asked["arguments"]]
    runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
    sys.exit()


def _status_of(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


if __name__ == "__main__":
    main()
