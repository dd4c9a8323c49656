"""Engine builds: what a packed build states about itself, and which hosts can run it; and builds that a machine's image
provides. Pure. Agents use it before they fetch a build, the control plane before it stores one, and the packer writes
it."""

import hashlib
import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from engine_agent.protocol.manifest import DIGEST_PREFIX
from engine_agent.protocol.neuron_targets import TARGETS, NeuronTarget
from engine_agent.protocol.strict_json import strict_loads

BUILD_FILE = "build.json"
"""Of a packed build: its facts, next to the parts of its archive."""
PART_PREFIX = "part-"
PART_BYTES = 64 * 1024**2
"""Of the archive in one part, before compression."""
MOST_PART_BYTES = PART_BYTES + 1024**2
"""Of a compressed part: gzip adds some 20 kB to content that it cannot compress."""
MOST_BUILD_BYTES = 128 * 1024**3
MOST_PARTS = MOST_BUILD_BYTES // PART_BYTES
MOST_FACTS_BYTES = 64 * 1024
GENERIC_PREFIX = "generic/"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_VERSION = re.compile(r"\d{1,5}(\.\d{1,5}){0,3}")
_FREE_TEXT = re.compile(r"[A-Za-z0-9][A-Za-z0-9 .,+_/-]{0,63}")
_PROGRAM = re.compile(r"(?!.*(^|/)\.\.?(/|$))[A-Za-z0-9_][A-Za-z0-9._/-]{0,127}")
_FLAG = re.compile(r"[a-z0-9_]{1,32}")
ARCHITECTURES = ("x86_64", "aarch64")


class BadBuild(ValueError):
    """The facts of a build are wrong; the text names the field and the rule."""


class BuildFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """The identity of a build and its needs on a host.

    `serves` is the engine that it provides: `vllm`, `llama-cpp`, `neuron`, or `generic/NAME` for a program of engine
    `generic`. `program` is started; its path is relative to the build. `cpu_flags` as in /proc/cpuinfo. `least_glibc`
    follows from the symbol versions of its ELF files, `least_driver` is NVIDIA's; empty: none needed."""

    serves: str
    version: str
    platform: str
    program: str
    python: str
    cpu_arch: str
    least_glibc: str
    unpacked_bytes: int
    packed_bytes: int
    parts: int
    cpu_flags: tuple[str, ...] = ()
    least_driver: str = ""

    @property
    def engine(self) -> str:
        return self.serves.partition("/")[0]


class EngineBuild(Struct, frozen=True):
    """A build in an order. `uri`: its S3 prefix, or that of an external build; empty: the control plane hands it out.
    `digest`: of its manifest."""

    name: str
    digest: str = ""
    uri: str = ""
    facts: BuildFacts | None = None

    @property
    def is_external(self) -> bool:
        """Whether a machine's image provides it."""
        return self.uri.startswith(EXTERNAL)


EXTERNAL = "external://"
_EXTERNAL_NEURON = f"{EXTERNAL}neuron-"


def external_target(uri: str) -> NeuronTarget:
    """The build that `external://neuron-SDK` names. Raises BadBuild if there is no such release."""
    for target in TARGETS:
        if uri == f"{_EXTERNAL_NEURON}{target.sdk}":
            return target
    known = ", ".join(f"{_EXTERNAL_NEURON}{target.sdk}" for target in TARGETS)
    raise BadBuild(f"{uri[:80]!r} is no external build; there are {known}")


def external_facts(uri: str) -> tuple[str, BuildFacts]:
    """Digest and facts of an external build. The digest is of the packages that it must have. Raises BadBuild if there
    is no such build."""
    target = external_target(uri)
    identity = json.dumps([uri, dict(target.distributions)], sort_keys=True)
    facts = BuildFacts(
        serves="neuron", version=target.sdk, platform=f"neuron-{target.sdk}", program="bin/python", python="",
        cpu_arch="x86_64", least_glibc="", unpacked_bytes=0, packed_bytes=0, parts=0,
    )  # fmt: skip
    return f"{DIGEST_PREFIX}{hashlib.sha256(identity.encode()).hexdigest()}", facts


@dataclass(frozen=True, slots=True)
class HostFacts:
    """A host. `driver`: NVIDIA's; empty: none is loaded."""

    cpu_arch: str
    cpu_flags: Collection[str]
    glibc: str
    driver: str = ""


class NeededBuild(Struct, frozen=True):
    """A build that deployments of a region name for machines with accelerators of this make; `cpu`: without any."""

    make: str
    build: EngineBuild


