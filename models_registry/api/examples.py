"""Example bodies of the API's documentation."""

from typing import Any

MODEL: dict[str, Any] = {
    "name": "smollm2",
    "description": "SmolLM2 135M Instruct",
    "versions": ["smollm2@1"],
    "created_at": "2026-11-21T11:57:00Z",
}

VERSION: dict[str, Any] = {
    "id": "smollm2@1",
    "model": "smollm2",
    "version": "1",
    "state": "released",
    "engine": "vllm",
    "artifact_uri": "file:///srv/artifacts/smollm2",
    "artifact_digest": "sha256:1f3c…",
    "context_length": 2048,
    "max_concurrency": 16,
    "ready_timeout_s": 300.0,
    "attention_heads": 12,
    "kv_heads": 4,
    "layers": 30,
    "parallelism": {"local.cpu": {"nodes": 2, "tp": 2}},
    "speculation": {"method": "ngram", "tokens": 3},
    "quantization": {},
    "engine_options": {"enforce_eager": True},
    "engine_env": {"VLLM_CPU_KVCACHE_SPACE": "1"},
    "golden_prompts": [{"prompt": "2 + 2 =", "expect": "4"}],
    "renderings": [
        {
            "instance_type": "local.cpu",
            "problem": "",
            "degrees": {"nodes": 2, "tp": 2, "cp": 1, "dp": 1, "pp": 1},
            "arguments": [
                *("--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "16"),
                "--speculative-config",
                '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4,"prompt_lookup_min":2}',
                *("--tensor-parallel-size", "2"),
            ],
            "notes": [],
        }
    ],
    "created_at": "2026-11-21T11:57:00Z",
}
