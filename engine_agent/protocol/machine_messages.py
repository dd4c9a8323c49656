"""Messages between the control plane and machine agents: what a host is, what it runs, and what it is to run.

A machine agent starts, watches, stops and wipes one node or ingress agent; that agent speaks for itself.
"""

import hashlib
import re
from pathlib import Path

import msgspec
from msgspec import Struct

from engine_agent.protocol.states import AgentKind, MachinePhase

RELEASE_FILE = "release.json"
"""Beside the folder `engine_agent` of a release."""
_RELEASE_ID = re.compile(r"[0-9a-f]{16}")


class Release(Struct, frozen=True):
    """What a release says of itself. `version` is the project's, `protocol` what its agents speak."""

    id: str
    version: str
    protocol: int


def is_release_id(text: str) -> bool:
    """Whether a release can be called so."""
    return _RELEASE_ID.fullmatch(text) is not None


def release_in(folder: Path) -> Release | None:
    """The release that was unpacked into a folder; None if none was, such as for a checkout."""
    try:
        found = msgspec.json.decode((folder / RELEASE_FILE).read_bytes(), type=Release)
    except (OSError, msgspec.DecodeError):
        return None
    return found if is_release_id(found.id) else None


VERSION_MOST = 32
"""Characters of an agent's version that are kept: what `version_text` makes has fewer."""


def version_text(version: str, release: str) -> str:
    """How an agent states its version: `0.1.0+` and the release's id; without a release the version alone."""
    return f"{version}+{release}" if release else version


def release_of(agent_version: str) -> str:
    """The id in what `version_text` made; "" if there is none."""
    found = agent_version.partition("+")[2]
    return found if is_release_id(found) else ""


_MACHINE_ID = re.compile(r"m-[0-9a-f]{8}")


def machine_id_of(nonce: str) -> str:
    """The id of the machine that drew this nonce: nobody who does not know the nonce can enrol as that machine."""
    return f"m-{hashlib.sha256(nonce.encode()).hexdigest()[:8]}"


def is_machine_id(text: str) -> bool:
    """Whether a machine can be called so."""
    return _MACHINE_ID.fullmatch(text) is not None


class Device(Struct, frozen=True):
    """One accelerator of a host, as its driver names it. None: the driver does not say."""

    kind: str
    name: str
    cores: int | None = None
    memory_bytes: int | None = None


class MachineFacts(Struct, frozen=True):
    """What a host has, as its agent found it. `port_base`: the first of the ports that are free for a node.

    `clock_ahead_s`: its clock less the control plane's, when it joined. `notices`: what does not keep it from working,
    a sentence each.
    """

    address: str
    port_base: int
    cores: int
    memory_bytes: int
    disk_free_bytes: int
    devices: tuple[Device, ...] = ()
    driver: str = ""
    hostname: str = ""
    system: str = ""
    python: str = ""
    clock_ahead_s: float = 0.0
    notices: tuple[str, ...] = ()


class MachineReport(Struct, frozen=True, tag="machine_report"):
    """A machine's state, whole; the latest wins. `runs` is the id of the agent that it has a folder of, "" for none.

    `version` is of the order that it follows. `reason`: why it is not as ordered, or how its agent ended last.
    `wants_to_leave`: whoever owns the host wants it back. `release_trouble`: why it does not run the release that its
    order names, of `attempt`.
    """

    seq: int
    version: int
    phase: MachinePhase
    runs: str = ""
    reason: str = ""
    agent_pid: int | None = None
    restarts: int = 0
    wants_to_leave: bool = False
    release_trouble: str = ""
    attempt: int = 0


class RunAgent(Struct, frozen=True):
    """The node or ingress that a machine is to be. `port`: the first of a node's ports, or that of an ingress."""

    kind: AgentKind
    id: str
    region: str
    address: str
    port: int
    instance_type: str = ""
    topology: tuple[str, ...] = ()


class ReleaseOrder(Struct, frozen=True):
    """The release that a machine's agents are to run. `digest` is the SHA-256, in hexadecimal, of its archive for this
    host's Python and processor, `size_bytes` its length. What failed once is not tried again before `attempt` is
    another one."""

    id: str
    digest: str
    size_bytes: int
    attempt: int = 0


class MachineOrder(Struct, frozen=True, tag="machine_order"):
    """All that a machine must do. `run` None: nothing runs, and what ran is wiped. `leave`: it also uninstalls.
    `release` None: its agents stay as they are."""

    machine: str
    version: int
    run: RunAgent | None = None
    leave: bool = False
    release: ReleaseOrder | None = None
