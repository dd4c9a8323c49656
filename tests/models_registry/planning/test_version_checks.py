"""A draft may be unfinished; a field that makes no sense by itself is named at once."""

from dataclasses import replace
from typing import Any

import pytest

from lab.versions import LOCAL, spec
from models_registry.planning.version_checks import BrokenRule, check_draft

DIGEST = "sha256:" + "0" * 64
DRAFT = spec("vllm", LOCAL, artifact_uri="file:///weights", artifact_digest=DIGEST)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"artifact_uri": "", "artifact_digest": ""},
        {"artifact_digest": ""},
        {"parallelism": {}},
        {"parallelism": {"nowhere.yet": {"nodes": 2, "within": 1}}},
        {"parallelism": {"local.cpu": {"tp": 2}}},
        {"golden_prompts": (("2 + 2 =", "4"),)},
        {"golden_waiver": "a toy"},
        {"engine_options": {"seed": None, "enforce_eager": True, "tensor_parallel_size": 2}},
        {"engine": "neuron", "engine_options": {"neuron_config": {"buckets": [1]}}},
        {"engine_options": {"trust_remote_code": True}, "allowances": {"vllm": ["--trust-remote-code"]}},
        {"engine_env": {"LD_PRELOAD": "libtcmalloc.so"}, "allowances": {"vllm": ["LD_PRELOAD"]}},
    ],
)
def test_what_is_unfinished_is_no_mistake(changes: dict[str, Any]) -> None:
    check_draft(replace(DRAFT, **changes))


@pytest.mark.parametrize(
    ("changes", "field", "rule", "message"),
    [
        ({"engine": "vlm"}, "engine", "choice", r"engine is 'vlm'; .* \(did you mean vllm\?\)"),
        ({"artifact_uri": "http://x"}, "artifact_uri", "place", "it must be file:///absolute/path or s3://"),
        ({"artifact_digest": "sha256:ab"}, "artifact_digest", "digest", "64 hexadecimal digits, or empty"),
        ({"artifact_uri": ""}, "artifact_digest", "place", "artifact_uri says no place of it"),
        ({"parallelism": {"a": {"tq": 1}}}, "parallelism", "readable", "names 'tq'"),
        ({"parallelism": {"a": {"tp": 0}}}, "parallelism", "readable", "it must be a whole number from 1"),
        ({"speculation": {"method": "mtp"}}, "speculation", "readable", "on engine vllm it must be one of"),
        ({"quantization": {"method": ""}}, "quantization", "readable", "a text that is not empty"),
        ({"engine_options": {"a": [1]}}, "engine_options.a", "type", "it must be text, a number or true/false"),
        ({"engine_env": {"1A": "x"}}, "engine_env", "name", "starts with no digit"),
        (
            {"engine_options": {"trust_remote_code": True}},
            *("engine_options.trust_remote_code", "allowed", "an admin can allow it"),
        ),
        ({"engine_options": {"max-num-seq": 2}}, "engine_options.max-num-seq", "allowed", "nearest .* --max-num-seqs"),
        ({"engine_options": {"load_format": "pt"}}, "engine_options.load_format", "value", "auto, dummy, safetensors"),
        ({"engine_options": {"dtype": "--uds"}}, "engine_options.dtype", "value", "a value cannot begin with -"),
        ({"engine_env": {"LD_PRELOAD": "/x.so"}}, "engine_env.LD_PRELOAD", "allowed", "the variable LD_PRELOAD"),
        (
            {"engine_env": {"PYTHONPATH": "/x"}, "allowances": {"vllm": ["PYTHONPATH"]}},
            *("engine_env.PYTHONPATH", "allowed", "which the agent sets itself"),
        ),
        ({"golden_prompts": (("p", "e"),) * 17}, "golden_prompts", "count", "17 golden prompts; at most 16"),
        (
            {"golden_prompts": (("p", "e"),), "golden_waiver": "none needed"},
            *("golden_waiver", "either", "empty one of the two"),
        ),
        ({"engine_options": {"a": {"b": "\x00"}}}, "engine_options", "nul", "holds a NUL character"),
        ({"engine_env": {"A": "\x00"}}, "engine_env", "nul", "holds a NUL character"),
    ],
)
def test_a_mistake_is_named_with_its_field_and_rule(
    changes: dict[str, Any], field: str, rule: str, message: str
) -> None:
    with pytest.raises(BrokenRule, match=message) as raised:
        check_draft(replace(DRAFT, **changes))
    assert (raised.value.field, raised.value.rule) == (field, rule)
