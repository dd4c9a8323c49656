"""What the environment asks of the launcher, checked once. Pure: reads a mapping, touches nothing."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from engine_agent.protocol.ports import DEMO_REGIONS, MOST_INGRESSES, PORTS_PER_NODE, demo_ingresses


class CannotStart(Exception):
    """The launcher cannot continue. The text is one sentence with the problem and its fix."""


CHECKOUT = Path(__file__).resolve().parents[2]

AGENT_PORT_ABOVE = 443
"""The port for agents is so much above that of the dashboard, unless it is given (controlplane.settings)."""
_HIGHEST_PORT = 65535
Choice = TypeVar("Choice", bound=StrEnum)


class Engine(StrEnum):
    """What the `smollm2` deployment of the demo fleet runs on."""

    VLLM = "vllm"
    LLAMA_CPP = "llama-cpp"
    TRITON = "triton"
    SIM = "sim"


class Provider(StrEnum):
    """Who runs the nodes of the demo fleet: this computer, hosts that join, or a cloud, whose regions are declared."""

    LOCAL = "local"
    MACHINES = "machines"
    AWS = "aws"


@dataclass(frozen=True, slots=True)
class Configuration:
    """One launcher's settings. `ingresses`: of each region. `wait_s`: until every cell is ready, in seconds at most.

    `agent_listen` is the address on which web listens for agents: loopback, unless other hosts are to join.
    `database_url` and `redis_url` are servers run elsewhere; None means that the launcher runs its own."""

    home: Path
    cache: Path
    port: int
    agent_port: int
    ingress_port: int
    ingresses: int
    node_ports: int
    agent_listen: str
    engine: Engine
    provider: Provider
    wait_s: float
    database_url: str | None
    redis_url: str | None

    @property
    def ingress_ports(self) -> dict[str, int]:
        """Name -> port of each ingress."""
        return demo_ingresses(self.ingress_port, self.ingresses)


def read_configuration(environ: Mapping[str, str], checkout: Path = CHECKOUT) -> Configuration:
    """The configuration that `environ` asks for; an empty variable counts as unset. Raises CannotStart if a variable
    has a value that cannot be used."""
    port = _port(environ, "SWITCHYARD_PORT", 8000, ports=1)
    ingresses = _count(environ, "SWITCHYARD_INGRESSES", 1, MOST_INGRESSES)
    return Configuration(
        home=_path(environ, "SWITCHYARD_HOME", checkout / ".switchyard"),
        cache=_path(environ, "SWITCHYARD_CACHE", checkout / ".cache"),
        port=port,
        agent_port=_port(environ, "SWITCHYARD_AGENT_PORT", min(port + AGENT_PORT_ABOVE, _HIGHEST_PORT), ports=1),
        ingress_port=_port(environ, "SWITCHYARD_INGRESS_PORT", 8080, ports=len(DEMO_REGIONS) * ingresses),
        ingresses=ingresses,
        node_ports=_port(environ, "SWITCHYARD_NODE_PORTS", 21000, ports=PORTS_PER_NODE),
        agent_listen=_address(environ, "SWITCHYARD_AGENT_LISTEN", "127.0.0.1"),
        engine=_one_of(environ, "ENGINE", Engine, Engine.VLLM),
        provider=_one_of(environ, "SWITCHYARD_DEMO_PROVIDER", Provider, Provider.LOCAL),
        wait_s=_seconds(environ, "WAIT_S", 600.0),
        database_url=environ.get("DATABASE_URL") or None,
        redis_url=environ.get("REDIS_URL") or None,
    )


def _path(environ: Mapping[str, str], name: str, default: Path) -> Path:
    return Path(environ.get(name) or default).expanduser().resolve()


def _port(environ: Mapping[str, str], name: str, default: int, *, ports: int) -> int:
    text = environ.get(name) or str(default)
    highest = _HIGHEST_PORT - ports + 1
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= highest:
        raise CannotStart(f"{name} is {text!r}: give a port from 1 to {highest}.")
    return int(text)


def _count(environ: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = environ.get(name) or str(default)
    if not text.isascii() or not text.isdigit() or len(text) > 3 or not 1 <= int(text) <= most:
        raise CannotStart(f"{name} is {text!r}: give a number from 1 to {most}.")
    return int(text)


def _one_of(environ: Mapping[str, str], name: str, choices: type[Choice], default: Choice) -> Choice:
    text = environ.get(name) or default
    try:
        return choices(text)
    except ValueError:
        raise CannotStart(f"{name} is {text!r}: give one of {', '.join(choices)}.") from None


def _address(environ: Mapping[str, str], name: str, default: str) -> str:
    text = environ.get(name) or default
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise CannotStart(f"{name} is {text!r}: give an address of this host, or 0.0.0.0 for all.") from None


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise CannotStart(f"{name} is {text!r}: give a number of seconds above 0.")
    return seconds
