"""Renders a version's speculation for vLLM: its option `--speculative-config`. Pure."""

from typing import Any

from models_registry.planning.speculation import Draft, Method, Ngram
from models_registry.planning.version_spec import InvalidVersion, VersionSpec

GUESSED_ON_THE_HOST = (Method.NGRAM, Method.MEDUSA)
"""Methods whose guesses wait for the sampled tokens on the host: vLLM does not plan their next step ahead."""


def speculative_config(spec: VersionSpec, speculation: Ngram | Draft) -> dict[str, Any]:
    """What vLLM is told. A draft lies where its URI says; the agent replaces one that it had to fetch.

    Raises:
        InvalidVersion: another option of the version does not go with it.
    """
    config = _method(spec, speculation)
    if config["method"] in GUESSED_ON_THE_HOST and spec.engine_options.get("async_scheduling"):
        raise InvalidVersion(
            f"{spec.reference}: engine_options.async_scheduling is true; vLLM does not start so with "
            f"speculation.method {config['method']}, leave it out"
        )
    if speculation.by_batch:
        config["num_speculative_tokens_per_batch_size"] = [list(each) for each in speculation.by_batch]
    return config


def _method(spec: VersionSpec, speculation: Ngram | Draft) -> dict[str, Any]:
    if isinstance(speculation, Ngram):
        return {
            "method": Method.NGRAM.value,
            "num_speculative_tokens": speculation.tokens,
            "prompt_lookup_min": speculation.lookup_min,
            "prompt_lookup_max": speculation.lookup_max,
        }
    return {
        "method": speculation.method.value,
        "model": speculation.artifact.uri.removeprefix("file://"),
        "num_speculative_tokens": speculation.tokens,
        "max_model_len": spec.context_length,
    }