def why_no_build_runs(needed: Iterable[NeededBuild], makes: Collection[str], host: HostFacts) -> str:
    """Why a host could run no cell: it is below the floors of every build that deployments name for its accelerators.
    Empty if it can run one of them, or none is named. `makes`: of its accelerators."""
    whys = {
        one.build.name: why_unsuitable(one.build.facts, host)
        for one in needed
        if one.make in (makes or {"cpu"}) and one.build.facts is not None
    }
    if not whys or not all(whys.values()):
        return ""
    reasons = "; ".join(f"{name}: {why}" for name, why in sorted(whys.items()))
    return f"this host can run no engine build that deployments of its region name: {reasons}"


def parse_facts(text: str | bytes, where: str) -> BuildFacts:
    """Parses a `build.json`; `where` names it in errors. Raises BadBuild if a field is missing, unknown or invalid."""
    if len(text) > MOST_FACTS_BYTES:
        raise BadBuild(f"{where} has more than {MOST_FACTS_BYTES} bytes")
    try:
        facts = msgspec.convert(strict_loads(text), BuildFacts)
    except (ValueError, RecursionError) as error:
        raise BadBuild(f"{where} does not describe a build: {error}") from None
    if wrong := wrong_facts(facts):
        raise BadBuild(f"{where}: {wrong}")
    return facts


def wrong_facts(facts: BuildFacts) -> str:
    """The first wrong field with its rule, or an empty text."""
    engine, _, program = facts.serves.partition("/")
    named = _NAME.fullmatch(engine) and (not program or _NAME.fullmatch(program))
    rules = (
        ("serves", bool(named) and (engine == "generic") == bool(program), "an engine, or generic/NAME"),
        ("version", bool(_FREE_TEXT.fullmatch(facts.version)), "1 to 64 letters, digits and .,+_/-"),
        ("platform", bool(_FREE_TEXT.fullmatch(facts.platform)), "1 to 64 letters, digits and .,+_/-"),
        ("program", bool(_PROGRAM.fullmatch(facts.program)), "a path inside the build"),
        ("python", bool(_VERSION.fullmatch(facts.python)), "a version, such as 3.11.7"),
        ("cpu_arch", facts.cpu_arch in ARCHITECTURES, " or ".join(ARCHITECTURES)),
        ("least_glibc", bool(_VERSION.fullmatch(facts.least_glibc)), "a version, such as 2.35"),
        (
            "least_driver",
            facts.least_driver == "" or bool(_VERSION.fullmatch(facts.least_driver)),
            "a version or empty",
        ),
        ("cpu_flags", all(_FLAG.fullmatch(flag) for flag in facts.cpu_flags), "names as in /proc/cpuinfo"),
        ("unpacked_bytes", 0 < facts.unpacked_bytes <= MOST_BUILD_BYTES, f"1 to {MOST_BUILD_BYTES}"),
        ("packed_bytes", 0 < facts.packed_bytes <= MOST_BUILD_BYTES, f"1 to {MOST_BUILD_BYTES}"),
        ("parts", 0 < facts.parts <= MOST_PARTS, f"1 to {MOST_PARTS}"),
    )
    wrong = next(((field, rule) for field, is_right, rule in rules if not is_right), None)
    return f"{wrong[0]} is {getattr(facts, wrong[0])!r}; it must be {wrong[1]}" if wrong else ""


def part_names(facts: BuildFacts) -> tuple[str, ...]:
    """The parts of its archive, in order."""
    return tuple(f"{PART_PREFIX}{number:04d}" for number in range(facts.parts))


def why_unsuitable(facts: BuildFacts, host: HostFacts) -> str:
    """Why a host cannot run a build, with both values; an empty text if it can."""
    if facts.cpu_arch != host.cpu_arch:
        return f"it is for {facts.cpu_arch} processors, and this host has {host.cpu_arch}"
    if missing := [flag for flag in facts.cpu_flags if flag not in host.cpu_flags]:
        return f"it needs a processor with {' and '.join(missing)}, which this host lacks"
    if version_key(host.glibc) < version_key(facts.least_glibc):
        return f"it needs glibc {facts.least_glibc} or newer, and this host has {host.glibc or 'none'}"
    if facts.least_driver and not host.driver:
        return f"it needs the NVIDIA driver {facts.least_driver} or newer, and none is loaded on this host"
    if facts.least_driver and version_key(host.driver) < version_key(facts.least_driver):
        return f"it needs the NVIDIA driver {facts.least_driver} or newer, and this host has {host.driver}"
    return ""


def version_key(version: str) -> tuple[int, ...]:
    """A version as numbers for comparisons; empty if it is not one."""
    return tuple(map(int, version.split("."))) if _VERSION.fullmatch(version) else ()
