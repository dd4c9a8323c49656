"""`python -m engine_agent.cell_proxy`: reads the command line and runs one cell proxy until SIGTERM or SIGINT."""

import argparse
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import uvloop

from engine_agent.cell_proxy.log import LineLog
from engine_agent.cell_proxy.server import CannotListen, ProxyServer
from engine_agent.cell_proxy.settings import EngineMembers, Limits, ProbeTimes, ProxySettings
from engine_agent.protocol.messages import GoldenPrompt
from engine_agent.protocol.request_bodies import Modality
from engine_agent.protocol.states import CellRole
from engine_agent.protocol.tracing import TraceSettings, TracingOff, trace_settings

EXIT_CANNOT_LISTEN = 3


def parse_arguments(arguments: list[str]) -> ProxySettings:
    parser = argparse.ArgumentParser(prog="python -m engine_agent.cell_proxy", description="The proxy of one cell.")
    parser.add_argument("--node-id", required=True, help="node this proxy runs on; also marks the process")
    parser.add_argument("--cell", required=True)
    parser.add_argument("--generation", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1", help="address of the public port")
    parser.add_argument("--port", type=_port, required=True)
    parser.add_argument("--admin-port", type=_port, required=True, help="always on loopback")
    parser.add_argument("--engine", type=_engine, required=True, metavar="http://HOST:PORT")
    parser.add_argument("--health-path", default="/health", help="what the engine answers with 200 while it is well")
    parser.add_argument("--metrics-path", default="/metrics", help="the engine's page of counters")
    parser.add_argument("--model", required=True, help="served model name, for the token probe")
    parser.add_argument("--adapter", action="append", default=[], dest="adapters", help="name that it serves besides")
    parser.add_argument("--max-concurrency", type=_positive, required=True)
    parser.add_argument("--priorities", action="store_true", help="the engine schedules by priority")
    parser.add_argument("--orders-classes", action="store_true", help="the engine limits batch prompts in its steps")
    parser.add_argument("--replays", action="store_true", help="the engine continues streams of other cells")
    parser.add_argument(
        "--engine-members", dest="members", type=_members, default=EngineMembers(), help="JSON: see EngineMembers"
    )
    parser.add_argument(
        "--modality", action="append", default=[], dest="modalities", type=Modality, help="content besides text"
    )
    parser.add_argument("--sleeps", action="store_true", help="the engine unloads its model while idle: let it")
    parser.add_argument(
        "--max-prompt-tokens", type=_positive, metavar="N", help="the engine ends at a longer prompt: refuse it"
    )
    parser.add_argument("--cell-role", type=CellRole, choices=list(CellRole), default=CellRole.MIXED)
    parser.add_argument("--kv-layout", default="", help="fingerprint of what cells of this role hand over")
    parser.add_argument("--prefill-timeout-s", type=float, default=15.0, help="of one prompt in a prefill cell")
    parser.add_argument("--golden", type=_golden, default=(), help='JSON: [{"prompt": "…", "expect": "…"}, …]')
    parser.add_argument("--max-body-bytes", type=_positive, default=Limits().max_body_bytes)
    parser.add_argument("--identity", type=Path, metavar="FOLDER", help="with tls/: serve ingresses only, over TLS")
    parser.add_argument("--grace-s", type=float, default=5.0, help="for requests in flight after SIGTERM")
    parser.add_argument("--no-access-log", dest="access_log", action="store_false")
    options = vars(parser.parse_args(arguments))
    engine_host, engine_port = options.pop("engine")
    options["adapters"] = frozenset(options["adapters"])
    modalities = frozenset(options.pop("modalities"))
    options["members"] = msgspec.structs.replace(options["members"], modalities=modalities)
    limits = Limits(max_body_bytes=options.pop("max_body_bytes"))
    probes = ProbeTimes(token_interval_s=math.inf) if options.pop("sleeps") else ProbeTimes()
    traces = _traces(parser, os.environ)
    return ProxySettings(
        engine_host=engine_host, engine_port=engine_port, limits=limits, probes=probes, traces=traces, **options
    )


def _traces(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> TraceSettings | None:
    """Where spans are sent. A wrong setting disables spans; the cell still serves."""
    try:
        return trace_settings(environment)
    except TracingOff as error:
        sys.stderr.write(f"{parser.prog}: no spans are exported: {error}\n")
        return None


def _port(text: str) -> int:
    if text.isdecimal() and 0 < int(text) < 65536:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no port; give a number from 1 to 65535")


def _positive(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")


def _golden(text: str) -> tuple[GoldenPrompt, ...]:
    try:
        return msgspec.json.decode(text, type=tuple[GoldenPrompt, ...])
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(
            f'no list of golden prompts ({error}); give [{{"prompt": "…", "expect": "…"}}]'
        ) from None


def _members(text: str) -> EngineMembers:
    try:
        return msgspec.json.decode(text, type=EngineMembers)
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"no members of requests ({error})") from None


def _engine(text: str) -> tuple[str, int]:
    wrong = argparse.ArgumentTypeError(f"{text!r} is no engine address; give http://HOST:PORT")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme != "http" or not parts.hostname or not port or parts.path not in {"", "/"}:
        raise wrong
    return parts.hostname, port


async def _serve(settings: ProxySettings) -> None:
    await ProxyServer(settings, LineLog(sys.stdout.fileno(), requests=settings.access_log)).run()


def main() -> int:
    settings = parse_arguments(sys.argv[1:])
    try:
        uvloop.run(_serve(settings))
    except CannotListen as error:
        sys.stderr.write(f"proxy of cell {settings.cell}: {error}\n")
        return EXIT_CANNOT_LISTEN
    return 0


if __name__ == "__main__":
    sys.exit(main())
