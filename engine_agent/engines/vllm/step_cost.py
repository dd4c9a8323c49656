"""Measures the time of a vLLM step by the number of tokens that it verifies: `python -m
engine_agent.engines.vllm.step_cost --model DIR --heads DIR --instance-type NAME --output FILE`.

Run by hand with the engine's Python on a machine of the kind. Steps with and without speculation alternate in one
engine, so that other load on the machine affects both alike. Seconds are processor seconds; drafting is part of the
steps that verify. `switchyard speculation calibrate` reads the file. The engine runs inside this process and reaches
into the scheduler of vLLM 0.32."""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from engine_agent.engines.vllm.speculation_patches import EXTENSION

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""As the launcher sets them, with the core in this process."""


@dataclass(frozen=True)
class Ran:
    """The outcome of prompts that were sent together: tokens by prompt, processor seconds, steps; `drafts` with their
    guessed and accepted tokens; `step_s`: processor seconds of each step in which every prompt decoded."""

    tokens: tuple[tuple[int, ...], ...]
    cpu_s: float
    steps: int
    drafts: int
    guessed: int
    accepted: int
    step_s: tuple[float, ...]


class InProcessEngine:
    """`speculation`: the value of `--speculative-config`; None disables speculation."""

    def __init__(
        self, model: Path, speculation: Mapping[str, Any] | None, *, most_batch: int, context: int = 1024
    ) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from vllm import LLM

        self._llm = LLM(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            max_num_seqs=most_batch,
            max_model_len=context,
            kv_cache_memory_bytes=512 * 1024 * 1024,
            distributed_executor_backend="uni",
            disable_log_stats=False,
            speculative_config=dict(speculation) if speculation else None,
            worker_extension_cls=EXTENSION if speculation else "",
        )
        self._engine = self._llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._most_batch = most_batch
        self._numbers = 0

    @property
    def tokenizer(self) -> Any:
        return self._llm.get_tokenizer()

    def guess(self, tokens: int) -> None:
        """Guesses so many tokens in every later step."""
        self._scheduler.dynamic_sd_lookup = [tokens] * (self._most_batch + 1)

    def guess_by_batch(self, ranges: Sequence[Sequence[int]]) -> None:
        """Guesses as a version's `tokens_per_batch_size` states in every later step."""
        lookup = [0] * (self._most_batch + 1)
        for first, _, tokens in ranges:
            lookup[first:] = [tokens] * len(lookup[first:])
        self._scheduler.dynamic_sd_lookup = lookup

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        most_tokens: int,
        *,
        ignore_eos: bool = False,
        ends: Sequence[int] = (),
    ) -> Ran:
        """Returns greedy answers to token ids that are sent together; `ends`: tokens that end an answer besides the
        model's own."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=most_tokens, ignore_eos=ignore_eos, stop_token_ids=list(ends)
        )
        before, names = self._counters(), []
        for prompt in prompts:
            self._numbers += 1
            names.append(f"r{self._numbers}")
            self._engine.add_request(names[-1], {"prompt_token_ids": list(prompt)}, sampling)
        answers: dict[str, tuple[int, ...]] = {}
        began, steps, step_s = time.process_time(), 0, []
        while self._engine.has_unfinished_requests():
            step_began = time.process_time()
            found = self._engine.step()
            took = time.process_time() - step_began
            steps += 1
            if steps > 2 and len(found) == len(prompts) and not answers:
                step_s.append(took)
            answers |= {each.request_id: tuple(each.outputs[0].token_ids) for each in found if each.finished}
        cpu_s = time.process_time() - began
        drafts, guessed, accepted = (now - then for now, then in zip(self._counters(), before, strict=True))
        return Ran(tuple(answers[name] for name in names), cpu_s, steps, drafts, guessed, accepted, tuple(step_s))

    def _counters(self) -> tuple[int, int, int]:
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        found = {each.name: int(each.value) for each in self._llm.get_metrics() if hasattr(each, "value")}
        return tuple(found.get(f"vllm:spec_decode_{name}", 0) for name in names)  # type: ignore[return-value]


def medusa_config(heads: Path, tokens: int = 0) -> dict[str, Any]:
    """Returns `--speculative-config` of a checkpoint, as versions render it; `tokens` 0: as many as there are heads.
    Raises ValueError if there are fewer heads."""
    most = json.loads((heads / "config.json").read_text())["num_heads"]
    tokens = tokens or most
    if not 1 <= tokens <= most:
        raise ValueError(f"{heads} has {most} heads, so it guesses 1 to {most} tokens, not {tokens}")
    # A schedule, so that the number of guesses is looked up in every step.
    ranges = [[1, 1, tokens]]
    return {
        "method": "medusa",
        "model": str(heads),
        "num_speculative_tokens": tokens,
        "num_speculative_tokens_per_batch_size": ranges,
    }


ROUNDS = 3
TOKENS = 24
CONTEXT = 256


def measure(
    engine: InProcessEngine, batches: Sequence[int], most_guessed: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """Yields a row for each batch size and number of verified tokens: the median of all its steps."""
    for batch in batches:
        prompts = [[100 + (7 * place + 13 * row) % 20000 for place in range(CONTEXT)] for row in range(batch)]
        engine.guess(0)
        engine.run(prompts, 2, ignore_eos=True)  # fills the cache
        seconds: dict[int, list[float]] = {guessed: [] for guessed in range(most_guessed + 1)}
        for _ in range(rounds):
            for guessed, taken in seconds.items():
                engine.guess(guessed)
                taken.extend(engine.run(prompts, TOKENS, ignore_eos=True).step_s)
        for guessed, taken in seconds.items():
            row = {"batch": batch, "verified": guessed + 1, "seconds": round(median(taken), 6), "steps": len(taken)}
            yield row


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 1 with the reason on standard error."""
    options = _parser().parse_args(argv)
    batches = [int(each) for each in options.batches.split(",")]
    try:
        config = medusa_config(options.heads, options.tokens)
    except (OSError, ValueError, KeyError) as error:
        print(f"cannot measure: {error}", file=sys.stderr)
        return 1
    import vllm

    engine = InProcessEngine(options.model, config, most_batch=max(batches))
    found: dict[str, Any] = {
        "instance_type": options.instance_type,
        "source": "measured",
        "hardware": platform.processor() or platform.machine(),
        "software": f"vLLM {vllm.__version__}, float32, eager, processor seconds",
        "steps": [],
    }
    for row in measure(engine, batches, options.tokens, options.rounds):
        print(json.dumps(row), flush=True)
        found["steps"].append(row)
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="engine_agent.engines.vllm.step_cost", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--heads", type=Path, required=True, help="folder of Medusa heads for the model")
    parser.add_argument("--instance-type", default="local.cpu", help="of this machine (local.cpu)")
    parser.add_argument("--batches", default="1,2,4,8,16", help="sequences in a step (1,2,4,8,16)")
    parser.add_argument("--tokens", type=int, default=4, help="maximum guesses for each (4)")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
