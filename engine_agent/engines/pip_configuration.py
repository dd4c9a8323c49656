"""Lets uv install from where pip is configured to: reads pip's settings and says them in uv's variables.

uv ignores pip's configuration, but a machine behind a mirror or with wheels of its own has configured pip so. This
module only reads; it changes no setting and installs nothing.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

ASK_PIP_TIMEOUT_S = 30.0
"""`pip config list` takes 0.3 s; more than this is a hung file system."""

_UV_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
    "trusted-host": "UV_INSECURE_HOST",
    "proxy": "ALL_PROXY",
}
_SEPARATORS = {"UV_INDEX": " ", "UV_FIND_LINKS": ",", "UV_INSECURE_HOST": " "}
_SECTIONS = ("global", "install", ":env:")
"""Those that `pip install` reads, the weakest first."""


def pip_settings(listing: str) -> dict[str, str]:
    """The settings that `pip install` would use, from the output of `pip config list`.

    A line is `section.option='value'`, the value written as Python would; other lines are ignored.
    """
    sections: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in listing.splitlines():
        name, equals, value = line.partition("=")
        section, dot, option = name.rpartition(".")
        if equals and dot and section in sections:
            sections[section][option] = str(ast.literal_eval(value))
    return {option: value for section in _SECTIONS for option, value in sections[section].items()}


def uv_environment(settings: Mapping[str, str], exists: Callable[[Path], bool]) -> tuple[dict[str, str], list[str]]:
    """uv's variables for pip's `settings`, and a warning for each place that is not there, which is left out as by pip.

    Args:
        settings: pip's options by name, such as `index-url`.
        exists: tells whether a local path exists.
    """
    variables: dict[str, str] = {}
    warnings: list[str] = []
    for option, variable in _UV_VARIABLES.items():
        if option not in settings:
            continue
        values = settings[option].split()
        if option in ("index-url", "extra-index-url", "find-links"):
            missing = [value for value in values if not _place_exists(value, exists)]
            warnings += [f"pip's {option} {value} does not exist and is ignored" for value in missing]
            values = [value for value in values if value not in missing]
        if values:
            variables[variable] = _SEPARATORS.get(variable, "").join(values)
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        # uv has no variable for it. Without the network it asks no index either, and still reads local find-links.
        variables["UV_OFFLINE"] = "1"
    if "UV_INDEX" in variables:
        # pip takes the best version from all indexes together; uv would stop at the first index that has the package.
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return variables, warnings


def _place_exists(place: str, exists: Callable[[Path], bool]) -> bool:
    parts = urlsplit(place)
    if parts.scheme == "file":
        return exists(Path(unquote(parts.path)))
    return bool(parts.scheme) or exists(Path(place).expanduser())


def read_pip_settings() -> dict[str, str]:
    """pip's settings on this machine; those in `PIP_*` variables alone where there is no pip to run."""
    environment = "".join(
        f":env:.{name[4:].lower().replace('_', '-')}={value!r}\n"
        for name, value in os.environ.items()
        if name.startswith("PIP_")
    )
    # A virtual environment may be without pip; the Python that it was made from has the same configuration.
    for python in dict.fromkeys((sys.executable, sys._base_executable)):  # type: ignore[attr-defined]
        try:
            listing = subprocess.run(
                [python, "-m", "pip", "config", "list"],
                capture_output=True,
                text=True,
                timeout=ASK_PIP_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            continue
        return pip_settings(listing.stdout + environment)
    return pip_settings(environment)


def uv_environment_here() -> tuple[dict[str, str], list[str]]:
    """`uv_environment` for this machine, under the variables that the user has set for uv, which win."""
    variables, warnings = uv_environment(read_pip_settings(), Path.exists)
    return {**variables, **os.environ}, warnings
