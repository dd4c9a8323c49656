"""The use of a node, in its reports: its devices and their energy, deep checks, and the builds, weights and compile
caches that it has. Units are in the field names: `_s` seconds, `_ms` milliseconds, `_bytes` bytes."""

from typing import Annotated

from msgspec import Meta, Struct, field


class DeviceClocks(Struct, frozen=True, omit_defaults=True):
    """The clock of a device now, and `reasons` why it is below its maximum, by the driver's names.

    Sums since its reader started, without idle time: `sampled_ms`; `full_clock_ms`, the equivalent time at the maximum;
    `reason_ms` by reason, of those that make it slow (`engine_agent.protocol.signatures.SLOW_CLOCK_REASONS`)."""

    clock_mhz: int = 0
    max_clock_mhz: int = 0
    reasons: Annotated[tuple[str, ...], Meta(max_length=16)] = ()
    sampled_ms: int = 0
    full_clock_ms: int = 0
    reason_ms: Annotated[dict[str, int], Meta(max_length=16)] = field(default_factory=dict)


class Accelerator(Struct, frozen=True):
    """One device and its use. `errors` counts since its driver was loaded, by the maker's names. Unknown values are
    None or "". `numa`: the NUMA node that it is attached to."""

    index: int
    kind: str
    name: str
    cores: int | None = None
    utilisation_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    errors: dict[str, int] = field(default_factory=dict)
    uuid: str = ""
    numa: int | None = None
    clocks: DeviceClocks | None = None
    temperature_c: float | None = None
    power_watts: float | None = None

    def __str__(self) -> str:
        parts = [f"{self.kind} {self.index}: {self.name}"]
        parts += [f"{self.cores} cores"] if self.cores is not None else []
        parts += [f"{self.memory_total_bytes / 2**30:.0f} GiB"] if self.memory_total_bytes is not None else []
        return ", ".join(parts)


class EnergyMeter(Struct, frozen=True, omit_defaults=True):
    """Sums of the energy counters of one part of a machine since their reader started, which `since` names.

    `covers`: `accelerators` or `host`. `microjoules` within `covered_ms`. `full_power_ms`: for devices that report
    their power as a share of the maximum, the equivalent time at full power. `refused`: implausible readings, which are
    in none of the sums."""

    name: str
    covers: str
    since: str
    microjoules: int = 0
    full_power_ms: int = 0
    covered_ms: int = 0
    refused: int = 0


class NetworkDevice(Struct, frozen=True, omit_defaults=True):
    """A network device with remote memory access (EFA). `state` of its port: `ACTIVE`, or empty if unknown. `errors`
    counts for the life of the device, by the driver's names."""

    name: str
    state: str = ""
    errors: dict[str, int] = field(default_factory=dict)


CHECKS_MAX = 32


class CheckResult(Struct, frozen=True, omit_defaults=True):
    """The result of one deep check (`engine_agent.node.checks.result.Result`). `ok` None: it could not run."""

    check: Annotated[str, Meta(max_length=64)]
    ok: bool | None
    found: Annotated[str, Meta(max_length=400)]
    wanted: Annotated[str, Meta(max_length=400)] = ""
    seconds: float = 0.0
    numbers: Annotated[dict[str, float], Meta(max_length=16)] = field(default_factory=dict)


class CheckReport(Struct, frozen=True, omit_defaults=True):
    """The last or current deep checks of a node. `request`: the id of the request, or `joining`. Times are seconds
    since 1970 by its clock; `ended_at` None: still running."""

    request: Annotated[str, Meta(max_length=64)]
    began_at: float
    ended_at: float | None = None
    results: Annotated[tuple[CheckResult, ...], Meta(max_length=CHECKS_MAX)] = ()


NODE_BUILDS_MAX = 32


