"""aiperf: 20 streams."""

import json
import tempfile
from pathlib import Path

from cases import BASE_URL, KEY, MODEL, TOKENIZER, beside_this_python, case, expect, main, run


@case("load")
def load() -> None:
    with tempfile.TemporaryDirectory() as folder:
        # Without HF_HUB_OFFLINE: with it, aiperf takes a tokenizer out of its cache alone and none from a folder.
        said = run(
            *(beside_this_python("aiperf"), "profile", "--model", MODEL, "--url", BASE_URL.removesuffix("/v1")),
            *("--endpoint-type", "chat", "--streaming", "--concurrency", "4", "--request-count", "20"),
            *("--tokenizer", TOKENIZER, "--api-key", KEY, "--artifact-dir", folder, "--ui", "none"),
            *("--synthetic-input-tokens-mean", "40", "--output-tokens-mean", "16"),
            limit_s=600,
        )
        reports = list(Path(folder).rglob("profile_export_aiperf.json"))
        expect(reports, said[-400:])
        report = json.loads(reports[0].read_text())
    expect(report["request_count"]["avg"] == 20 and not report["error_summary"], report["error_summary"])


main()
