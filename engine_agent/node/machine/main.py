"""`python -m engine_agent machine --code DIR` runs the agent of a joined host. It exits on a signal, to start another
release, or when it has left; then the host is uninstalled. `python -m engine_agent facts` prints what the host has."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import msgspec

from engine_agent.node.enrolment import NONCE_FILE, Enrolment
from engine_agent.node.imds import metadata_here
from engine_agent.node.lock import AgentLock, HomeInUse
from engine_agent.node.machine.agent import MachineAgent
from engine_agent.node.machine.facts import read_facts
from engine_agent.node.machine.paths import HostPaths, Joined
from engine_agent.node.machine.reboots import Reboots
from engine_agent.node.machine.release_change import ReleaseChange
from engine_agent.node.machine.service import LEFT
from engine_agent.node.machine.tenant import Tenant
from engine_agent.node.telemetry.fingerprint import AGENT_ROOT, agent_version
from engine_agent.protocol.log_lines import configure_logging
from engine_agent.protocol.machine_messages import MachineFacts, machine_id_of, release_in
from engine_agent.protocol.messages import PROTOCOL_VERSION, Hello
from engine_agent.protocol.states import AgentKind

log = logging.getLogger(__name__)

FACTS_LIMIT_S = 60.0


def run(argv: list[str]) -> int:
    """Runs the agent. Exit status 3: the host has left; 4: start the agent again, from another release."""
    os.umask(0o077)
    parser = argparse.ArgumentParser(prog="python -m engine_agent machine", description=__doc__)
    parser.add_argument("--code", required=True, type=Path, help="the folder of the installation")
    paths = HostPaths(parser.parse_args(argv).code)
    try:
        joined = paths.joined()
        machine = joined.machine or machine_id_of((paths.home / NONCE_FILE).read_text(encoding="ascii").strip())
        configure_logging(os.environ, "switchyard-machine")
        with AgentLock(paths.home, machine):
            status = asyncio.run(_run_until_signalled(paths, joined, machine))
    except (HomeInUse, OSError, ValueError, msgspec.DecodeError) as error:
        sys.stderr.write(f"the machine agent does not start: {error}\n")
        return 1
    if status == LEFT:
        uninstall_in_background(paths)
    return status


async def _run_until_signalled(paths: HostPaths, joined: Joined, machine: str) -> int:
    boot_id, version = uuid.uuid4().hex, agent_version()
    facts = await asyncio.to_thread(_facts, paths, joined)

    def hello() -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            kind=AgentKind.MACHINE,
            id=machine,
            boot_id=boot_id,
            agent_version=version,
            machine=facts,
        )

    enrolment = Enrolment(joined.server, AgentKind.MACHINE, machine, paths.home)
    agent = MachineAgent(
        paths=paths,
        tenant=lambda name: Tenant(name, paths, AGENT_ROOT, joined.variables),
        enrolment=enrolment,
        hello=hello,
        release=ReleaseChange(paths, release_in(AGENT_ROOT)),
        reboots=Reboots(paths),
        metadata=metadata_here(joined.variables),
    )
    running = asyncio.ensure_future(agent.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        return await running
    return 0


def _facts(paths: HostPaths, joined: Joined) -> MachineFacts:
    """The current facts, read by a child process, so that memory used by drivers is released."""
    command = [sys.executable, "-m", "engine_agent", "facts", "--code", str(paths.code)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=FACTS_LIMIT_S, check=True)
        return msgspec.json.decode(done.stdout, type=MachineFacts)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        log.warning("the facts of the host cannot be read; those of when it joined are used: %s", error)
        return joined.facts


def print_facts(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine_agent facts")
    parser.add_argument("--code", required=True, type=Path)
    paths = HostPaths(parser.parse_args(argv).code)
    then = paths.joined().facts
    now = read_facts(then.address, then.port_base, paths.state, clock_ahead_s=then.clock_ahead_s)
    sys.stdout.write(msgspec.json.encode(now).decode())
    return 0


def uninstall_in_background(paths: HostPaths) -> None:
    """Uninstalls in a separate session, which survives this process and its unit."""
    subprocess.Popen(
        [sys.executable, "-m", "engine_agent", "leave", "--now", "--code", str(paths.code)],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
