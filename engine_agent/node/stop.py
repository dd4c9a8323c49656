"""`python -m engine_agent stop-node --home DIR`: ends the agent of a folder and then all that it started. In
that order, so that nobody starts anything again. It never touches a process of another node.

The journal stays: an agent that is started here later says that its engine has ended, and the control plane decides.
"""

import argparse
import logging
import os
import select
import signal
from pathlib import Path

from engine_agent.node import procfs
from engine_agent.node.journal import CorruptJournal, Journal
from engine_agent.node.lock import read_holder
from engine_agent.node.planning.node import LIMITS
from engine_agent.node.record import JOURNAL_FILE, NodeRecord, ProcessRecord

log = logging.getLogger(__name__)

AGENT_GRACE_S = 5.0
KILLED_WITHIN_S = 5.0
SWEEPS = 5


def run(argv: list[str]) -> int:
    """Stop the node of a folder; return 0 if nothing of it is left."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(prog="python -m engine_agent stop-node", description=__doc__)
    parser.add_argument("--home", required=True, type=Path, help="the folder that the node's agent was started with")
    home: Path = parser.parse_args(argv).home.resolve()
    holder = read_holder(home)
    if holder is None:
        log.error("no agent ever ran for %s", home)
        return 1
    if holder.is_alive():
        _end(holder.pid, AGENT_GRACE_S, is_group=False)
    record = _record(home)
    if record is not None:
        _end_started(record.proxy, LIMITS.proxy_stop_grace_s)
        _end_started(record.engine, LIMITS.engine_stop_grace_s)
    return _sweep(holder.node)


def _record(home: Path) -> NodeRecord | None:
    try:
        return Journal(home / JOURNAL_FILE, NodeRecord).load()
    except CorruptJournal as error:
        log.warning("%s", error)
        return None


def _end_started(started: ProcessRecord | None, grace_s: float) -> None:
    if started is None or started.boot != procfs.boot_id():
        return
    process = procfs.stat(started.pid)
    if process is not None and process.started_ticks == started.started_ticks:
        _end(started.pid, grace_s, is_group=True)


def _end(pid: int, grace_s: float, *, is_group: bool) -> None:
    """SIGTERM, and SIGKILL after `grace_s`; returns when the process has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if is_group:
            procfs.terminate_group(pid)
        else:
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        if not select.select([pidfd], [], [], grace_s)[0]:
            log.warning("pid %d did not end within %g s of SIGTERM; killing it", pid, grace_s)
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            select.select([pidfd], [], [], KILLED_WITHIN_S)
    except ProcessLookupError:
        return
    finally:
        os.close(pidfd)


def _sweep(node_id: str) -> int:
    """Kill what is left of all that agents of this node started; return 0 once nothing is."""
    for _ in range(SWEEPS):
        left = procfs.started_by_agents_of(node_id)
        if not left:
            return 0
        procfs.kill(left)
        for process in left:
            _end(process.pid, KILLED_WITHIN_S, is_group=False)
    log.error("still running: %s", ", ".join(str(process.pid) for process in procfs.started_by_agents_of(node_id)))
    return 1
