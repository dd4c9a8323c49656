"""aiperf: 20 streams."""

import tempfile

from cases import BASE_URL, KEY, MODEL, TOKENIZER, beside_this_python, case, expect, main, run


@case("load")
def load() -> None:
    with tempfile.TemporaryDirectory() as folder:
        said = run(
            *(beside_this_python("aiperf"), "profile", "--model", MODEL, "--url", BASE_URL.removesuffix("/v1")),
            *("--endpoint-type", "chat", "--streaming", "--concurrency", "4", "--request-count", "20"),
            *("--tokenizer", TOKENIZER, "--api-key", KEY, "--artifact-dir", folder, "--ui", "none"),
            *("--synthetic-input-tokens-mean", "40", "--output-tokens-mean", "16"),
            limit_s=600,
            HF_HUB_OFFLINE="1",
        )
    expect("Request Throughput" in said, said[-400:])


main()
