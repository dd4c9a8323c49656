"""Engine processes as forks of one that has imported vLLM, for tests of what an engine does, not of how it starts.

Ranks are forks of different servers: they have different hash seeds, like processes that are started separately.
"""

import json
import os
import select
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, Self

from engine_agent.engines.vllm.options import parse
from engine_agent.engines.vllm.serve import node_environment

ROOT = Path(__file__).resolve().parents[4]
FORK_SERVER = "tests.engine_agent.engines.vllm.fork_server"
READ_BY_IMPORTS = frozenset(
    {"HF_HUB_OFFLINE", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "TORCH_COMPILE_DISABLE", "VLLM_NO_USAGE_STATS"}
)
"""Variables that libraries read during their import: other values need another server."""


class EngineProcess(Protocol):
    """The part of `subprocess.Popen` that tests use."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...


Begin = Callable[[int, Sequence[str], Mapping[str, str], Path], EngineProcess]
"""Starts the process of a rank: its command line, its environment, and the file for its output."""


def started(_: int, argv: Sequence[str], environment: Mapping[str, str], output: Path) -> EngineProcess:
    """A separate process with its own imports."""
    with output.open("wb") as log:
        return subprocess.Popen(
            argv, env=dict(environment), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


class ForkServers:
    """One for each rank and each set of import variables; they stop with the block."""

    def __init__(self) -> None:
        self._ends = ExitStack()
        self._servers: dict[tuple[int, str, tuple[tuple[str, str], ...]], _ForkServer] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def start(self, rank: int, argv: Sequence[str], environment: Mapping[str, str], output: Path) -> EngineProcess:
        """Runs `python -m MODULE ARGUMENTS` in a fork."""
        python, _, module, *arguments = argv
        own = node_environment(parse(arguments), output.parent, len(os.sched_getaffinity(0)), environment)
        read = {name: value for name, value in {**environment, **own}.items() if name in READ_BY_IMPORTS}
        return self._fork((rank, python, read), module, arguments, environment, output)

    def run(self, argv: Sequence[str], environment: Mapping[str, str], output: Path) -> EngineProcess:
        """Runs a module that is no engine in a fork of the first server with this Python."""
        python, _, module, *arguments = argv
        read = {name: value for name, value in environment.items() if name in READ_BY_IMPORTS}
        started = next((key for key in self._servers if key[1] == python), (0, python, tuple(sorted(read.items()))))
        return self._fork((started[0], python, dict(started[2])), module, arguments, environment, output)

    def _fork(
        self,
        of: tuple[int, str, dict[str, str]],
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: Path,
    ) -> EngineProcess:
        rank, python, read = of
        key = (rank, python, tuple(sorted(read.items())))
        if key not in self._servers:
            self._servers[key] = self._ends.enter_context(_ForkServer(python, read))
        asked = {"module": module, "arguments": arguments, "environment": dict(environment), "output": str(output)}
        return _Fork(self._servers[key], self._servers[key].ask(asked))


class _ForkServer:
    def __init__(self, python: str, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [python, "-m", FORK_SERVER],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def ask(self, question: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"{FORK_SERVER} ended with {self._process.wait()}; what it printed stands above"
        return json.loads(answer)


class _Fork:
    """A child of its server, which alone can wait for it."""

    def __init__(self, server: _ForkServer, pid: int) -> None:
        self._server = server
        self._ended: int | None = None
        self.pid = pid

    def poll(self) -> int | None:
        if self._ended is None:
            self._ended = self._server.ask(self.pid)
        return self._ended

    def wait(self, timeout: float | None = None) -> int:
        if (ended := self.poll()) is not None:
            return ended
        descriptor = os.pidfd_open(self.pid)
        try:
            select.select([descriptor], [], [], timeout)
        finally:
            os.close(descriptor)
        if (ended := self.poll()) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return ended

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)
