"""Runs third-party clients against a fleet's ingress and reports what works.

    make up DETACH=1

    make conformance                         # all but the large ones; CLIENTS=openai-python,litellm names some
    .venv/bin/python -m bench conformance --large --write docs/conformance.md

Exit status 1: a feature failed that `results.LIMITS` does not name."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import httpx

from bench import ROOT
from bench.conformance.clients import CACHE, CLIENTS, Client, command_of, folder_of, is_installed
from bench.conformance.results import Result, page, results_of
from bench.fleet.live_fleet import Fleet, wait_for
from engine_agent.engines.uv_install import CannotInstall
from engine_agent.grpc_gateway.messages.health_pb2 import HealthCheckRequest, HealthCheckResponse
from engine_agent.protocol.ports import grpc_port

MODELS = {"sim": "sim-70b", "vllm": "smollm2"}
"""The demo fleet's models by engine."""
SCRIPT_WITHIN_S = 1200
"""The slowest client takes about five minutes, on vLLM and a busy machine."""
KEY_WITHIN_S = 30
TENANT = "conformance"
QUIET = {
    "AGNO_TELEMETRY": "false",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MASTRA_TELEMETRY_DISABLED": "1",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OTEL_SDK_DISABLED": "true",
    "PYTHONWARNINGS": "ignore",
}
"""Keeps clients from reporting to their vendors, and from fetching their price lists."""


@contextmanager
def key_of(fleet: Fleet, base_urls: Sequence[str]) -> Iterator[str]:
    """A key for the duration of the run, known to every ingress when the block starts."""
    made = fleet.post("keys", name="conformance", tenant=TENANT)
    ends_at = time.monotonic() + KEY_WITHIN_S
    try:
        for url in base_urls:
            while httpx.get(f"{url}/models", headers={"Authorization": f"Bearer {made['key']}"}).is_error:
                if time.monotonic() > ends_at:
                    raise SystemExit(f"{url} does not accept the new key after {KEY_WITHIN_S} s")
                time.sleep(0.1)
        yield made["key"]
    finally:
        fleet.post(f"keys/{made['prefix']}/revoke", why="the run is over")


def grpc_address(base_url: str) -> str:
    parts = urlsplit(base_url)
    return f"{parts.hostname}:{grpc_port(parts.port or 80)}"


@contextmanager
def serving_grpc(fleet: Fleet, base_urls: Sequence[str]) -> Iterator[None]:
    """Within the block, the regions of these ingresses serve gRPC."""
    used = {url.removesuffix("/v1") for url in base_urls}
    before = {row["name"]: row["grpc"] for row in fleet.rows("regions") if row["ingress_url"] in used}
    try:
        for name in before:
            fleet.ask("PATCH", f"regions/{name}", {"grpc": True})
        for url in base_urls:
            wait_for(partial(serves_grpc, grpc_address(url)), KEY_WITHIN_S, f"gRPC at {grpc_address(url)}")
        yield
    finally:
        for name, was in before.items():
            fleet.ask("PATCH", f"regions/{name}", {"grpc": was})


def serves_grpc(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
        )
        try:
            return bool(check(HealthCheckRequest(), timeout=5).status == HealthCheckResponse.SERVING)
        except grpc.RpcError:
            return False


def tokenizer() -> str:
    found = sorted((ROOT / ".cache" / "artifacts").glob("smollm2-*"))
    return str(found[0]) if found else ""


def try_client(client: Client, engine: str, base_url: str, key: str) -> list[Result]:
    """Run the script of one client in its own home folder. A script that cannot run fails `chat`."""
    environment = {
        **os.environ,
        **QUIET,
        "CONFORMANCE_BASE_URL": base_url,
        "CONFORMANCE_GRPC": grpc_address(base_url),
        "CONFORMANCE_MODEL": MODELS[engine],
        "CONFORMANCE_KEY": key,
        "CONFORMANCE_TOKENIZER": tokenizer(),
    }
    try:
        command = command_of(client)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
            done = subprocess.run(
                command, env={**environment, "HOME": home}, cwd=home, stdin=subprocess.DEVNULL, capture_output=True,
                text=True, timeout=SCRIPT_WITHIN_S, check=False,
            )  # fmt: skip
    except (CannotInstall, subprocess.TimeoutExpired) as error:
        return [Result(client.name, engine, "chat", str(error))]
    found = results_of(client.name, engine, done.stdout)
    if not found or done.returncode != 0:
        found.append(
            Result(client.name, engine, "chat", f"its script exited with {done.returncode}: {done.stderr[-300:]}")
        )
    return found


def run(clients: Sequence[Client], engines: Sequence[str], write: Path | None) -> int:
    fleet, results, started = Fleet(), list[Result](), time.monotonic()
    installed = len({folder_of(client) for client in clients if not is_installed(client)})
    base_urls = {engine: f"{fleet.ingresses(MODELS[engine])[0]}/v1" for engine in engines}
    grpc_urls = list(base_urls.values()) if any(client.is_grpc for client in clients) else []
    with key_of(fleet, list(base_urls.values())) as key, serving_grpc(fleet, grpc_urls):
        for engine, base_url in base_urls.items():
            for client in clients:
                began = time.monotonic()
                found = try_client(client, engine, base_url, key)
                results += found
                failed = [result for result in found if result.has_failed]
                took_s = time.monotonic() - began
                print(
                    f"{engine}: {client.name}: {len(found)} features, {len(failed)} failed, {took_s:.0f} s", flush=True
                )
                for result in failed:
                    print(f"  {result.feature}: {result.reason}", flush=True)
    if write is not None:
        write.write_text(page(results, clients, heading(clients, installed, time.monotonic() - started)))
    return 1 if any(result.has_failed for result in results) else 0


def heading(clients: Sequence[Client], installed: int, took_s: float) -> str:
    """When, how and at what cost the page was made. `installed`: environments that the run had to make."""
    command = "make conformance LARGE=1" if any(client.large for client in clients) else "make conformance"
    statuses = {status.st_ino: status for status in (path.lstat() for path in CACHE.rglob("*"))}
    size_gib = sum(status.st_blocks * 512 for status in statuses.values()) / 2**30
    return (
        f"{len(clients)} clients, run on {time.strftime('%Y-%m-%d', time.gmtime())} by `{command}` against the demo "
        f"fleet, through an ingress. The run took {took_s / 60:.0f} minutes and installed {installed} environments; "
        f"`.cache/conformance` takes {size_gib:.1f} GiB."
    )


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", default="", help="comma-separated names (default: all but the large ones)")
    parser.add_argument("--engines", default=",".join(MODELS))
    parser.add_argument("--large", action="store_true", help="also the large ones")
    parser.add_argument("--write", type=Path, help="write the page to this file")
    given = parser.parse_args()
    named = set(filter(None, given.clients.split(",")))
    if unknown := named - {client.name for client in CLIENTS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(each.name for each in CLIENTS)}")
    clients = [each for each in CLIENTS if (each.name in named if named else given.large or not each.large)]
    sys.exit(run(clients, given.engines.split(","), given.write))
