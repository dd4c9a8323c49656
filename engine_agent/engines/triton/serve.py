"""Starts Triton on one node: `python -m engine_agent.engines.triton.serve --node-id … [-- options]`.

Run by the engine's Python. It checks the weights and the options, writes the model repository, starts Triton as its
child and answers OpenAI's API in front of it, all on loopback. /health answers 503 until the model is loaded. If Triton
or the model's process exits, clients receive an error and this process exits; a killed launcher takes both with it.

Exit status: 2 bad command line, 3 no Triton here, 4 bad artifact, 5 address in use, 70 Triton ended, or cannot serve
the model as its version states."""

import argparse
import asyncio
import importlib.util
import logging
import os
import secrets
import signal
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine_agent.engines.artifacts import mark_damaged, verify_folder
from engine_agent.engines.llama_cpp import serve as llama_cpp
from engine_agent.engines.llama_cpp.serve import (
    EXIT_ADDRESS_IN_USE,
    EXIT_BAD_ARTIFACT,
    EXIT_CANNOT_SERVE,
    EXIT_NOT_INSTALLED,
    LOOPBACK,
    gguf_in,
    is_free,
    read_engine_options,
    server_settings,
)
from engine_agent.engines.openai_http import Endpoint, HealthPage, HttpListeners
from engine_agent.engines.triton.environment import BACKENDS, PROGRAM
from engine_agent.engines.triton.kserve import KServe
from engine_agent.engines.triton.openai_api import OpenAiApi
from engine_agent.engines.triton.repository import PID_FILE, write_repository
from engine_agent.engines.usage_ledger import UsageLedger
from engine_agent.engines.vllm.core_process import exit_with_parent
from engine_agent.protocol.engine_options import TRITON
from engine_agent.protocol.local_servers import StateWatch
from engine_agent.protocol.log_lines import PlainLines
from engine_agent.protocol.manifest import BadArtifact

log = logging.getLogger("triton")
READY_POLL_S = 0.05
GRACE_S = 2.0
"""How long clients may be told that Triton has ended."""
STOP_S = 5.0
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where the Python backend keeps its queues
RESTRICTED = "model-config,model-repository,shared-memory,statistics,trace,logging"
"""Parts of Triton's API that need a key, which is thrown away: they change models and write files."""
_LEFT_OUT = ("port", "hostnames", "model_alias", "n_threads_http")
"""Settings of llama.cpp's own HTTP server."""


@dataclass(frozen=True)
class ServeOptions(llama_cpp.ServeOptions):
    """`folder` is written anew; Triton and its metrics get a port each."""

    folder: Path
    server_port: int
    metrics_port: int


