"""One step of the model, the same on every rank: how it is sent, run and measured. Imports no vLLM.

A slow rank holds up a whole cell, and each rank's step then takes as long as the slowest. Only the time outside
collectives tells ranks apart. It is known for CPU workers, which call collectives in the thread that computes. Where
devices wait for each other (CUDA, Neuron), or collectives are compiled into the model, nothing is measured. Each
worker writes its sums to a file in the engine's runtime folder at most once a second; a node is as slow as its slowest.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

from engine_agent.engines.step_meter import StepMeter
from engine_agent.engines.vllm import vllm_versions
from engine_agent.protocol.messages import StepTimes

STEPS_FILE = "steps.json"
"""The `StepTimes` of a node's first worker, in the runtime folder; further workers have a number in theirs."""
STEPS_PATH = "/switchyard/steps"
"""Where a leader's API serves that file."""
FOLLOWER_STEPS_PATH = "/steps"
"""Where a follower serves it, on its administration port."""
WRITE_EVERY_S = 1.0


def decode_sequences(scheduled: Any) -> int:
    """Returns how many sequences a step decodes; 0 if it reads a prompt, or nothing. Guessed tokens are verified in the
    same step, and count to their sequence."""
    if not scheduled.total_num_scheduled_tokens or scheduled.scheduled_new_reqs:
        return 0
    guessed = scheduled.scheduled_spec_decode_tokens
    tokens = scheduled.num_scheduled_tokens
    is_decode = all(count <= 1 + len(guessed.get(request, ())) for request, count in tokens.items())
    return len(tokens) if is_decode else 0


class OwnSteps:
    """The steps of this process's rank, which has this place on its node. Only the computing thread may call it."""

    def __init__(self, folder: Path, clock: Callable[[], float] = perf_counter, place: int = 0) -> None:
        self._file = (folder / STEPS_FILE).with_stem(f"steps-{place}") if place else folder / STEPS_FILE
        self._clock = clock
        self._meter = StepMeter()
        self._waited_s = 0.0
        self._written_s = float("-inf")

    def now_s(self) -> float:
        return self._clock()

    def waiting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the collective, timed as waiting."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = self._clock()
            try:
                return call(*args, **kwargs)
            finally:
                self._waited_s += self._clock() - began_s

        return timed

    @contextmanager
    def step(self, scheduled: Any) -> Iterator[None]:
        """Measures a step of the model, from its inputs to its tokens. A failed step is not counted."""
        sequences, began_s, waited_s = decode_sequences(scheduled), self._clock(), self._waited_s
        yield
        if sequences:
            spent_s = self._clock() - began_s - (self._waited_s - waited_s)
            self.note(sequences, spent_s)

    def note(self, sequences: int, spent_s: float) -> None:
        """Adds a decode step of so many sequences."""
        self._meter.note(sequences, max(0.0, spent_s) * 1000)
        if (now_s := self._clock()) - self._written_s >= WRITE_EVERY_S:
            self._written_s = now_s
            self._write()

    def _write(self) -> None:
        """Writes the file atomically. A full disk costs the figures, never a token."""
        unfinished = self._file.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            unfinished.write_bytes(msgspec.json.encode(self._meter.times()))
            unfinished.replace(self._file)


class TimedCollectives:
    """The functions that a CPU communicator calls, each timed as waiting."""

    def __init__(self, collectives: Any, steps: OwnSteps) -> None:
        self._collectives, self._steps = collectives, steps

    def __getattr__(self, name: str) -> Any:
        timed = self._steps.waiting(getattr(self._collectives, name))
        setattr(self, name, timed)  # looked up once
        return timed


def runtime_folder() -> Path:
    """Returns the engine's folder, which its launcher made the folder for temporary files."""
    return Path(tempfile.gettempdir())


def written_steps(folder: Path) -> bytes | None:
    """Returns a node's `StepTimes` as JSON: the steps of its first worker, each with the time of the slowest. Returns
    None if none were measured yet."""
    try:
        written = (folder / STEPS_FILE).read_bytes()
        others = [path.read_bytes() for path in folder.glob("steps-*.json")]
    except OSError:
        return None
    if not others:
        return written
    first, *rest = (msgspec.json.decode(each, type=StepTimes) for each in (written, *others))
    for bucket, steps in first.steps.items():  # workers do not write at the same time, so only averages compare
        slowest_ms = max(
            each.compute_ms[bucket] / each.steps[bucket] for each in (first, *rest) if bucket in each.steps
        )
        first.compute_ms[bucket] = round(slowest_ms * steps, 3)
    return msgspec.json.encode(first)


@dataclass(frozen=True)
class Step:
    """The scheduled requests, and the grammar's mask if outputs are structured."""

    scheduler_output: Any
    grammar_output: Any


class SortedSet(set[str]):
    """A set with the same order of iteration in every process. That of a plain set depends on the process's hash
    seed."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__()))


def in_one_order(scheduler_output: Any) -> None:
    """Makes each set of ids in what was scheduled a `SortedSet`. Neuron's workers free places in the KV cache in the
    order of `finished_req_ids`. With different orders, ranks would put the same request into different places, and
    their results would be silently wrong."""
    for name, value in vars(scheduler_output).items():
        if type(value) is set:
            setattr(scheduler_output, name, SortedSet(value))


def measure_steps(vllm_config: Any, place: int = 0) -> OwnSteps | None:
    """Returns the meter of the steps of this rank, which has this place on its node, and counts its collectives as
    waiting from now on. Call it once the worker is built. Returns None if collectives cannot be timed: they are
    compiled into the model's graph, or run on a device. A pipeline stage waits for others inside its computation."""
    is_timed = vllm_config.model_config.enforce_eager and vllm_config.parallel_config.pipeline_parallel_size == 1
    communicator = vllm_versions.cpu_communicator() if is_timed else None
    if communicator is None:
        return None
    steps = OwnSteps(runtime_folder(), place=place)
    communicator.dist_module = TimedCollectives(communicator.dist_module, steps)
    return steps


def take_step(worker: Any, step: Step, meter: OwnSteps | None = None) -> Any:
    """Runs the model and samples, measured if there is a meter. Some steps end without sampling: nothing was scheduled,
    or the model pools. The result of `execute_model` does not tell: a Neuron worker that is not the driver's returns
    None from every step, and raises in `sample_tokens` if there is nothing to sample."""
    with meter.step(step.scheduler_output) if meter is not None else nullcontext():
        output = worker.execute_model(step.scheduler_output)
        if output is None and step.scheduler_output.total_num_scheduled_tokens > 0:
            return worker.sample_tokens(step.grammar_output)
        return output
