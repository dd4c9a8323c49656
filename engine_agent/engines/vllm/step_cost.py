"""What one step of vLLM costs here by the tokens that it verifies:
`python -m engine_agent.engines.vllm.step_cost --model DIR --heads DIR --instance-type NAME --output FILE`.

Run by the engine's Python on a machine of the kind, by hand: it is no part of serving. Steps with and without guesses
take turns in one engine, so that whatever else the machine does meets all of them alike. Seconds are the processor's;
guessing is part of the steps that verify. The file is what `switchyard speculation calibrate` takes.
"""

import argparse
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from engine_agent.engines.vllm.in_process import InProcessEngine, medusa_config

ROUNDS = 3
TOKENS = 24
CONTEXT = 256


def measure(
    engine: InProcessEngine, batches: Sequence[int], most_guessed: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """A row for each batch size and number of verified tokens; the median of all its steps."""
    for batch in batches:
        prompts = [[100 + (7 * place + 13 * row) % 20000 for place in range(CONTEXT)] for row in range(batch)]
        engine.guess(0)
        engine.run(prompts, 2, ignore_eos=True)  # now they are in the cache
        seconds: dict[int, list[float]] = {guessed: [] for guessed in range(most_guessed + 1)}
        for _ in range(rounds):
            for guessed, taken in seconds.items():
                engine.guess(guessed)
                taken.extend(engine.run(prompts, TOKENS, ignore_eos=True).step_s)
        for guessed, taken in seconds.items():
            row = {"batch": batch, "verified": guessed + 1, "seconds": round(median(taken), 6), "steps": len(taken)}
            yield row


def main(argv: Sequence[str]) -> int:
    """Exit status: 0, or 1 with the reason."""
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
    parser.add_argument("--tokens", type=int, default=4, help="most that are guessed for each (4)")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
