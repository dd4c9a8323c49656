"""Example bodies of the API's documentation."""

from typing import Any

MODEL: dict[str, Any] = {
    "name": "smollm2",
    "description": "SmolLM2 135M Instruct",
    "versions": ["smollm2@1"],
    "created_at": "2026-11-21T11:57:00Z",
}

NEW_MODEL: dict[str, Any] = {"name": "smollm2", "description": "SmolLM2 135M Instruct"}

NEW_DRAFT: dict[str, Any] = {
    "model": "smollm2",
    "version": "2",
    "based_on": "smollm2@1",
    "engine_options": {"enforce_eager": False},
}

CHANGE_DRAFT: dict[str, Any] = {"context_length": 4096, "revision": 1}

VALIDATION: dict[str, Any] = {
    "state": "passed",
    "tone": "ok",
    "reason": "9 files, 269.1 MB, are as their digests say",
    "actor": "operator",
    "files_done": 9,
    "files_total": 9,
    "bytes_done": 269080000,
    "bytes_total": 269080000,
    "evidence": {
        "artifacts": [
            {"uri": "file:///srv/artifacts/smollm2", "digest": "sha256:1f3c…", "files": 9, "bytes": 269080000}
        ],
        "instance_types": [{"instance_type": "local.cpu", "problem": ""}],
        "golden_prompts": 1,
        "golden_waiver": "",
    },
    "started_at": "2026-11-21T11:56:00Z",
    "ended_at": "2026-11-21T11:56:04Z",
}

VERSION: dict[str, Any] = {
    "id": "smollm2@1",
    "model": "smollm2",
    "version": "1",
    "state": "released",
    "tone": "ok",
    "reason": "released by operator: a week on canaries",
    "revision": 3,
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
    "adapters": [
        {
            "name": "smollm2-support",
            "artifact_uri": "file:///srv/artifacts/smollm2-support",
            "artifact_digest": "sha256:77ab…",
            "rank": 8,
        }
    ],
    "engine_options": {"enforce_eager": True},
    "engine_env": {"VLLM_CPU_KVCACHE_SPACE": "1"},
    "golden_prompts": [{"prompt": "2 + 2 =", "expect": "4"}],
    "golden_waiver": "",
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
    "validation": VALIDATION,
    "created_at": "2026-11-21T11:55:00Z",
    "state_since": "2026-11-21T11:57:00Z",
}

DIFF: dict[str, Any] = {
    "before": "sim-70b@1",
    "after": "sim-70b@2",
    "same": False,
    "fields": [
        {"name": "context_length", "before": 8192, "after": 8192, "change": "same"},
        {"name": "engine_options.decode_step_ms", "before": 14, "after": 12.5, "change": "changed"},
    ],
    "instance_types": [
        {
            "instance_type": "local.cpu",
            "change": "changed",
            "problem_before": "",
            "problem_after": "",
            "degrees": [{"name": "nodes", "before": 2, "after": 2, "change": "same"}],
            "arguments": [{"name": "--decode-step-ms", "before": "14", "after": "12.5", "change": "changed"}],
        }
    ],
}

ALLOWANCE: dict[str, Any] = {
    "id": 3,
    "engine": "vllm",
    "name": "--trust-remote-code",
    "why": "our own modelling code, reviewed in models#114",
    "actor": "admin",
    "created_at": "2026-11-22T12:00:00Z",
}

NEW_ALLOWANCE: dict[str, Any] = {name: ALLOWANCE[name] for name in ("engine", "name", "why")}
