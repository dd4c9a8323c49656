"""Are the tokens of a two-node cell those of one process? Greedy, fp32, prompts of mixed length, 16 at a time.

    bench/executor_identity.py [--prompts 200] [--tokens 16] [--write]

Prints Markdown; `--write` puts it beside this file. bf16 is left out: ranks add up in another order, and texts differ
between any two tensor-parallel degrees, vLLM's own included.
"""

import argparse
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent))

from executor_cell import Engine, engine

TEXT = (
    "The capital of France is Paris. Trains run on rails between the cities of the north and of the south, and a "
    "switchyard is where they are sorted. 1, 2, 3, 5, 8, 13 and 21 are numbers; what comes next? def add(a, b): return "
)


def prompts(count: int) -> list[str]:
    """Of 5 to 400 characters, from 200 places of a text."""
    text = TEXT * 8
    return [text[index * 7 % len(TEXT) :][: 5 + index * 37 % 400] for index in range(count)]


def tokens(of: Engine, texts: list[str], max_tokens: int) -> list[list[int]]:
    """The ids that it answers each prompt with."""
    answers = []
    for first in range(0, len(texts), 16):
        batch = of.complete_all(texts[first : first + 16], max_tokens, ignore_eos=True, return_token_ids=True)
        answers += [answer["token_ids"] for answer in batch]
    return answers


def main() -> None:
    """Ask both, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    texts = prompts(options.prompts)
    with engine(0, 1, "--dtype", "float32") as one:
        alone = tokens(one, texts, options.tokens)
    with engine(1, 2, "--dtype", "float32", "--tensor-parallel-size", "2") as cell:
        together = tokens(cell, texts, options.tokens)
    same = sum(left == right for left, right in zip(alone, together, strict=True))
    result = (
        f"# Tokens of a two-node cell against one process\n\n{time.strftime('%Y-%m-%d')}, SmolLM2-135M, fp32, greedy, "
        f"{options.prompts} prompts of 5 to {max(map(len, texts))} characters, 16 at a time, {options.tokens} tokens "
        f"each: **{same} of {options.prompts} answers are the same, token by token**.\n"
    )
    print(result)
    if options.write:
        (HERE.parents[1] / "docs" / "bench" / f"{HERE.stem}.md").write_text(result)


if __name__ == "__main__":
    main()
