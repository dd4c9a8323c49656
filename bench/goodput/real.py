"""The search with real requests, and the generator beside `vllm bench serve`.

`python -m bench.goodput.real sim`: a real `sim` cell behind its cell proxy against the knee that its parameters give.
`python -m bench.goodput.real compare --url http://127.0.0.1:8000 --model NAME --tokenizer FOLDER --rate 1`: the same
rate and lengths from this generator and from `vllm bench serve`, in turn; it needs the vLLM environment.
"""

import argparse
import asyncio
import json
import os
import subprocess
import tempfile
from pathlib import Path
from statistics import mean
from time import monotonic
from urllib.parse import urlsplit

from bench.goodput.virtual_cell import mean_field_knee
from bench.traffic.sim_cells import sim_cells
from engine_agent.engines.sim.batching import ModelParameters
from engine_agent.engines.vllm.environment import installed_python
from models_registry.planning.goodput import Found, GoodputRules, PointVerdict, plan_goodput, warm_up_s
from models_registry.planning.point_figures import Machines, point_figures
from models_registry.planning.workload import Slo, Workload, parse_slo, parse_workload
from models_registry.services.load_client import LoadTarget
from models_registry.services.point_load import MeasuredPoint, Progress, measure_point
from models_registry.services.workload_requests import body_of, requests

ROOT = Path(__file__).resolve().parents[2]


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
    """Each round both, the same requests a second; means of the rounds."""
    workload, slo = parse_workload(options.workload), parse_slo("ttft=600000,itl=600000")
    parts = urlsplit(options.url)
    target = LoadTarget(parts.hostname or "127.0.0.1", parts.port or 80, options.model)
    rules = GoodputRules(min_s=1, min_requests=options.requests, p99_times=0, warm_up_min_s=0, most_s=3600)
    ours, theirs = [], []
    for _ in range(options.rounds):
        point = asyncio.run(_whole(target, workload, slo, options, rules))
        ours.append(point)
        theirs.append(_vllm_bench(options, workload))
    for name in ("ttft", "tpot"):
        a, b = mean(one[name] for one in ours), mean(one[name] for one in theirs)
        print(f"median {name}: {a:.2f} ms here, {b:.2f} ms by vllm bench serve, ratio {a / b:.3f}")


async def _whole(
    target: LoadTarget, workload: Workload, slo: Slo, options: argparse.Namespace, rules: GoodputRules
) -> dict[str, float]:
    offered = (
        (request.due_s, body_of(request, target.model, workload, f"{monotonic()} {number}"), request.output_tokens)
        for number, request in enumerate(requests(workload, options.rate, 0))
    )
    point = await measure_point(target, offered, options.rate, slo, rules, warm_s=0, tell=_told)
    figures = point_figures(point.samples, point.span_s, slo, Machines(1, 1, 0, 0))
    return {"ttft": float(figures["ttft_p50_ms"] or 0), "tpot": float(figures["itl_p50_ms"] or 0)}


def _vllm_bench(options: argparse.Namespace, workload: Workload) -> dict[str, float]:
    python = installed_python(ROOT / ".cache")
    if python is None:
        raise SystemExit("the vLLM environment is missing: make engine")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(str(python.with_name("vllm")), "bench", "serve", "--backend", "openai", "--base-url", options.url),
            *("--model", options.model, "--tokenizer", options.tokenizer, "--dataset-name", "random"),
            *("--random-input-len", str(workload.prompt), "--random-output-len", str(workload.output), "--ignore-eos"),
            *("--num-prompts", str(options.requests), "--request-rate", str(options.rate), "--temperature", "0"),
            *("--save-result", "--result-dir", folder, "--result-filename", "result.json"),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        result = json.loads((Path(folder) / "result.json").read_text())
    return {"ttft": result["median_ttft_ms"], "tpot": result["median_tpot_ms"]}


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
    against.add_argument("--url", required=True)
    against.add_argument("--model", required=True)
    against.add_argument("--tokenizer", required=True)
    against.add_argument("--workload", default="256+64")
    against.add_argument("--rate", type=float, default=0.5)
    against.add_argument("--requests", type=int, default=60)
    against.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
