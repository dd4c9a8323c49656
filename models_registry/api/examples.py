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
    "parallelism": {"local.cpu": {"nodes": 2, "tp": 2}},
    "engine_options": {"enforce_eager": True},
    "engine_env": {"VLLM_CPU_KVCACHE_SPACE": "1"},
    "golden_prompts": [{"prompt": "2 + 2 =", "expect": "4"}],
    "created_at": "2026-11-21T11:57:00Z",
}
