"""Which versions answer alike. A stream continues at a cell of another version only if nothing differs between the two
that could change its tokens or its text. Pure."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from models_registry.versions.planning.spec import InvalidVersion, VersionSpec

_APART: Final = (
    *("version", "allowances", "heads", "differs_on", "by_type"),
    *("golden_prompts", "golden_waiver", "max_concurrency", "ready_timeout_s"),
)
"""Names, checks and limits of a version. `by_type` is read for each instance type."""
_PACE_OF_VLLM = """
    batch-prompt-tokens disable-log-stats enable-chunked-prefill enable-prefix-caching gpu-memory-utilization
    kv-cache-memory-bytes kv-offloading-backend kv-offloading-size kv-store-size long-prefill-token-threshold
    max-long-partial-prefills max-num-batched-tokens max-num-partial-prefills max-num-seqs no-enable-chunked-prefill
    no-enable-prefix-caching num-gpu-blocks-override prefix-caching-hash-algo scheduling-policy sleep-idle-seconds
    sleep-level swap-space
"""
_PACE_OF_SIM = """
    base-ms batch-prompt-tokens decode-step-ms decode-step-per-seq-ms extension-s gb-per-s grace-s kv-capacity-tokens
    lease-s load-time-s max-num-seqs mb-per-token prefill-chunk-tokens prefill-tokens-per-s prefix-block-tokens
    rendezvous-timeout-s renew-s seed step-jitter
"""
PACE: Final[Mapping[str, frozenset[str]]] = {
    "vllm": frozenset(_PACE_OF_VLLM.split()),
    "sim": frozenset(_PACE_OF_SIM.split()),
}
"""Options by engine that decide when a token is computed and what stays in memory. They change the order of requests
and the size of batches, which also differ between two cells of one version."""
DIGITS: Final = 16


def answers_name(spec: VersionSpec) -> str:
    """Returns a digest that is equal for versions that answer alike. Returns an empty text for a version that answers
    like no other one: the contents of its weights or adapters have no digest, or a field cannot be read."""
    try:
        on_types = {kind: _decisive(spec.on(kind)) for kind in spec.instance_types}
    except InvalidVersion:
        return ""
    if not on_types or any(map(_is_unnamed, on_types.values())):
        return ""
    text = json.dumps(on_types, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def _decisive(spec: VersionSpec) -> dict[str, Any]:
    fields = {name: value for name, value in asdict(spec).items() if name not in _APART}
    pace = PACE.get(spec.engine, frozenset())
    named = {name.replace("_", "-"): value for name, value in spec.engine_options.items()}
    return {**fields, "engine_options": {name: value for name, value in named.items() if name not in pace}}


def _is_unnamed(fields: Mapping[str, Any]) -> bool:
    artifacts = [(fields["artifact_uri"], fields["artifact_digest"])]
    artifacts += [(each.get("artifact_uri"), each.get("artifact_digest")) for each in fields["adapters"]]
    return any(uri and not digest for uri, digest in artifacts)
