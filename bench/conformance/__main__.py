"""Has clients of others use a fleet's ingress, on each engine, and says what works.

    make up DETACH=1
    make conformance                         # all but the large ones; CLIENTS=openai-python,litellm names some
    .venv/bin/python -m bench.conformance --large --write docs/conformance.md

Exit status 1: something failed that is no limit of an engine (`results.LIMITS`).
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from bench.conformance.clients import CLIENTS, Client
from bench.conformance.environments import ROOT, CannotInstall, command_of
from bench.conformance.results import Result, page, results_of
from bench.live_fleet import Fleet
from engine_agent.engines.uv_program import UvFailed

MODELS = {"sim": "sim-70b", "vllm": "smollm2"}
"""Of the demo's fleet, by the engine that it runs on."""
SCRIPT_WITHIN_S = 1200
"""The slowest, on vLLM beside other work, takes some five minutes."""
KEY_WITHIN_S = 30
TENANT = "conformance"


@contextmanager
def key_of(fleet: Fleet, base_urls: Sequence[str]) -> Iterator[str]:
    """A key for the time of the run, which all ingresses know."""
    made = fleet.post("keys", name="conformance", tenant=TENANT)
    ends_at = time.monotonic() + KEY_WITHIN_S
    try:
        for url in base_urls:
            while httpx.get(f"{url}/models", headers={"Authorization": f"Bearer {made['key']}"}).is_error:
                if time.monotonic() > ends_at:
                    raise SystemExit(f"{url} does not know the new key after {KEY_WITHIN_S} s")
                time.sleep(0.1)
        yield made["key"]
    finally:
        fleet.post(f"keys/{made['prefix']}/revoke", why="the run is over")


def tokenizer() -> str:
    """The folder of the demo's weights, which has one."""
    found = sorted((ROOT / ".cache" / "artifacts").glob("smollm2-*"))
    return str(found[0]) if found else ""


def try_client(client: Client, engine: str, base_url: str, key: str) -> list[Result]:
    """Run the script of one client. What keeps it from running is the result of all of it, under `load` or `chat`."""
    environment = {
        **os.environ,
        "CONFORMANCE_BASE_URL": base_url,
        "CONFORMANCE_MODEL": MODELS[engine],
        "CONFORMANCE_KEY": key,
        "CONFORMANCE_TOKENIZER": tokenizer(),
    }
    try:
        done = subprocess.run(
            command_of(client), env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=SCRIPT_WITHIN_S, check=False,
        )  # fmt: skip
    except (CannotInstall, UvFailed, subprocess.TimeoutExpired) as error:
        return [Result(client.name, engine, "chat", str(error))]
    found = results_of(client.name, engine, done.stdout)
    if not found or done.returncode != 0:
        found.append(
            Result(client.name, engine, "chat", f"its script ended with {done.returncode}: {done.stderr[-300:]}")
        )
    return found


def run(clients: Sequence[Client], engines: Sequence[str], write: Path | None) -> int:
    fleet, results = Fleet(), list[Result]()
    base_urls = {engine: f"{fleet.ingresses(MODELS[engine])[0]}/v1" for engine in engines}
    with key_of(fleet, list(base_urls.values())) as key:
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
        today = time.strftime("%Y-%m-%d", time.gmtime())
        command = "make conformance LARGE=1" if any(client.large for client in clients) else "make conformance"
        heading = f"Tried on {today} with the demo's fleet, through an ingress, by `{command}`."
        write.write_text(page(results, {client.name: client.packages for client in clients}, heading))
    return 1 if any(result.has_failed for result in results) else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="", help="names with commas between; all but the large ones")
    parser.add_argument("--engines", default=",".join(MODELS))
    parser.add_argument("--large", action="store_true", help="the large ones, too")
    parser.add_argument("--write", type=Path, help="where the page goes")
    given = parser.parse_args()
    named = set(filter(None, given.clients.split(",")))
    if unknown := named - {client.name for client in CLIENTS}:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(each.name for each in CLIENTS)}")
    clients = [each for each in CLIENTS if (each.name in named if named else given.large or not each.large)]
    sys.exit(run(clients, given.engines.split(","), given.write))


if __name__ == "__main__":
    main()