class NodeBuild(Struct, frozen=True, omit_defaults=True):
    """An engine build on a machine. `fetching`: the progress of one that is not complete yet. `peer_bytes`: what came
    from other nodes, not from the control plane or a bucket."""

    digest: str
    serves: str = ""
    version: str = ""
    unpacked_bytes: int = 0
    fetching: str = ""
    peer_bytes: int = 0


class NodeCache(Struct, frozen=True, omit_defaults=True):
    """The compile cache of a node's latest start. `state`: what became of it, in words. `digest` and `packed_bytes`: of
    the archive that was fetched or uploaded; `peer_bytes`: how much of it came from other nodes."""

    key: Annotated[str, Meta(max_length=64)]
    state: Annotated[str, Meta(max_length=400)]
    digest: Annotated[str, Meta(max_length=64)] = ""
    packed_bytes: int = 0
    peer_bytes: int = 0


OFFERED_CACHES_MAX = 64
NODE_ARTIFACTS_MAX = 64


class NodeArtifact(Struct, frozen=True, omit_defaults=True):
    """Weights on a machine, or on their way there. `fetching`: the progress of those that are not complete yet.
    `is_offered`: other nodes may fetch them from this one. `peer_bytes`: what came from other nodes. `memory_bytes`:
    how much of them a spare holds in its page cache."""

    digest: Annotated[str, Meta(max_length=80)]
    stored_bytes: int = 0
    fetching: Annotated[str, Meta(max_length=200)] = ""
    is_offered: bool = False
    peer_bytes: int = 0
    memory_bytes: int = 0


class Prefetched(Struct, frozen=True, omit_defaults=True):
    """What a node holds and fetches. `artifacts`: weights. `troubles`: by digest, why a build or weights that it should
    fetch in advance are missing; it tries again."""

    artifacts: Annotated[tuple[NodeArtifact, ...], Meta(max_length=NODE_ARTIFACTS_MAX)] = ()
    troubles: Annotated[dict[str, str], Meta(max_length=NODE_ARTIFACTS_MAX)] = field(default_factory=dict)


class HostUse(Struct, frozen=True, omit_defaults=True):
    """Use of a machine's memory, of the file system with the node's files, of its disks and of its network, which all
    its nodes share. Bytes moved are totals since the machine started; None if unknown."""

    memory_bytes: int | None = None
    filesystem_used_bytes: int | None = None
    filesystem_bytes: int | None = None
    disk_read_bytes: int | None = None
    disk_written_bytes: int | None = None
    network_received_bytes: int | None = None
    network_sent_bytes: int | None = None


class NodeTelemetry(Struct, frozen=True, omit_defaults=True):
    """Use of a node and of its accelerators, and problems of its agent. None and empty: nothing to report.

    `accelerator_trouble`: by maker, why its devices may be out of date or missing. `refused_order`: why the last
    rejected order was rejected. `journal_error`: why the agent cannot write its journal. `checks` None: no deep checks
    yet. `network`: EFA devices. `offered_caches`: SHA-256, in hexadecimal, of archives of compile caches that other
    nodes may fetch. `prefetched` None: the agent's release fetches nothing in advance."""

    host_cpu_percent: float | None = None
    host_memory_used_bytes: int | None = None
    agent_rss_bytes: int | None = None
    engine_rss_bytes: int | None = None
    accelerators: tuple[Accelerator, ...] = ()
    accelerator_trouble: dict[str, str] = field(default_factory=dict)
    refused_order: str = ""
    journal_error: str = ""
    energy: Annotated[tuple[EnergyMeter, ...], Meta(max_length=8)] = ()
    checks: CheckReport | None = None
    network: Annotated[tuple[NetworkDevice, ...], Meta(max_length=64)] = ()
    builds: Annotated[tuple[NodeBuild, ...], Meta(max_length=NODE_BUILDS_MAX)] = ()
    compile_caches: Annotated[tuple[NodeCache, ...], Meta(max_length=1)] = ()
    offered_caches: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=OFFERED_CACHES_MAX)] = ()
    prefetched: Prefetched | None = None
    host: HostUse | None = None
