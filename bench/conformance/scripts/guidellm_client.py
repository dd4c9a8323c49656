"""guidellm: ten requests, one after the other."""

import json
import tempfile
from pathlib import Path

from cases import BASE_URL, KEY, MODEL, TOKENIZER, beside_this_python, case, expect, main, run


@case("load")
def load() -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        target = BASE_URL.removesuffix("/v1")
        said = run(
            *(beside_this_python("guidellm"), "run", "--disable-progress"),
            *("--backend", f"kind=openai_http,target={target},model={MODEL},api_key={KEY}"),
            *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
            *("--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=16"),
            *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=10"),
            *("--output", f"kind=json,path={report}"),
            limit_s=600,
            HF_HUB_OFFLINE="1",
        )
        expect(report.exists(), said[-400:])
        totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    expect(totals["successful"] == 10 and totals["errored"] == 0, totals)


main()
