"""Messages between the control plane and machine agents: what a host has, what it runs, and what it must run. A machine
agent starts, watches, stops and wipes one ingress agent, or one or more node agents; these have their own connections.
A release is a packed version of the agent: its source, and the versions of its dependencies, which its id identifies.
An agent that runs from a checkout has no release."""

import hashlib
import re
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from engine_agent.protocol.states import AgentKind, MachineNoticeKind, MachinePhase

RELEASE_FILE = "release.json"
"""Next to the folder `engine_agent` of a release."""
_RELEASE_ID = re.compile(r"[0-9a-f]{16}")


class Release(Struct, frozen=True):
    """A release's own description. `version` is the project's, `protocol` the one of its agents."""

    id: str
    version: str
    protocol: int


def is_release_id(text: str) -> bool:
    return _RELEASE_ID.fullmatch(text) is not None


def release_in(folder: Path) -> Release | None:
    """Returns the release in a folder, or None for others, such as a checkout."""
    try:
        found = msgspec.json.decode((folder / RELEASE_FILE).read_bytes(), type=Release)
    except (OSError, msgspec.DecodeError):
        return None
    return found if is_release_id(found.id) else None


VERSION_MOST = 32
"""Longest stored version of an agent; those of `version_text` are shorter."""


def version_text(version: str, release: str) -> str:
    """An agent's version: `0.1.0+` and the release's id, or only the version without a release."""
    return f"{version}+{release}" if release else version


def release_of(agent_version: str) -> str:
    found = agent_version.partition("+")[2]
    return found if is_release_id(found) else ""


_MACHINE_ID = re.compile(r"m-[0-9a-f]{8}")


def machine_id_of(nonce: str) -> str:
    """The id of the machine that drew this nonce. Enrolling as this machine requires the nonce."""
    return f"m-{hashlib.sha256(nonce.encode()).hexdigest()[:8]}"


def is_machine_id(text: str) -> bool:
    return _MACHINE_ID.fullmatch(text) is not None


class Device(Struct, frozen=True):
    """One accelerator of a host, as its driver names it. None and "" if the driver does not report it. `index`: the
    driver's number, which can change when a device fails; `uuid` cannot. `numa`: the NUMA node that it is attached to.
    """

    kind: str
    name: str
    cores: int | None = None
    memory_bytes: int | None = None
    index: int | None = None
    uuid: str = ""
    numa: int | None = None


MIG = " MIG "
"""In the name of a MIG instance, between the GPU's and the profile's: `NVIDIA H100 80GB HBM3 MIG 1g.10gb`."""
INSTANCES_FROM, INSTANCES_EACH = 1000, 100
"""Index of the first MIG instance of the first GPU, and the difference to the next GPU's."""


def instance_index(gpu: int, number: int) -> int:
    """The index of a MIG instance of a GPU."""
    return INSTANCES_FROM + INSTANCES_EACH * gpu + number


def gpu_index(index: int) -> int:
    """The index of the GPU of a device, which may be one of its MIG instances."""
    return index if index < INSTANCES_FROM else (index - INSTANCES_FROM) // INSTANCES_EACH


def mig_profile(name: str) -> str:
    """The profile in the name of a MIG instance, as `1g.10gb`; "" for a whole GPU."""
    return name.partition(MIG)[2]


class MachineFacts(Struct, frozen=True):
    """The hardware and software of a host. `port_base`: the first of the free ports for a node. `clock_ahead_s`: its
    clock minus the control plane's, when it joined. `notices`: problems that do not prevent work, one sentence each.
    `cpus`: the CPUs that its agents may use, by NUMA node, threads of one core next to each other; empty from agents
    that run only one node."""

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
    cpus: tuple[tuple[int, ...], ...] = ()


class NodeRun(Struct, frozen=True):
    """One agent of a machine. `reason`: why it does not run, or how it exited last."""

    id: str
    phase: MachinePhase
    reason: str = ""
    agent_pid: int | None = None
    restarts: int = 0


class MachineNotice(Struct, frozen=True, omit_defaults=True):
    """A notice of a machine's cloud that it will take or maintain the machine. `ends_at`: when, in seconds since 1970,
    or None."""

    kind: MachineNoticeKind
    ends_at: float | None = None


class MachineReport(Struct, frozen=True, tag="machine_report"):
    """A machine's complete state; the latest report counts. `runs` is the id of the agent whose folder it has, or "".

    `version` is that of its order. `reason`: why the state differs from the order, or how its agent exited last.
    `wants_to_leave`: the host's owner wants it back. `release_trouble`: why it does not run the ordered release, at
    `attempt`. `nodes`: every agent whose folder it has; `runs` and `agent_pid` are those of the first. `may_reboot`:
    whether its operator allows reboots; `rebooted`: the last order of one that has ended, and `reboot_trouble` why the
    host did not reboot. `notices`: notices of its cloud, one of each kind; None if it is in no cloud or its metadata
    cannot be read."""

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
    nodes: tuple[NodeRun, ...] = ()
    may_reboot: bool = False
    rebooted: str = ""
    reboot_trouble: str = ""
    notices: Annotated[tuple[MachineNotice, ...], Meta(max_length=len(MachineNoticeKind))] | None = None


class NodeResources(Struct, frozen=True):
    """What a node owns of its machine. `devices`: indices of accelerators of the make `kind`, in the order of `uuids`
    ("" where the driver reports none); on a machine without accelerators `kind` is `cpu`, and the devices are numbered
    shares of its CPUs. `share`: of its only device, if other nodes use the rest of it. `cores_per_device`: NeuronCores
    as applications count them; 0 for other makes. `cpus`: the CPUs that its processes run on; empty: all."""

    kind: str
    devices: tuple[int, ...]
    uuids: tuple[str, ...] = ()
    cores_per_device: int = 0
    cpus: tuple[int, ...] = ()
    memory_bytes: int = 0
    share: float = 1.0


class RunAgent(Struct, frozen=True):
    """The node or ingress that a machine must run. `port`: a node's first port, or that of an ingress. `owns`: the
    node's part of the machine; None: all of it."""

    kind: AgentKind
    id: str
    region: str
    address: str
    port: int
    instance_type: str = ""
    topology: tuple[str, ...] = ()
    owns: NodeResources | None = None


class ReleaseOrder(Struct, frozen=True):
    """The release that a machine's agents must run. `digest` is the SHA-256, in hexadecimal, of its archive for this
    host's Python and processor, `size_bytes` its length. A failed release is tried again only when `attempt`
    changes."""

    id: str
    digest: str
    size_bytes: int
    attempt: int = 0


class MachineOrder(Struct, frozen=True, tag="machine_order"):
    """The complete desired state of a machine. It runs `run`, which owns the whole machine, or `nodes`, which share
    it; it stops and wipes all others. With `leave` it wipes all and uninstalls itself. Without `release` it keeps the
    current release. `reboot`: the order of a reboot, which a host carries out once, and only if it was sent now."""

    machine: str
    version: int
    run: RunAgent | None = None
    leave: bool = False
    release: ReleaseOrder | None = None
    nodes: tuple[RunAgent, ...] = ()
    reboot: str = ""

    @property
    def all_runs(self) -> tuple[RunAgent, ...]:
        """Every agent that the machine must run."""
        if self.leave:
            return ()
        return self.nodes if self.run is None else (self.run, *self.nodes)
