"""`python -m engine_agent node …`: runs the agent of one node until a signal, and never a second one for the same
folder."""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import uuid
from functools import partial
from pathlib import Path

from engine_agent.engines.registry import engine_pythons
from engine_agent.node.agent import SERVICE, NodeAgent
from engine_agent.node.devices import resources_from, use_own_cpus
from engine_agent.node.enrolment import Enrolment
from engine_agent.node.launch import NodePlace
from engine_agent.node.lock import AgentLock, HomeInUse
from engine_agent.node.planning.node import LIMITS, ConvergeLimits
from engine_agent.node.telemetry.fingerprint import AGENT_ROOT, StackFingerprint, agent_version
from engine_agent.node.telemetry.host import read_inventory
from engine_agent.protocol.identity import links_are_plain
from engine_agent.protocol.log_lines import configure_logging
from engine_agent.protocol.machine_messages import NodeResources
from engine_agent.protocol.messages import PROTOCOL_VERSION, Hello
from engine_agent.protocol.states import AgentKind

FETCHED = "fetched"
"""Of the cache: artifacts from S3. Next to `engines` and `artifacts`, which are never removed automatically."""


def run(argv: list[str], limits: ConvergeLimits = LIMITS) -> int:
    os.umask(0o077)
    options = _arguments(argv)
    home: Path = options.home.resolve()
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        configure_logging(os.environ, SERVICE)
        if options.owns is not None:
            use_own_cpus(options.owns)
        with AgentLock(home, options.node_id):
            asyncio.run(_run_until_signalled(options, home, limits))
    except (HomeInUse, ValueError) as error:
        sys.stderr.write(f"the agent of {options.node_id} does not start: {error}\n")
        return 1
    return 0


async def _run_until_signalled(options: argparse.Namespace, home: Path, limits: ConvergeLimits) -> None:
    boot_id, version = uuid.uuid4().hex, agent_version()  # read once: the running version is the one of the start
    cache = _cache()
    pythons = partial(engine_pythons, cache)  # called each time: an engine may be installed meanwhile
    stack = StackFingerprint(home, pythons)
    place = NodePlace(
        options.node_id,
        home,
        options.host,
        options.port_base,
        AGENT_ROOT,
        cache / FETCHED,
        pythons,
        not links_are_plain(os.environ),
        options.owns,
    )
    enrolment = Enrolment(
        options.server, AgentKind.NODE, options.node_id, home, os.environ.get("SWITCHYARD_JOIN_TOKEN") or None
    )

    def hello() -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            kind=AgentKind.NODE,
            id=options.node_id,
            boot_id=boot_id,
            agent_version=version,
            inventory=read_inventory(options.instance_type, options.host, options.port_base, options.owns),
            topology=options.topology,
            fingerprint=stack.read(),
        )

    agent = NodeAgent(place=place, enrolment=enrolment, hello=hello, stack=stack.read, limits=limits)
    running = asyncio.ensure_future(agent.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await running


def _cache() -> Path:
    return Path(os.environ.get("SWITCHYARD_CACHE") or AGENT_ROOT / ".cache").absolute()


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m engine_agent node", description=__doc__)
    parser.add_argument("--node-id", required=True, help="n- and eight hexadecimal digits")
    parser.add_argument("--home", required=True, type=Path, help="folder for the journal, the credential and the logs")
    parser.add_argument(
        "--server", required=True, help="the control plane, https://HOST:PORT; several hosts separated by commas"
    )
    parser.add_argument("--instance-type", required=True)
    parser.add_argument("--region", required=True)
    parser.add_argument("--host", required=True, help="address that this node's processes listen on")
    parser.add_argument("--port-base", required=True, type=int, help="first of the node's ports")
    parser.add_argument("--topology", type=_names, default=(), help="network nodes, widest first: a,b,c")
    parser.add_argument(
        "--owns", type=_resources, help="JSON: the devices, CPUs and memory of the machine that this node owns"
    )
    return parser.parse_args(argv)


def _resources(text: str) -> NodeResources:
    try:
        return resources_from(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)
