"""Whether NxDI's model code, configured by us, gives the same text as transformers.

On CPU, without a device.

    python -m bench neuron_on_cpu [--nxdi-2.28 DIR --nxd-2.28 DIR] [--nxdi-2.29 DIR --nxd-2.29 DIR] [--write]

Each DIR is a checkout, or an unpacked archive, of sources that you fetch; none is part of this project:
neuronx-distributed-inference at the commit of 0.8.0 and of 0.9.0, neuronx-distributed at v2.28.0 and at 2.29. Runs in
the Python of vLLM's environment, which has torch and transformers.

A tiny Llama of random weights is written. Each case is a version, rendered for a machine as for any cell; NxDI is given
the rendered configuration, in float32 on CPU, and answers six requests over four slots, as vLLM's plugin would ask it
(`neuron_cell`). A cell of several ranks is as many processes. Every greedy text must be what transformers says,
token for token; cases that NxDI cannot run on CPU are run as well, and what it says is written down. Exit status 1 if a
text differs, or a case ends that should not. Some 20 s a case; `--only` takes those whose name begins so. Prints
Markdown; `--write` writes the page."""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from bench import CACHE, PAGES, ROOT
from bench.models.neuron_cell import CONTEXT, MODEL, SLOTS
from bench.models.neuron_classes import PLATFORMS
from engine_agent.engines.vllm.environment import installed_python
from engine_agent.protocol.neuron_targets import NXDI_2_28, NXDI_2_29, NeuronTarget
from lab.versions import INF2, TRN1, spec
from models_registry.instance_types.planner import INSTANCE_TYPES, InstanceShape
from models_registry.versions.planning.engine_arguments import render_version
from models_registry.versions.planning.spec import HeadCounts, VersionSpec

TRN2 = INSTANCE_TYPES["trn2.48xlarge"]
MACHINES: dict[str, tuple[InstanceShape, ...]] = {NXDI_2_28.name: (INF2, TRN1), NXDI_2_29.name: (TRN2,)}
LIMIT_S = 240
HEADS = HeadCounts(MODEL["num_attention_heads"], MODEL["num_key_value_heads"], MODEL["num_hidden_layers"])


@dataclass(frozen=True, slots=True)
class Case:
    """A version of these degrees with these fields. `machines`: accelerators it is rendered for. `ends`: NxDI has no
    CPU mode of it, and this is what it says."""

    name: str
    degrees: dict[str, int]
    fields: dict[str, Any] = field(default_factory=dict)
    machines: tuple[str, ...] = tuple(PLATFORMS)
    ends: str = ""


HOSTS_SAMPLE = {"engine_options": {"neuron_config": {"on_device_sampling_config": None}}}
"""On CPU NxDI's sampler looks at its own rank's part of the vocabulary alone, so that ranks leave it to the hosts."""
CASES = (
    Case("one rank", {"tp": 1}),
    Case("hosts sample", {"tp": 1}, HOSTS_SAMPLE, ("inferentia2", "trainium2")),
    Case("two ranks, KV heads shared out", {"tp": 2}, HOSTS_SAMPLE),
    Case("two nodes of one rank", {"nodes": 2, "tp": 2}, HOSTS_SAMPLE, ("trainium", "trainium2")),
    Case("four ranks, two copies of each KV head", {"tp": 4}, HOSTS_SAMPLE, ("inferentia2", "trainium2")),
    Case(
        "buckets below the context",
        {"tp": 1},
        {"engine_options": {"neuron_config": {"context_encoding_buckets": [16, CONTEXT]}}},
        ("trainium", "trainium2"),
        ends="must match the size of tensor b (16)",
    ),
)


def version_of(case: Case, machine: InstanceShape, target: NeuronTarget) -> VersionSpec:
    options = {"neuron_target": target.name, **case.fields.get("engine_options", {})}
    fields = {**case.fields, "engine_options": options}
    made = spec("neuron", machine, case.degrees, context_length=CONTEXT, max_concurrency=SLOTS, heads=HEADS)
    return replace(made, **fields)


