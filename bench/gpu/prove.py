"""One run on a machine with an NVIDIA GPU and without a network: serve, measure, kill, share.

    python -m bench prove pack --to DIR         # here: parts of at most 60 MiB for Python 3.12 with torch 2.11
    cat part-* | tar -x -C DIR; sh DIR/start.sh --out DIR    # there: at most 8 minutes

The node agent fetches an engine build from a small control plane on the same machine, starts the engine, and its cell
proxy serves the model. Measured: golden prompts, tokens/s, time to the first token, telemetry and energy, a killed
engine, a second cell on the same device by memory share, and on request a power cap. The result is `prove.json` and
`prove.md`, written after every phase. `--device cpu` tries the same on a machine without a GPU."""

import argparse
import asyncio
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from bench.gpu import machine
from bench.gpu.load import Load, complete, put_load, spread
from bench.gpu.machine import CardSamples, Choice
from bench.gpu.phases import Found, Proof, Skip
from bench.gpu.plane import Node, Plane, TooLate, free_ports
from engine_agent.engines.artifacts import read_manifest
from engine_agent.engines.builds.store import host_facts
from engine_agent.node.telemetry.fingerprint import AGENT_ROOT
from engine_agent.protocol.engine_builds import BuildFacts, EngineBuild, parse_facts
from engine_agent.protocol.machine_messages import NodeResources
from engine_agent.protocol.messages import Artifact, EnginePlan, GoldenPrompt
from engine_agent.protocol.states import EngineState
from engine_agent.protocol.telemetry_messages import EnergyMeter

MODEL = "smollm2-135m-instruct"
GOLDEN = (
    GoldenPrompt("The capital of France is", "Paris"),
    GoldenPrompt("Monday, Tuesday, Wednesday,", "Thursday"),
    GoldenPrompt("one, two, three, four,", "five"),
)
CONTEXT = 2048
TOKENS = {"cuda": 128, "cpu": 16}
"""Of each answer under load."""
FIRST_TOKENS = {"cuda": 20, "cpu": 3}
POWER_S = 24.0
"""Of work whose power is measured: four readings of the agent's meter."""
SHARE = 0.3
"""Of the device's memory, for each of two cells."""
CONVERT = """
import sys
from functools import partial
from pathlib import Path
from engine_agent.engines.vllm import weights
from engine_agent.engines.vllm.gguf_llama import convert
folder, manifest = weights.build(Path(sys.argv[2]), Path(sys.argv[1]), partial(convert, ranks=1), lambda _: None)
print(folder.as_uri(), manifest.digest)
"""
CONVERT_LIMIT_S = 120.0
T = TypeVar("T")
TORCH_PROGRAM = '#!/bin/sh\nexec {python} {server} --device {device} "$@"\n'


def main(parser: argparse.ArgumentParser) -> int:
    verbs = parser.add_subparsers(required=True, dest="verb")
    pack = verbs.add_parser("pack", help="pack the parts, on a machine with a package index")
    pack.add_argument("--to", type=Path, required=True, help="new folder for the parts")
    pack.add_argument("--part-mib", type=int, default=60, help="most MiB of one part (60)")
    run = verbs.add_parser("run", help="the proof; `start.sh` of the parts calls it")
    run.add_argument("--from", type=Path, required=True, dest="carried", help="folder of the unpacked parts")
    run.add_argument("--out", type=Path, required=True, help="folder for the result")
    run.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    run.add_argument("--engine", default="", help="only ways to serve whose name contains this")
    run.add_argument("--budget-s", type=float, default=480.0)
    run.add_argument("--load-s", type=float, default=12.0, help="seconds of each load")
    run.add_argument("--python", help="the machine's Python with torch (python3 of the path)")
    run.add_argument("--patience", type=float, default=1.0, help="multiplies the limits of phases, on a busy machine")
    run.add_argument("--without", action="append", default=[], metavar="PHASE", help="a phase to leave out")
    run.add_argument("--power-cap", action="store_true", help="cap the device's power for a while: a setting of it")
    options = parser.parse_args()
    if options.verb == "pack":
        from bench.gpu.carry import pack_parts

        for path in pack_parts(options.to.absolute(), print, options.part_mib * 1024**2):
            print(f"{path}  {path.stat().st_size / 2**20:.1f} MiB")
        return 0
    return asyncio.run(Run(options).all())


