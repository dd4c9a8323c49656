"""What a person reads once the fleet is up: where to look, how to log in, what to try. Asks nobody but our API."""

import json
import shlex
import urllib.error
import urllib.request
from pathlib import Path

from controlplane.embedded.configuration import Configuration
from controlplane.embedded.console import Console
from controlplane.embedded.home import Home
from controlplane.embedded.preflight import HOST

OPERATOR = "operator"

_API_TIMEOUT_S = 5.0
_TRIAL = {
    "model": "smollm2",
    "stream": True,
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "Write one sentence about trains."}],
}


def read_ingresses(configuration: Configuration, home: Home) -> dict[str, str]:
    """Region -> URL of its ingress, as the API tells it; where that does not answer, as configured."""
    request = urllib.request.Request(
        f"http://{HOST}:{configuration.port}/api/v1/regions/",
        headers={"Authorization": f"Bearer {_token(home)}", "Accept": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=_API_TIMEOUT_S) as response:  # noqa: S310 - always http to this machine
            answer = json.load(response)
        regions = answer["results"] if isinstance(answer, dict) else answer
        return {str(region["name"]): str(region["ingress_url"]) for region in regions}
    except (OSError, urllib.error.URLError, ValueError, KeyError, TypeError):
        return {region: f"http://{HOST}:{port}" for region, port in configuration.ingress_ports.items()}


def _token(home: Home) -> str:
    try:
        return home.token.read_text().strip()
    except OSError:
        return ""


def final_block(
    *, port: int, token: Path, password: str, ingresses: dict[str, str], took_s: float | None, foreground: bool
) -> str:
    """The last thing that `make up` prints."""
    how_long = f" after {took_s:.0f} s" if took_s is not None else ""
    width = max(map(len, ingresses), default=0)
    first = next(iter(ingresses.values()), "")
    command = (
        f"curl -N {first}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(_TRIAL))}"
    )
    lines = [
        "",
        f"Switchyard is up: every cell is ready{how_long}.",
        "",
        f"  Dashboard  http://{HOST}:{port}/",
        f"  Login      user {OPERATOR}, password {password}",
        f"  API        http://{HOST}:{port}/api/v1/  (bearer token in {token})",
        *(f"  Ingress    {region:<{width}}  {url}/v1" for region, url in ingresses.items()),
        "",
        "Try:",
        f"  {command}",
        "",
        "Ctrl-C stops everything." if foreground else "`make down` stops everything; `make status` shows it.",
    ]
    return "\n".join(lines)


def print_final_block(
    configuration: Configuration, home: Home, console: Console, *, took_s: float | None, foreground: bool
) -> None:
    """Print it for this home. Asks the API for the ingresses, so it may block for a few seconds."""
    console.plain(
        final_block(
            port=configuration.port,
            token=home.token,
            password=home.secrets().operator_password,
            ingresses=read_ingresses(configuration, home),
            took_s=took_s,
            foreground=foreground,
        )
    )