def settings_of(version: VersionSpec, machine: InstanceShape) -> dict[str, Any]:
    args = render_version(version, machine).plan.args
    found: dict[str, Any] = json.loads(args[args.index("--additional-config") + 1])["override_neuron_config"]
    return found


def cases_on(machine: InstanceShape) -> Iterator[Case]:
    return (case for case in CASES if machine.accelerator in case.machines)


@dataclass(frozen=True, slots=True)
class Bench:
    python: Path
    folder: Path
    sources: tuple[Path, Path]

    def run_cell(self, settings: dict[str, Any], platform: str) -> dict[str, Any]:
        ranks, port = settings["tp_degree"], _free_port()
        own = [self.folder, "--nxdi", self.sources[0], "--nxd", self.sources[1], "--platform", platform]
        cell = []
        for rank in range(ranks):
            part = {"start_rank_id": rank} if "local_ranks_size" in settings else {}
            argv = [self.python, "-m", "bench.models.neuron_cell", *own, "--settings", json.dumps({**settings, **part})]
            group = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = {**os.environ, "NXD_CPU_MODE": "1", **{name: str(value) for name, value in group.items()}}
            cell.append(
                subprocess.Popen(
                    [str(word) for word in argv],
                    cwd=ROOT,
                    env=environment,
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )
        try:
            out, errors = cell[0].communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return {"ends": f"no output within {LIMIT_S} s"}
        finally:
            for process in cell:
                process.kill()
                process.wait()
        rows = [line[4:] for line in out.splitlines() if line.startswith("ROW ")]
        if not rows:
            raise SystemExit(errors[-3000:])
        row: dict[str, Any] = json.loads(rows[0])
        return row


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def checked(case: Case, output: dict[str, Any], expected: list[list[int]]) -> tuple[str, bool]:
    if "ends" in output:
        return output["ends"], bool(case.ends) and case.ends in output["ends"]
    tokens = list(zip(chain(*output["texts"]), chain(*expected), strict=True))
    same = sum(ours == theirs for ours, theirs in tokens)
    return f"{same} of {len(tokens)} tokens as transformers", same == len(tokens) and not case.ends


def main(parser: argparse.ArgumentParser) -> int:
    for name in ("nxdi-2.28", "nxd-2.28", "nxdi-2.29", "nxd-2.29"):
        parser.add_argument(f"--{name}", type=Path, metavar="DIR")
    parser.add_argument("--only", help="cases whose name begins so")
    parser.add_argument("--write", action="store_true", help="write docs/bench/neuron_on_cpu.md")
    options = parser.parse_args()
    python = installed_python(CACHE)
    if python is None:
        raise SystemExit(f"there is no environment of vLLM in {CACHE}; make engine installs it")
    given, wrong = vars(options), 0
    lines = ["# NxDI's own code, on CPU, with what we render", "", "`python -m bench neuron_on_cpu`", ""]
    lines += ["| target | machine | case | ranks | what came of it |", "| --- | --- | --- | --- | --- |"]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        subprocess.run(
            [python, "-m", "bench.models.neuron_cell", folder, "--make"], cwd=ROOT, check=True, capture_output=True
        )
        expected = json.loads((folder / "expected.json").read_text())
        for target in (NXDI_2_28, NXDI_2_29):
            release = target.name.removeprefix("nxdi-")
            sources = given[f"nxdi_{release}"], given[f"nxd_{release}"]
            if None in sources:
                lines.append(f"| {target.name} | | its sources were not given | | |")
                continue
            bench = Bench(python, folder, (sources[0].absolute(), sources[1].absolute()))
            for machine in MACHINES[target.name]:
                for case in cases_on(machine):
                    if not case.name.startswith(options.only or ""):
                        continue
                    settings = settings_of(version_of(case, machine, target), machine)
                    text, is_right = checked(case, bench.run_cell(settings, PLATFORMS[machine.accelerator]), expected)
                    wrong += not is_right
                    lines.append(f"| {target.name} | {machine.name} | {case.name} | {settings['tp_degree']} | {text} |")
                    print(lines[-1], file=sys.stderr, flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if options.write:
        (PAGES / "neuron_on_cpu.md").write_text(text)
    return int(wrong > 0)
