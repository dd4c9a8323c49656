"""What scripts of clients print becomes results, and results a page that hides nothing."""

import json
import re
from pathlib import Path

import pytest

from bench.conformance import environments
from bench.conformance.clients import CLIENTS
from bench.conformance.features import FEATURES
from bench.conformance.results import LIMITS, Result, page, results_of


def test_lines_that_are_no_result_are_left_out() -> None:
    lines = ["warming up …", "17", '{"other": 1}', json.dumps({"feature": "chat", "reason": ""})]
    assert results_of("c", "sim", "\n".join(lines)) == [Result("c", "sim", "chat")]


def test_a_feature_that_the_table_lacks_is_told() -> None:
    with pytest.raises(ValueError, match="'dance' is no feature"):
        results_of("c", "sim", '{"feature": "dance", "reason": ""}')


def test_what_fails_is_a_failure_unless_it_is_a_named_limit_of_that_engine() -> None:
    assert not Result("c", "sim", "embeddings").has_failed
    assert Result("c", "sim", "embeddings", "404").has_failed
    assert not Result("c", "vllm", "embeddings", "404").has_failed
    assert Result("c", "vllm", "embeddings", "404").limit


def test_the_page_names_every_failure_and_every_limit_with_its_reason() -> None:
    results = [
        Result("a", "sim", "chat"),
        Result("b", "sim", "chat", "Error: |no|"),
        Result("a", "vllm", "embeddings", "404"),
    ]
    text = page(results, {"a": ("a==1",), "b": ()}, "Tried today.")
    assert "| `chat` | passes | **fails** |" in text
    assert "- **b, `chat` on sim**: Error: \\|no\\|" in text
    assert f"- `embeddings` on vllm: {LIMITS['vllm', 'embeddings']}." in text
    assert "- a: a==1" in text


def test_every_script_is_there_and_tries_features_of_the_table() -> None:
    for client in CLIENTS:
        text = (environments.SCRIPTS / client.script).read_text()
        tried = set(re.findall(r'^ *@case\("(\w+)"\)', text, re.M)) | set(re.findall(r"^  async (\w+)\(\)", text, re.M))
        assert tried, client.name
        assert tried <= set(FEATURES), client.name
    assert {Path(client.script).name for client in CLIENTS} >= {
        path.name for path in environments.SCRIPTS.iterdir() if path.stem != "cases" and path.suffix in {".py", ".mjs"}
    }


def test_every_feature_is_tried_by_somebody() -> None:
    texts = [(environments.SCRIPTS / client.script).read_text() for client in CLIENTS]
    for feature in FEATURES:
        assert any(f'"{feature}"' in text or f"async {feature}()" in text for text in texts), feature


def test_every_package_has_a_version() -> None:
    for client in CLIENTS:
        for package in client.packages:
            assert re.search(r".(==|@)\d", package), package
