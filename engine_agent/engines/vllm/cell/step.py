"""One step of the model, the same on every rank: what a leader sends for it, how a member takes and measures it.

It imports no vLLM: workers keep one contract in all its versions, and a platform's own may keep less of it (Neuron's).
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from engine_agent.engines.vllm.cell import vllm_versions
from engine_agent.engines.vllm.own_steps import OwnSteps, TimedCollectives, runtime_folder


@dataclass(frozen=True)
class Step:
    """What was scheduled, and the grammar's mask where outputs are structured."""

    scheduler_output: Any
    grammar_output: Any


class SortedSet(set[str]):
    """A set that is walked in the same order in every process. The order of a plain one depends on how its process
    hashes texts, which differs between two that were started apart."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__()))


def in_one_order(scheduler_output: Any) -> None:
    """Make ranks walk what was scheduled alike: let each set of ids in it be a `SortedSet`.

    Neuron's workers give places in the KV cache back in the order in which they walk `finished_req_ids`. Ranks that do
    so in two orders put the same request into two places, and what they compute together is silently wrong.
    """
    for name, value in vars(scheduler_output).items():
        if type(value) is set:
            setattr(scheduler_output, name, SortedSet(value))


def measure_steps(vllm_config: Any) -> OwnSteps | None:
    """The meter of this rank's steps; from now on its collectives count as waiting. Call it once the worker is built.

    Returns None where collectives cannot be told apart: they are compiled into the model's graph, or a device's.
    """
    communicator = vllm_versions.cpu_communicator() if vllm_config.model_config.enforce_eager else None
    if communicator is None:
        return None
    steps = OwnSteps(runtime_folder())
    communicator.dist_module = TimedCollectives(communicator.dist_module, steps)
    return steps


def take_step(worker: Any, step: Step, meter: OwnSteps | None = None) -> Any:
    """Run the model and sample, measured if there is a meter. Some steps end without sampling: nothing was scheduled,
    or it pools.

    What `execute_model` returns does not tell: a Neuron worker that is not the driver's returns None from every step,
    and raises in `sample_tokens` where there is nothing to sample.
    """
    with meter.step(step.scheduler_output) if meter is not None else nullcontext():
        output = worker.execute_model(step.scheduler_output)
        if output is None and step.scheduler_output.total_num_scheduled_tokens > 0:
            return worker.sample_tokens(step.grammar_output)
        return output
