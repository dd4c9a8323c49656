"""Says to `uv` what pip's configuration says to pip: indexes, local folders, certificates, proxies.

uv ignores pip's configuration, but that is where a company names its mirror. Pure and standard library only: the
bootstrap loads this file by its path before anything is installed. It reads no file and runs no command.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_LATER_WINS = ("global", "install", ":env:")
"""Sections of `pip config list` that apply to an installation, weakest first."""


@dataclass(frozen=True)
class UvOptions:
    """`arguments` for `uv pip install` (and `compile`), `environment` for its process."""

    arguments: tuple[str, ...]
    environment: dict[str, str]


def parse_listing(listing: str) -> dict[str, str]:
    """The settings that hold for `pip install`, from what `python -m pip config list` prints: `section.name='text'`."""
    found: dict[str, dict[str, str]] = {section: {} for section in _LATER_WINS}
    for line in listing.splitlines():
        key, equals, quoted = line.partition("=")
        section, dot, name = key.strip().rpartition(".")
        if equals and dot and section in found:
            found[section][name] = _unquoted(quoted.strip())
    return {name: text for section in _LATER_WINS for name, text in found[section].items()}


def _unquoted(quoted: str) -> str:
    try:
        text = ast.literal_eval(quoted)
    except (ValueError, SyntaxError):
        return quoted
    return str(text)


def uv_options(configuration: Mapping[str, str]) -> UvOptions:
    """Translate pip's settings (names as in its documentation, `index-url`, …) for uv; others mean nothing to uv."""
    return UvOptions(tuple(_arguments(configuration)), _environment(configuration))


def _arguments(configuration: Mapping[str, str]) -> Iterator[str]:
    for pip_name, uv_name in (
        ("index-url", "--default-index"),
        ("extra-index-url", "--index"),
        ("find-links", "--find-links"),
        ("trusted-host", "--allow-insecure-host"),
        ("constraint", "--constraint"),
    ):
        for word in configuration.get(pip_name, "").split():
            yield from (uv_name, word)
    if "extra-index-url" in configuration:
        # pip takes the best version of all indexes; uv would stop at the first index that knows the name.
        yield from ("--index-strategy", "unsafe-best-match")
    if _is_on(configuration.get("no-index", "")):
        yield "--no-index"
    if _is_on(configuration.get("pre", "")):
        yield from ("--prerelease", "allow")
    for name in ("no-binary", "only-binary"):
        for word in configuration.get(name, "").replace(",", " ").split():
            yield from (f"--{name}", word)


def _environment(configuration: Mapping[str, str]) -> dict[str, str]:
    environment = {
        "SSL_CERT_FILE": configuration.get("cert", ""),
        "SSL_CLIENT_CERT": configuration.get("client-cert", ""),
        "ALL_PROXY": configuration.get("proxy", ""),
        "UV_HTTP_TIMEOUT": configuration.get("timeout", configuration.get("default-timeout", "")),
        "UV_HTTP_RETRIES": configuration.get("retries", ""),
    }
    return {name: text for name, text in environment.items() if text}


def _is_on(text: str) -> bool:
    return text.strip().lower() in {"1", "true", "yes", "on", "y", "t"}
