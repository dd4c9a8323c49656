"""`python -m engine_agent check --code DIR`: whether this release works on this host, before the switch to it. It
imports every agent and reads the journals of running ones. It changes nothing."""

import argparse
import importlib
import sys
from pathlib import Path

import msgspec

from engine_agent.ingress.application_tls import JOURNAL_FILE as APPLICATIONS_FILE
from engine_agent.node.machine.paths import HostPaths
from engine_agent.node.record import JOURNAL_FILE, NodeRecord
from engine_agent.node.telemetry.fingerprint import agent_version
from engine_agent.protocol.ingress_messages import ApplicationTls, RoutingTable
from engine_agent.protocol.machine_messages import MachineOrder

AGENTS = (
    "engine_agent.node.machine.main",
    "engine_agent.node.main",
    "engine_agent.ingress.main",
    "engine_agent.cell_proxy",
)


def run(argv: list[str]) -> int:
    """Runs the check; returns the exit status. The last line of its output says what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m engine_agent check", description=__doc__)
    parser.add_argument("--code", required=True, type=Path)
    paths = HostPaths(parser.parse_args(argv).code)
    try:
        for name in AGENTS:
            importlib.import_module(name)
        _read_journals(paths)
    except (ImportError, OSError, ValueError, msgspec.DecodeError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{agent_version()}\n")
    return 0


def _read_journals(paths: HostPaths) -> None:
    of_agents = (
        (journal, RoutingTable if journal.parent.name.startswith("i-") else NodeRecord)
        for journal in paths.runs.glob(f"*/{JOURNAL_FILE}")
    )
    of_ingresses = ((journal, ApplicationTls) for journal in paths.runs.glob(f"*/{APPLICATIONS_FILE}"))
    for journal, kind in ((paths.home / JOURNAL_FILE, MachineOrder), *of_agents, *of_ingresses):
        if journal.exists():
            try:
                msgspec.json.decode(journal.read_bytes(), type=kind)
            except msgspec.DecodeError as error:
                raise ValueError(f"it cannot read {journal}: {error}") from None
