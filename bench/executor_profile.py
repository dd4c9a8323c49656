"""Where the time of a decode step goes in the leader's engine core, in a cell and under vLLM's own executor.

    bench/executor_profile.py [--seconds 15] [--batch 4] [--write]

Needs py-spy (`pip install py-spy`) and the right to trace processes. Prints Markdown: shares of the samples of the
core's busy loop while it decodes; `--write` puts it beside this file.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent))

from executor_cell import Engine, engine

TP = ("--tensor-parallel-size", "2")
LOOP = "run_busy_loop"
PARTS = (
    ("waiting for the next request", ("_process_input_queue",)),
    ("the other rank: collectives of the layers", ("all_reduce", "all_gather", "GroupCoordinator.gather")),
    ("the model and sampling on this rank", ("take_step (engine_agent/engines/vllm/cell/step.py",)),
    ("calling the followers", ("LeaderLink.call",)),
    ("writing the call down, following what the followers say", ("LeaderFollowerExecutor",)),
    ("waiting for the workers, all of them other processes", ("MultiprocExecutor", "shm_broadcast")),
    ("scheduling and bookkeeping", ("EngineCore",)),
)
"""What a sample counts as: the first of these that its stack has a frame of."""


def core_of(replica: Engine) -> int:
    """Process of the leader's engine core."""
    root = psutil.Process(replica.ranks[0].pid)
    return next(child.pid for child in root.children(recursive=True) if "EngineCore" in " ".join(child.cmdline()))


def shares(replica: Engine, seconds: int, batch: int) -> Counter[str]:
    """Samples of the busy loop by what it did."""
    with tempfile.NamedTemporaryFile(suffix=".raw") as raw, ThreadPoolExecutor(batch) as clients:
        pending = [clients.submit(replica.complete, "Once", 1900, ignore_eos=True) for _ in range(batch)]
        time.sleep(2)
        command = ["py-spy", "record", "--duration", str(seconds), "--rate", "200", "--format", "raw"]
        subprocess.run(
            [*command, "--output", raw.name, "--pid", str(core_of(replica))], check=True, stdout=subprocess.DEVNULL
        )
        lines = Path(raw.name).read_text().splitlines()
        replica.end()  # rather than waiting for the rest of the answers
        for answer in pending:
            answer.exception()
    found: Counter[str] = Counter()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        if LOOP in stack:
            found[_part(stack)] += int(count)
    return found


def _part(stack: str) -> str:
    return next((name for name, marks in PARTS if any(mark in stack for mark in marks)), "other")


def main() -> None:
    """Profile and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    kinds = {
        "cell, shared memory": (2, {"SWITCHYARD_CELL_COLLECTIVES": "shared-memory"}),
        "vLLM's mp": (1, {}),
    }
    found = {}
    for place, (name, (nodes, env)) in enumerate(kinds.items()):
        args = TP if nodes == 2 else (*TP, "--distributed-executor-backend", "mp")
        with ExitStack() as stack:
            found[name] = shares(
                stack.enter_context(engine(10 + place, nodes, *args, **env)), options.seconds, options.batch
            )
    lines = [
        "# Where a decode step's time goes in the leader's core\n",
        f"{time.strftime('%Y-%m-%d')}, SmolLM2-135M, bf16, tensor-parallel 2, batch {options.batch}, py-spy at 200 Hz "
        f"for {options.seconds} s; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.\n",
        f"| part | {' | '.join(found)} |",
        "| --- |" + " ---: |" * len(found),
    ]
    for part in (*(name for name, _ in PARTS), "other"):
        row = [f"{counts[part] / max(1, counts.total()):.1%}" for counts in found.values()]
        lines.append(f"| {part} | {' | '.join(row)} |")
    result = "\n".join(lines) + "\n"
    print(result)
    if options.write:
        (HERE.parents[1] / "docs" / "bench" / f"{HERE.stem}.md").write_text(result)


if __name__ == "__main__":
    main()