def parse(argv: Sequence[str]) -> ServeOptions:
    """Reads the command line. Exits with status 2 if it is wrong, after a sentence on standard error."""
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="engine_agent.engines.triton.serve", allow_abbrev=False)
    parser.add_argument("--node-id", required=True, help="node this engine runs on")
    parser.add_argument("--model-dir", required=True, type=Path)
    parser.add_argument("--digest", required=True, help="digest of the weights' manifest; empty accepts any")
    parser.add_argument("--served-model", required=True, help="the model's name in requests")
    parser.add_argument("--folder", required=True, type=Path, help="for the model repository")
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--server-port", required=True, type=int)
    parser.add_argument("--metrics-port", required=True, type=int)
    own = parser.parse_args(words[:place])
    return ServeOptions(**vars(own), engine=read_engine_options(words[place + 1 :], parser.prog, TRITON))


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(PlainLines(f"%(asctime)s {options.node_id} %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    try:
        verify_folder(options.model_dir, options.digest or None)
        model = gguf_in(options.model_dir)
    except (BadArtifact, OSError) as error:
        mark_damaged(options.model_dir)
        return _failed(EXIT_BAD_ARTIFACT, str(error))
    for port in (options.port, options.server_port, options.metrics_port):
        if not is_free(port):
            return _failed(EXIT_ADDRESS_IN_USE, f"{LOOPBACK}:{port} is in use")
    packages, library = installed_packages(), python_library()
    if packages is None or library is None:
        what = "Triton" if packages is None else "libpython, which the Python backend loads"
        return _failed(EXIT_NOT_INSTALLED, f"{sys.executable} has no {what}")
    settings = server_settings(options, model, len(os.sched_getaffinity(0)))
    kept = {name: value for name, value in settings.items() if name not in _LEFT_OUT}
    write_repository(options.folder, kept, options.context_length, Path(__file__).parents[3])
    prefix = f"switchyard-{options.server_port}-"
    _remove_shared_memory(prefix)
    try:
        environment = {**os.environ, **server_environment(library, llama_cpp.environment(os.environ), os.environ)}
        return asyncio.run(_serve(options, server_command(options, packages, prefix), environment))
    finally:
        _remove_shared_memory(prefix)


def installed_packages() -> Path | None:
    """The folder of packages that has Triton, or None."""
    found = importlib.util.find_spec("pytriton")
    places = found.submodule_search_locations if found is not None else None
    folder = Path(places[0]).parent if places else None
    return folder if folder is not None and (folder / PROGRAM).exists() else None


def python_library() -> Path | None:
    """The folder of this Python's own library, or None: a backend with another one would run another Python."""
    name = str(sysconfig.get_config_var("INSTSONAME"))
    places = (Path(sys.base_prefix, "lib"), Path(str(sysconfig.get_config_var("LIBDIR"))))
    return next((place for place in places if (place / name).exists()), None)


def server_environment(library: Path, own: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Variables of Triton and its backend. The backend's Python reads no variables of Python's: it takes the prefix of
    the first `python3` in PATH, which must be that of this process."""
    return {
        **own,
        "LD_LIBRARY_PATH": ":".join(filter(None, (str(library), given.get("LD_LIBRARY_PATH", "")))),
        "PATH": ":".join(filter(None, (str(Path(sys.executable).parent), given.get("PATH", "")))),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def server_command(options: ServeOptions, packages: Path, shared_memory: str) -> tuple[str, ...]:
    """Triton's command line: HTTP alone, on loopback, without the parts of its API that change it."""
    return (
        str(packages / PROGRAM),
        *("--model-repository", str(options.folder)),
        *("--backend-directory", str(packages / BACKENDS)),
        *("--backend-config", f"python,shm-region-prefix-name={shared_memory}"),
        "--disable-auto-complete-config",
        *("--http-address", LOOPBACK, "--http-port", str(options.server_port)),
        *("--metrics-address", LOOPBACK, "--metrics-port", str(options.metrics_port)),
        *("--allow-grpc", "false", "--allow-gpu-metrics", "false"),
        *("--http-restricted-api", f"{RESTRICTED}:key={secrets.token_hex(16)}"),
        *("--exit-timeout-secs", f"{STOP_S:.0f}", "--log-info", "false"),
    )


class Children:
    """Triton and the process of its backend that runs the model. `reason`: why they cannot serve; empty if they can."""

    def __init__(self) -> None:
        self.reason = "the model is loading"
        self.watch = StateWatch(lambda: self.reason or "ready")
        self.ended = asyncio.Event()

    def change(self, reason: str) -> None:
        self.reason = reason
        self.watch.changed()

    def end(self, reason: str) -> None:
        if not self.ended.is_set():
            log.error(reason)
            self.change(reason)
            self.ended.set()


async def _serve(options: ServeOptions, command: Sequence[str], environment: Mapping[str, str]) -> int:
    children, triton = Children(), KServe(options.server_port, options.metrics_port)
    api = OpenAiApi(
        triton, HealthPage(lambda: children.reason, children.watch), options.served_model, options.context_length
    )
    listeners = HttpListeners({Endpoint(LOOPBACK, options.port): UsageLedger(api)})
    server = await asyncio.create_subprocess_exec(
        *command, env=environment, preexec_fn=partial(exit_with_parent, os.getpid())
    )
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    tasks = [
        asyncio.create_task(each)
        for each in (listeners.serve(), _watch_server(server, children), _watch_model(options.folder, triton, children))
    ]
    stopping, ended = asyncio.create_task(stopped.wait()), asyncio.create_task(children.ended.wait())
    done, _ = await asyncio.wait((stopping, ended, *tasks), return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    is_failure = children.ended.is_set()
    children.ended.set()
    if is_failure and server.returncode is None:
        server.kill()  # requests end with it
    listeners.stop(GRACE_S)
    with suppress(TimeoutError):
        async with asyncio.timeout(2 * GRACE_S):
            await tasks[0]
    await _stop_server(server)
    for task in (*tasks, stopping, ended):
        task.cancel()
    return EXIT_CANNOT_SERVE if is_failure else 0


async def _watch_server(server: asyncio.subprocess.Process, children: Children) -> None:
    status = await server.wait()
    children.end(f"Triton ended with status {status}")


async def _watch_model(folder: Path, triton: KServe, children: Children) -> None:
    """Waits until the model is ready, and then for the end of its process."""
    while not await triton.is_ready():  # noqa: ASYNC110 - Triton has no event for it
        await asyncio.sleep(READY_POLL_S)
    pid = int((folder / PID_FILE).read_text())
    process, exited = os.pidfd_open(pid), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(process, exited.set)
    children.change("")
    log.info("the model is ready")
    try:
        await exited.wait()
    finally:
        loop.remove_reader(process)
        os.close(process)
    children.end("the model's process ended")


async def _stop_server(server: asyncio.subprocess.Process) -> None:
    if server.returncode is None:
        server.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await server.wait()
        except TimeoutError:
            server.kill()
            await server.wait()


def _remove_shared_memory(prefix: str) -> None:
    """Queues that a killed Triton left behind."""
    for left in SHARED_MEMORY.glob(f"{prefix}*"):
        left.unlink(missing_ok=True)


def _failed(status: int, reason: str) -> int:
    sys.stderr.write(f"{reason}\n")
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
