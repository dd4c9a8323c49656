"""guidellm: ten requests, one after the other."""

import json
import tempfile
from pathlib import Path

from cases import BASE_URL, KEY, MODEL, TOKENIZER, beside_this_python, case, expect, main, run


@case("load")
def load() -> None:
    with tempfile.TemporaryDirectory() as folder:
        said = run(
            *(
                beside_this_python("guidellm"),
                "benchmark",
                "run",
                "--target",
                BASE_URL.removesuffix("/v1"),
                "--model",
                MODEL,
            ),
            *("--processor", TOKENIZER, "--data", "prompt_tokens=40,output_tokens=16", "--profile", "synchronous"),
            *("--max-requests", "10", "--output-dir", folder, "--outputs", "json"),
            *("--backend-kwargs", json.dumps({"api_key": KEY})),
            limit_s=600,
            HF_HUB_OFFLINE="1",
        )
        reports = list(Path(folder).glob("*.json"))
        expect(reports, said[-400:])
        totals = json.loads(reports[0].read_text())["benchmarks"][0]["metrics"]["request_totals"]
    expect(totals["successful"] == 10 and totals["errored"] == 0, totals)


main()
