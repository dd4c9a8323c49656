"""A node or ingress agent that a machine runs: start it, find it again, stop it with everything that it started, and
wipe its folder. `agent` decides which ones run."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from engine_agent.engines.base import NODE_ID_VARIABLE
from engine_agent.node import procfs
from engine_agent.node.journal import CorruptJournal, Journal
from engine_agent.node.logs import bound, last_lines
from engine_agent.node.machine.paths import HostPaths
from engine_agent.protocol.machine_messages import RunAgent
from engine_agent.protocol.states import AgentKind

RECORD_FILE = "tenant.json"
LOG_FILE = "agent.log"
STOP_LIMIT_S = 60.0
KILLED_WITHIN_S = 5.0
INGRESS_GRACE_S = 15.0
SWEEPS = 10
PASSED_ON = (
    "PATH", "LANG", "HOME", "SWITCHYARD_LOG_FORMAT", "SWITCHYARD_SERVICE_UIDS", "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG", "OTEL_SDK_DISABLED",
    "SWITCHYARD_PLAIN_LINKS", "SWITCHYARD_ARTIFACT_CACHE_GIB", "SWITCHYARD_BUILD_CACHE_GIB",
    "SWITCHYARD_COMPILE_CACHE_GIB", "AWS_REGION",
    "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL_STS", "AWS_CA_BUNDLE",
    "SWITCHYARD_DEEP_CHECKS",
)  # fmt: skip


class Started(msgspec.Struct, frozen=True):
    """The process that was started last; its pid alone is not unique. `code`: its release."""

    run: RunAgent
    pid: int
    started_ticks: int
    boot: str
    code: str = ""


def tenant_names(paths: HostPaths) -> list[str]:
    """Returns the agents with a folder on this machine, whether they run or not."""
    return sorted(path.name for path in paths.runs.glob("*") if path.is_dir())


class Tenant:
    """One agent of this machine. Its folder exists as long as anything of it may exist."""

    def __init__(self, name: str, paths: HostPaths, root: Path, variables: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.folder = paths.runs / name
        self._cache, self._root, self._variables = paths.cache, root, variables or {}
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def is_here(self) -> bool:
        return self.folder.is_dir()

    def started(self) -> Started | None:
        """The process that was started last, alive or not."""
        try:
            return Journal(self.folder / RECORD_FILE, Started).load()
        except (CorruptJournal, OSError):
            return None

    def pid(self) -> int | None:
        if self._child is not None:
            self._child.poll()  # reap an exited child
        known = self.started()
        if known is None or known.boot != procfs.boot_id():
            return None
        process = procfs.stat(known.pid)
        return known.pid if process is not None and process.started_ticks == known.started_ticks else None

    @property
    def is_of_other_release(self) -> bool:
        """Whether its agent runs from another release than this process."""
        known = self.started()
        return known is not None and known.code != str(self._root) and self.pid() is not None

    def kill_agent(self) -> None:
        """Kills its agent, without its processes: on SIGTERM an ingress agent would stop its HAProxy."""
        if (pid := self.pid()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._await_end(KILLED_WITHIN_S)

    def start(self, run: RunAgent, server: str) -> None:
        """Starts its agent, which adopts a running engine. Raises OSError if it cannot be started."""
        folder = self.folder
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        bound(folder / LOG_FILE)
        with (folder / LOG_FILE).open("ab") as log:
            self._child = subprocess.Popen(
                command(run, folder, server),
                env=self._environment(self.name),
                cwd=folder,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        process = procfs.stat(self._child.pid)
        ticks = process.started_ticks if process is not None else 0
        Journal(folder / RECORD_FILE, Started).save(
            Started(run, self._child.pid, ticks, procfs.boot_id(), str(self._root))
        )

    def end_reason(self) -> str:
        lines = last_lines(self.folder / LOG_FILE, 1)
        return f"its agent exited: {lines[0]}" if lines else "its agent exited"

    def wipe(self) -> str:
        """Stops all its processes and removes its folder. Returns what is left, or "". Blocks for a while."""
        if not self.is_here:
            return ""
        self._stop()
        left = self._kill_remaining()
        if left:
            return f"{len(left)} processes of {self.name} do not exit: {', '.join(map(str, left))}"
        shutil.rmtree(self.folder, ignore_errors=True)
        return f"{self.folder} cannot be removed" if self.folder.exists() else ""

    def _stop(self) -> None:
        known = self.started()
        if known is not None and known.run.kind is AgentKind.INGRESS:
            if (pid := self.pid()) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)  # its streams finish
                self._await_end(INGRESS_GRACE_S)
            return
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                [sys.executable, "-m", "engine_agent", "stop-node", "--home", str(self.folder)],
                env=self._environment(""),
                capture_output=True,
                timeout=STOP_LIMIT_S,
                check=False,
            )

    def _await_end(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while self.pid() is not None and time.monotonic() < deadline:
            time.sleep(0.1)

    def _kill_remaining(self) -> list[int]:
        for _ in range(SWEEPS):
            left = procfs.of_node(self.name)
            if not left:
                break
            procfs.kill(left)
            time.sleep(0.2)
        self.pid()
        return [process.pid for process in procfs.of_node(self.name)]

    def _environment(self, name: str) -> dict[str, str]:
        kept = {variable: os.environ[variable] for variable in PASSED_ON if variable in os.environ}
        return {
            **kept,
            **({NODE_ID_VARIABLE: name} if name else {}),
            "SWITCHYARD_CACHE": str(self._cache),
            **self._variables,
            "PYTHONPATH": str(self._root),
            "PYTHONUNBUFFERED": "1",
        }


def command(run: RunAgent, folder: Path, server: str) -> list[str]:
    own = ["ingress", "--ingress-id", run.id, "--port", str(run.port)]
    if run.kind is AgentKind.NODE:
        own = ["node", "--node-id", run.id, "--port-base", str(run.port), "--instance-type", run.instance_type]
        own += ["--topology", ",".join(run.topology)]
        own += ["--owns", msgspec.json.encode(run.owns).decode()] if run.owns is not None else []
    common = ["--home", str(folder), "--server", server, "--region", run.region, "--host", run.address]
    return [sys.executable, "-m", "engine_agent", *own, *common]