@dataclass(frozen=True, slots=True)
class Served:
    """The way that serves, and its plan."""

    choice: Choice
    plan: EnginePlan


class Run:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.carried: Path = options.carried.resolve()
        self.work = Path(tempfile.mkdtemp(prefix="prove-"))
        self.work.chmod(0o755)  # engines have their own account
        self.machine = machine.look(host_facts(), options.python)
        builds = [(file.parent, _facts(file)) for file in sorted(self.carried.glob("builds/*/build.json"))]
        self.ways = [way for way in machine.choices(self.machine, builds, options.device) if options.engine in way.name]
        self.plane = Plane({_digest(folder): folder for folder, _ in builds})
        self.about: Found = {
            "date": time.strftime("%Y-%m-%d"),
            "command": shlex.join(["python", "-m", "bench", "prove", *sys.argv[1:]]),
            "device": options.device,
            "budget_s": options.budget_s,
            "machine": self.machine.as_json(),
            "model": MODEL,
            "engine": "",
            "choices": [
                {"name": way.name, "outcome": f"no: {way.why_not}" if way.why_not else ""} for way in self.ways
            ],
        }
        self.proof = Proof(
            options.budget_s, Path(options.out).resolve(), self.about, frozenset(options.without), options.patience
        )
        self.nodes = [Node(self.plane, self.work, port, self._environment(), self._owns()) for port in free_ports(2)]
        self._served: Served | None = None

    def _environment(self) -> dict[str, str]:
        path = f"{Path(self.machine.python).parent}:{os.environ.get('PATH', '')}"
        own = {"SWITCHYARD_CACHE": str(self.work / "cache"), "PATH": path}
        if self.machine.closed:
            own["SWITCHYARD_SERVICE_UIDS"] = "0"
        return own

    def _owns(self) -> NodeResources | None:
        if self.options.device != "cuda" or not self.machine.cards:
            return None
        return NodeResources("nvidia", (0,), (self.machine.cards[0]["uuid"],))

    async def all(self) -> int:
        seconds = self.options.load_s
        async with self.plane.running():
            try:
                await self._serve_somehow()
                run = self.proof.run
                await run("golden", self.golden, limit_s=60, after="serve")
                await run("idle", self.idle, limit_s=30, after="serve")
                await run("speed", self.speed, limit_s=8 * seconds + 60, least_s=seconds, after="serve")
                await run("kill", self.kill, limit_s=150, least_s=20, after="serve")
                await run("second cell", self.second_cell, limit_s=150, least_s=20, after="serve")
                await run("power cap", self.power_cap, limit_s=3 * seconds + 20, after="serve")
                await run("stop", self.stop, limit_s=60, after="serve")
            finally:
                self._keep_logs()
                for node in self.nodes:
                    await node.stop()
                shutil.rmtree(self.work, ignore_errors=True)
        print((self.proof.out / "prove.md").read_text())
        return 0 if self.proof.has_done("golden") else 1

    # --- serving ------------------------------------------------------------------------------------------------------

    async def _serve_somehow(self) -> None:
        self.nodes[0].start()
        for way, row in zip(self.ways, self.about["choices"], strict=True):
            if way.why_not:
                continue
            if self._served is not None:
                row["outcome"] = "not needed"
                continue
            served = await self.proof.run("serve", partial(self.serve, way), limit_s=210, least_s=20)
            row["outcome"] = "yes" if served else f"failed: {self.proof.outcomes[-1].why.splitlines()[0]}"
            if served:
                self.about["engine"] = way.name

    @property
    def served(self) -> Served:
        if self._served is None:
            raise Skip("nothing serves")
        return self._served

    async def serve(self, way: Choice, limit_s: float) -> Found:
        began_s = time.monotonic()
        artifact = await asyncio.to_thread(self._artifact, way.weights)
        converted_s = time.monotonic() - began_s
        plan = self._plan(way, artifact)
        node = self.nodes[0]
        await node.serve(plan)
        await node.started(limit_s)
        fetched_s = time.monotonic() - began_s - converted_s
        await node.ready(limit_s - (time.monotonic() - began_s))
        ready_s = time.monotonic() - began_s
        self._served = Served(way, plan)
        return {
            "weights_s": round(converted_s, 1),
            "until_engine_started_s": round(fetched_s, 1),
            "build_mib": round(self.plane.bytes_sent / 2**20, 1),
            "engine_ready_s": round(ready_s - converted_s - fetched_s, 1),
            "accounts": f"none: {self.machine.closed} is closed" if self.machine.closed else "own",
            "accelerators": self.plane.hellos[node.id].inventory.accelerators,  # type: ignore[union-attr]
        }

    def _artifact(self, form: str) -> Artifact:
        """The carried GGUF file, or safetensors of it, which the machine's own packages write once."""
        gguf = self.work / "gguf"
        if not gguf.exists():
            shutil.copytree(self.carried / "weights" / "gguf", gguf)
        if form == "gguf":
            return Artifact(gguf.as_uri(), read_manifest(gguf).digest)
        (file,) = gguf.glob("*.gguf")
        places = [str(AGENT_ROOT), str(self.carried / "tools"), self.machine.packages]
        path = os.pathsep.join([*places, *(each for each in sys.path if each.endswith(("site", "site-packages")))])
        done = subprocess.run(
            [self.machine.python, "-c", CONVERT, str(file), str(self.work / "cache")],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=CONVERT_LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise TooLate(f"the weights cannot be converted: {done.stderr.strip()[-600:]}")
        uri, digest = done.stdout.split()[-2:]
        return Artifact(uri, digest)

    def _plan(self, way: Choice, artifact: Artifact) -> EnginePlan:
        clients = self._clients(way)[-1]
        args: tuple[str, ...] = ("--context-length", str(CONTEXT))
        build = None
        if way.engine == "vllm":
            args = ("--max-model-len", str(CONTEXT), "--max-num-seqs", str(clients), *way.args)
            args += ("--gpu-memory-utilization", str(SHARE))
        elif way.engine == "llama-cpp":
            args += ("--parallel", str(clients), *(("--gpu-layers", "99") if self.options.device == "cuda" else ()))
        else:
            self._write_torch_program()
            args += ("--command", "torch")
        if way.build is not None and way.facts is not None:
            build = EngineBuild(way.build.name, digest=_manifest_digest(way.build), facts=way.facts)
        return EnginePlan(
            engine=way.engine,
            served_model=MODEL,
            max_concurrency=clients,
            ready_timeout_s=210.0 * self.options.patience,
            artifact=artifact,
            args=args,
            env={"VLLM_USE_FLASHINFER_SAMPLER": "0"} if way.engine == "vllm" else {},  # the build leaves FlashInfer out
            golden=GOLDEN[:1],
            widened=("--command",) if way.engine == "generic" else (),
            build=build,
        )

    def _clients(self, way: Choice) -> tuple[int, ...]:
        if way.engine == "generic":
            return (1,)
        return (1, 8, 64) if self.options.device == "cuda" else (1, 2)

    def _write_torch_program(self) -> None:
        program = self.work / "cache" / "engines" / "generic" / "torch" / "serve"
        program.parent.mkdir(parents=True, exist_ok=True)
        server = program.parent / "torch_server.py"
        shutil.copyfile(Path(__file__).with_name("torch_server.py"), server)
        program.write_text(
            TORCH_PROGRAM.format(
                python=shlex.quote(self.machine.python), server=shlex.quote(str(server)), device=self.options.device
            )
        )
        program.chmod(0o755)

    # --- measuring ----------------------------------------------------------------------------------------------------

    async def golden(self, _: float) -> Found:
        found: Found = {}
        for golden in GOLDEN:
            answer = await asyncio.to_thread(complete, self.nodes[0].proxy_port, MODEL, golden.prompt, 12)
            found[golden.prompt] = answer.text
            if golden.expect not in answer.text:
                raise TooLate(f"{golden.prompt!r} was answered with {answer.text!r}, without {golden.expect!r}")
        return found

    async def idle(self, limit_s: float) -> Found:
        """Power of the device while the engine has no requests."""
        if not self.machine.cards:
            raise Skip(self.machine.why_no_card)
        _, power = await self._measured(asyncio.sleep(min(POWER_S, limit_s)))
        return {**power, **self._telemetry()}

    async def speed(self, _: float) -> Found:
        port, seconds = self.nodes[0].proxy_port, self.options.load_s
        await self._load(port, 1, 1.0)
        firsts = [
            await asyncio.to_thread(complete, port, MODEL, f"{n} little", 1)
            for n in range(FIRST_TOKENS[self.options.device])
        ]
        *fewer, most = self._clients(self.served.choice)
        loads = [await self._load(port, clients, seconds) for clients in fewer]
        last, power = await self._measured(self._load(port, most, max(seconds, POWER_S if self.machine.cards else 0)))
        loads.append(last)
        if last.failures:
            raise TooLate(f"requests failed: {last.failures}")
        report = self.nodes[0].report
        return {
            "first_token_ms": spread([answer.first_s * 1000 for answer in firsts]),
            "loads": [load.as_json() for load in loads],
            **power,
            "joules_per_token": round(power["watts"] / last.tokens_per_s, 4) if power.get("watts") else None,
            **self._telemetry(),
            "proxy_first_token_p50_ms": report.load.ttft_p50_ms if report and report.load else None,
        }

    async def _load(self, port: int, clients: int, seconds: float) -> Load:
        return await asyncio.to_thread(put_load, port, MODEL, clients, seconds, TOKENS[self.options.device])

    async def _measured(self, work: Awaitable[T]) -> tuple[T, Found]:
        """Returns the result of `work`, and the power meanwhile: by the agent's meter, which reads every 5 s, and by
        samples of the driver with clocks and use."""
        running = asyncio.ensure_future(work)
        meters: list[EnergyMeter] = []
        with CardSamples(self.machine.cards) as samples:
            while not running.done():
                meter = self._meter()
                if meter is not None and (not meters or meter.covered_ms > meters[-1].covered_ms):
                    meters.append(meter)
                await asyncio.sleep(0.2)
        result = await running
        power = samples.found()
        if len(meters) > 2:  # the first two may have been read before the work began
            began, ended = meters[1], meters[-1]
            power["watts"] = round(
                (ended.microjoules - began.microjoules) / (ended.covered_ms - began.covered_ms) / 1000, 1
            )
        return result, power

    def _meter(self) -> EnergyMeter | None:
        report = self.nodes[0].report
        meters = report.telemetry.energy if report else ()
        return next((meter for meter in meters if meter.covers == "accelerators"), None)

    def _telemetry(self) -> Found:
        report = self.nodes[0].report
        if report is None:
            return {}
        devices = [
            {
                "utilisation_percent": device.utilisation_percent,
                "memory_used_mib": (device.memory_used_bytes or 0) >> 20,
                "errors": {name: count for name, count in device.errors.items() if count},
            }
            for device in report.telemetry.accelerators
        ]
        return {
            "devices": devices,
            "trouble": report.telemetry.accelerator_trouble,
            "engine_rss_mib": (report.telemetry.engine_rss_bytes or 0) >> 20,
            "faults": [fault.signature for fault in self.plane.faults.get(self.nodes[0].id, [])],
        }

    # --- faults and sharing -------------------------------------------------------------------------------------------

    async def kill(self, limit_s: float) -> Found:
        """SIGKILL for the engine; the next generation starts it again."""
        node = self.nodes[0]
        began_s = time.monotonic()
        node.kill_engine()
        report = await node.state_is(EngineState.FAILED, limit_s)
        failed_s = time.monotonic() - began_s
        await node.serve(self.served.plan)
        await node.ready(limit_s - failed_s)
        ready_s = time.monotonic() - began_s - failed_s
        answer = await asyncio.to_thread(complete, node.proxy_port, MODEL, GOLDEN[0].prompt, 12)
        if GOLDEN[0].expect not in answer.text:
            raise TooLate(f"after the restart {GOLDEN[0].prompt!r} was answered with {answer.text!r}")
        faults = [fault.signature for fault in self.plane.faults.get(node.id, [])]
        return {
            "reported_failed_s": round(failed_s, 2),
            "reason": report.observed.reason,
            "ready_again_s": round(ready_s, 1),
            "faults": faults,
        }

    async def second_cell(self, limit_s: float) -> Found:
        """Another node on the same device, with its own agent, engine and proxy; then load on both."""
        first, second = self.nodes
        began_s = time.monotonic()
        second.start()
        await second.serve(self.served.plan)
        await second.ready(limit_s)
        ready_s = time.monotonic() - began_s
        clients = self._clients(self.served.choice)[-1]
        both = await asyncio.gather(
            *(self._load(node.proxy_port, clients, self.options.load_s) for node in (first, second))
        )
        if failures := [load.failures for load in both if load.failures]:
            raise TooLate(f"requests failed: {failures}")
        return {
            "share_of_memory": SHARE if self.served.choice.engine == "vllm" else None,
            "ready_s": round(ready_s, 1),
            "loads": [load.as_json() for load in both],
            "sum_tokens_per_s": round(sum(load.tokens_per_s for load in both), 1),
            **self._telemetry(),
        }

    async def power_cap(self, _: float) -> Found:
        """The device at its lowest power limit; the earlier limit is restored whatever happens."""
        if not self.machine.cards:
            raise Skip(self.machine.why_no_card)
        if not self.options.power_cap:
            raise Skip("not requested (--power-cap): it changes a setting of the device")
        card, port = self.machine.cards[0], self.nodes[0].proxy_port
        clients = self._clients(self.served.choice)[-1]
        before, free = await self._measured(self._load(port, clients, self.options.load_s))
        if why := _limit_power(card, card["power.min_limit"]):
            raise Skip(f"the power limit cannot be set: {why}")
        try:
            capped, low = await self._measured(self._load(port, clients, self.options.load_s))
        finally:
            why = _limit_power(card, card["power.limit"])
        if why:
            raise TooLate(f"the power limit of {card['power.limit']} W could not be restored: {why}")
        return {
            "watts_allowed": [float(card["power.limit"]), float(card["power.min_limit"])],
            "loads": [before.as_json(), capped.as_json()],
            "free": free,
            "capped": low,
        }

    async def stop(self, limit_s: float) -> Found:
        """Both agents stop; nothing of them may be left on the device."""
        began_s = time.monotonic()
        self._keep_logs()
        for node in reversed(self.nodes):
            await node.stop()
        stopped_s = time.monotonic() - began_s
        used = machine.output_of((machine.SMI, "--query-compute-apps=pid,used_memory", "--format=csv,noheader"))
        return {"seconds": round(stopped_s, 1), "left_on_device": used.splitlines() if self.machine.cards else []}

    def _keep_logs(self) -> None:
        for number, node in enumerate(self.nodes):
            for name in ("agent", "engine", "proxy"):
                if (node.home / f"{name}.log").exists():
                    (self.proof.out / f"{name}-{number}.log").write_text(node.log(name, lines=2000)[-2_000_000:])


def _limit_power(card: Mapping[str, str], watts: str) -> str:
    """Returns why the limit cannot be set; empty if it was."""
    argv = (machine.SMI, "-i", card["uuid"], "-pl", str(int(float(watts))))
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    return "" if done.returncode == 0 else " ".join((done.stdout + done.stderr).split())


def _facts(file: Path) -> BuildFacts:
    return parse_facts(file.read_bytes(), str(file))


def _manifest_digest(folder: Path) -> str:
    return read_manifest(folder).digest


def _digest(folder: Path) -> str:
    return _manifest_digest(folder).partition(":")[2]
