"""Processes of the `local` provider's machines: started detached in their own sessions, so that they outlive the worker
that launched them, found again by the node ID in their environment, and stopped."""

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from fleet.reconcile.planning.snapshot import ProviderStatus

NODE_VARIABLE = "SWITCHYARD_NODE_ID"
HOME_VARIABLE = "SWITCHYARD_HOME"
CODE_VARIABLE = "PYTHONPATH"
TERM_GRACE_S = 3.0
SPAWN_LIMIT_S = 10.0
SESSION_NICE = -5
"""Where the kernel shares the CPU by session: an agent's work is healing. Processes that it starts have own sessions.
"""
_DETACH = f"""
import contextlib, os, sys
os.nice(max(0, -os.nice(0)))
os.setsid()
with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as group:
    group.write("{SESSION_NICE}")
os.fork() and os._exit(0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def spawn_detached(argv: list[str], environment: dict[str, str], log: Path) -> None:
    """Starts a program in its own session, detached from the process tree, with its output appended to `log`. The
    program does not depend on its starter's session or place in the process tree, and does not inherit its priority."""
    with log.open("ab") as output:
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", _DETACH, *argv],
            env=environment,
            cwd=log.parent,  # first entry of Python's module search path
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=SPAWN_LIMIT_S,
            check=True,
        )


def processes_by_node(home: Path) -> dict[str, list[psutil.Process]]:
    """Returns live processes of this home's machines by node ID, from their environment."""
    processes: dict[str, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            environment: dict[str, Any] = process.environ()
            node_id = environment.get(NODE_VARIABLE)
            if node_id and environment.get(HOME_VARIABLE) == str(home):
                processes.setdefault(node_id, []).append(process)
    return processes


def machine_status(processes: list[psutil.Process]) -> ProviderStatus:
    """A machine runs while its agent or engine runs: a cell proxy alone does not serve."""
    commands = [_process_command(process) for process in processes]
    if any("engine_agent" in command for command in commands):
        return ProviderStatus.RUNNING
    bystanders = ("engine_agent.cell_proxy", "multiprocessing.resource_tracker")
    engines = [command for command in commands if not any(name in " ".join(command) for name in bystanders)]
    return ProviderStatus.AGENT_DEAD if any(engines) else ProviderStatus.GONE


def _process_command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def agent_of(processes: list[psutil.Process]) -> psutil.Process | None:
    for process in processes:
        if _process_command(process)[1:4] in (["-m", "engine_agent", "node"], ["-m", "engine_agent", "ingress"]):
            return process
    return None


def code_of(process: psutil.Process) -> str:
    """Returns the folder whose code a process runs; "" if the process has exited."""
    with contextlib.suppress(psutil.Error):
        return str(process.environ().get(CODE_VARIABLE, ""))
    return ""


def kill_agent(process: psutil.Process) -> None:
    """Kills an agent and nothing else: on SIGTERM an ingress agent would stop its HAProxy."""
    with contextlib.suppress(psutil.Error):
        process.kill()
        process.wait(TERM_GRACE_S)


def stop_processes(processes: list[psutil.Process]) -> None:
    """SIGTERM, a short grace period, SIGKILL. Returns when they are gone."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=TERM_GRACE_S)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    deadline = time.monotonic() + TERM_GRACE_S
    psutil.wait_procs(alive, timeout=max(0.0, deadline - time.monotonic()))
