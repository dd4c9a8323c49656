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

SEVERAL_TYPES: dict[str, Any] = {
    "model": "llama",
    "version": "7",
    "engine": "vllm",
    "artifact_uri": "s3://models/llama-7",
    "context_length": 4096,
    "max_concurrency": 64,
    "parallelism": {"p5.48xlarge": {"tp": 4}, "inf2.48xlarge": {"tp": 8}, "local.cpu": {}},
    "engine_options": {"max_num_batched_tokens": 8192},
    "golden_prompts": [{"prompt": "2 + 2 =", "expect": "4"}],
    "by_type": {
        "inf2.48xlarge": {"engine": "neuron", "max_concurrency": 4, "ready_timeout_s": 3600},
        "local.cpu": {
            "engine": "generic",
            "artifact_uri": "s3://models/llama-7-gguf",
            "max_concurrency": 2,
            "engine_options": {"command": "llama-cpp"},
        },
    },
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
        "instance_types": [{"instance_type": "local.cpu", "engine": "vllm", "problem": ""}],
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
    "roles": {},
    "by_type": {},
    "engine_options": {"enforce_eager": True},
    "engine_env": {"VLLM_CPU_KVCACHE_SPACE": "1"},
    "golden_prompts": [{"prompt": "2 + 2 =", "expect": "4"}],
    "golden_waiver": "",
    "renderings": [
        {
            "instance_type": "local.cpu",
            "engine": "vllm",
            "artifact_uri": "file:///srv/artifacts/smollm2",
            "artifact_digest": "sha256:1f3c…",
            "max_concurrency": 16,
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

NEW_BENCHMARK: dict[str, Any] = {
    "version": "smollm2@1",
    "deployment": "smollm2",
    "region": "us-east-1",
    "workload": "1000+150",
    "slo": "ttft=1000,itl=60",
}

BENCHMARK: dict[str, Any] = {
    "id": 7,
    "version": "smollm2@1",
    "deployment": "smollm2",
    "region": "us-east-1",
    "state": "done",
    "tone": "ok",
    "reason": "3.084/s held and 3.152/s, 2.2 % more, broke",
    "key": "7a40c1f3b2d95e60",
    "conditions": "0c4de1b7a9f83512",
    "version_digest": "f1d2b7c9e0a34655",
    "instance_type": "local.cpu",
    "fingerprint": "7be1c0de9a12",
    "workload": "1000+150",
    "slo": "ttft=1000,itl=60",
    "seed": 0,
    "cells": 1,
    "split": "",
    "chips": 1,
    "watts": 65.0,
    "price_per_hour": 0.1,
    "statistics": {
        "requests": 2000, "prompt_tokens_mean": 1000.0, "output_tokens_mean": 150.0, "repeated_share": 0.0,
    },
    "progress": {},
    "goodput": 3.084,
    "broke_at": 3.152,
    "concurrency": 18.4,
    "points": [
        {
            "number": 7,
            "rate": 3.084,
            "verdict": "held",
            "reason": "between 3.017/s, which held, and 3.152/s, which broke; 200 of 200 inside",
            "figures": {"requests": 200, "ttft_p99_ms": 412.5, "itl_p99_ms": 39.1, "tokens_per_s": 462.6},
            "measured_at": "2026-11-26T12:10:00Z",
        }
    ],
    "actor": "operator",
    "created_at": "2026-11-26T12:00:00Z",
    "started_at": "2026-11-26T12:00:01Z",
    "ended_at": "2026-11-26T12:10:00Z",
}  # fmt: skip

HISTOGRAMS: dict[str, Any] = {
    "points": [
        {"rate": 3.084, "histograms": {"ttft": {"88": 140, "89": 60}, "gap": {"64": 29800}, "e2e": {"125": 200}}}
    ]
}

BEST: dict[str, Any] = {
    "best": {
        "version": "smollm2@1",
        "instance_type": "local.cpu",
        "split": "",
        "benchmark": 7,
        "goodput_per_chip": 3.084,
        "tokens_per_s_per_chip": 462.6,
        "tokens_per_s_per_user": 27.2,
        "dollars_per_mtoken": 0.06,
        "joules_per_token": 0.14,
        "reason": "3.084 requests a second and chip, 2.101 of smollm2@2 on local.cpu behind it",
    }
}

CALIBRATION: dict[str, Any] = {
    "id": 4,
    "version": "smollm2@135m-medusa",
    "figures": [
        {
            "name": "plan",
            "positions": 1458,
            "accuracies": [[0.79, 0.05, 0.02], [0.73, 0.06, 0.02]],
            "chain": [1.0, 1.76, 2.35],
            "paths": [[0], [0, 0], [1]],
            "counts": [1151, 986, 73],
            "tree": [1.0, 1.76, 2.35, 2.41],
        }
    ],
    "choices": [
        {
            "task": "plan",
            "instance_type": "local.cpu",
            "source": "measured",
            "hardware": "x86_64",
            "is_tree": False,
            "tokens": 2,
            "gain": 1.9,
            "ranges": [[1, 8, 2], [9, 9, 0]],
            "off_from": 9,
            "gains": {"1": 1.9, "8": 1.1, "9": 1.0},
            "reason": "2 guessed tokens make 2.35 tokens of a step that takes 1.24 times as long: 1.90 times as fast "
            "with one sequence",
        }
    ],
    "actor": "operator",
    "created_at": "2026-11-26T12:00:00Z",
}

NEW_SEARCH: dict[str, Any] = {
    "version": "smollm2@1",
    "deployment": "smollm2-bench",
    "varied": {"engine_options.max_num_seqs": [16, 32, 64], "parallelism.tp": [1, 2]},
    "workload": "1000+150",
    "slo": "ttft=1000,itl=60",
}

SEARCH: dict[str, Any] = {
    "id": 3,
    "version": "smollm2@1",
    "deployment": "smollm2-bench",
    "region": "us-east-1",
    "instance_type": "local.cpu",
    "state": "done",
    "tone": "ok",
    "reason": "max_num_seqs=32, tp=1: 3.051 requests a second and chip, 2.984 of the next",
    "workload": "1000+150",
    "slo": "ttft=1000,itl=60",
    "seed": 0,
    "varied": {"engine_options.max_num_seqs": [16, 32, 64], "parallelism.tp": [1, 2]},
    "most_trials": 40,
    "most_hours": 12.0,
    "best": "smollm2@1-s3-2",
    "configurations": [
        {
            "number": 2,
            "choice": {"engine_options.max_num_seqs": 32, "parallelism.tp": 1},
            "version": "smollm2@1-s3-2",
            "standing": "left",
            "reason": "3.051/s a chip at 100% of the length",
            "predicted": None,
            "scores": {"25%": 3.118, "50%": 3.051, "100%": 3.051},
            "benchmarks": [9, 14, 17],
        },
        {
            "number": 1,
            "choice": {"engine_options.max_num_seqs": 16, "parallelism.tp": 1},
            "version": None,
            "standing": "pruned",
            "reason": "predicted 1.402/s a chip, below 70% of the best, 3.118",
            "predicted": 1.402,
            "scores": {},
            "benchmarks": [],
        },
    ],
    "actor": "operator",
    "created_at": "2026-11-26T12:00:00Z",
    "ended_at": "2026-11-26T13:40:00Z",
}  # fmt: skip
