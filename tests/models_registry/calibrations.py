"""Calibrations to test with: a version with heads, what its trainer wrote, and what steps cost."""

from typing import Any

from models_registry.models import ModelVersion
from tests.models_registry.drafts import stored

DIGEST = "sha256:" + "ab" * 32
DOCUMENT: dict[str, Any] = {
    "format": 1,
    "model": DIGEST,
    "heads_sha256": "cd" * 32,
    "heads": 2,
    "tasks": [
        {"name": "plan", "answers": ["00" * 9 + "--", "00" * 8 + "0-" + "--"]},
        {"name": "chat", "answers": ["1-" * 9 + "--", "0-" + "--" * 9]},
    ],
}
STEP_COST: dict[str, Any] = {
    "instance_type": "local.cpu",
    "source": "measured",
    "hardware": "x86_64",
    "software": "vLLM 0.32",
    "steps": [
        {"batch": batch, "verified": verified, "seconds": seconds * verified**0.3}
        for batch, seconds in ((1, 0.1), (8, 0.3))
        for verified in (1, 3)
    ],
}


def with_heads(**speculation: Any) -> ModelVersion:
    """A released version on vLLM that guesses by heads."""
    stated = {
        "method": "medusa", "tokens": 2, "draft_uri": "file:///heads", "draft_digest": DIGEST, **speculation
    }  # fmt: skip
    return stored("released", engine="vllm", artifact_uri="file:///model", artifact_digest=DIGEST, speculation=stated)
