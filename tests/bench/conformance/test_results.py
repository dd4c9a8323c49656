"""Scripts of clients print results; the page made of them hides nothing."""

import ast
import json
import re

import pytest

from bench.conformance.clients import CLIENTS, SCRIPTS, Client, Family, Language, folder_of
from bench.conformance.results import COLUMNS, FEATURES, LIMITS, Limit, Result, page, results_of

EMBEDDINGS = next(limit for limit in LIMITS if limit.feature == "embeddings")
SHARED = {"cases", "shapes"}
ERRORS = {"unknown_model", "wrong_key"}


def client(name: str, *packages: str, family: Family = Family.SDK) -> Client:
    return Client(name, family, Language.PYTHON, packages, "a.py")


def test_lines_that_are_no_result_are_ignored() -> None:
    lines = ["warming up …", "17", '{"other": 1}', json.dumps({"feature": "chat", "reason": ""})]
    assert results_of("c", "sim", "\n".join(lines)) == [Result("c", "sim", "chat")]


def test_a_feature_that_is_not_listed_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not list 'dance'"):
        results_of("c", "sim", '{"feature": "dance", "reason": ""}')


def test_a_failure_counts_unless_a_limit_of_that_engine_or_client_names_it() -> None:
    assert not Result("c", "sim", "embeddings").has_failed
    assert Result("c", "sim", "embeddings", "404").has_failed
    assert not Result("c", "vllm", "embeddings", "404").has_failed
    own = Limit("structured", "it cannot", client="c")
    assert own.covers(Result("c", "sim", "structured", "no"))
    assert own.covers(Result("c", "vllm", "structured", "no"))
    assert not own.covers(Result("d", "sim", "structured", "no"))


def test_the_page_has_a_row_for_each_client_and_names_every_failure_and_limit_with_its_reason() -> None:
    results = [
        Result("a", "sim", "chat"),
        Result("a", "vllm", "chat"),
        Result("a", "sim", "embeddings"),
        Result("a", "vllm", "embeddings", "404"),
        Result("b", "sim", "chat", "Error: |no|"),
    ]
    text = page(results, [client("a", "a==1"), client("b")], "Tried today.")
    assert "| client | chat | vectors |" in text
    assert "| a | yes | sim: yes, vllm: limit |" in text
    assert "| b | sim: **fails** |  |" in text
    assert "- **b, `chat` on sim**: Error: \\|no\\|" in text
    assert f"- `embeddings` on vllm: {EMBEDDINGS.reason}." in text
    assert "- a: a==1" in text


def test_a_column_of_which_some_features_are_limits_says_partly() -> None:
    results = [Result("a", "vllm", "embeddings", "404"), Result("a", "vllm", "rerank")]
    assert "| a | partly |" in page(results, [client("a")], "Tried today.")


def test_clients_are_shown_by_family() -> None:
    clients = [client("b", family=Family.LOAD), client("a")]
    text = page([Result("a", "sim", "chat"), Result("b", "sim", "load")], clients, "Tried today.")
    assert text.index(f"## {Family.SDK}") < text.index("| a |") < text.index(f"## {Family.LOAD}") < text.index("| b |")


def test_every_feature_is_in_one_column() -> None:
    assert sorted(feature for features in COLUMNS.values() for feature in features) == sorted(FEATURES)


def test_every_script_exists_and_tries_features_that_are_listed() -> None:
    for each in CLIENTS:
        tried = tried_by(each)
        assert tried, each.name
        assert tried <= set(FEATURES), each.name
    used = {each.script for each in CLIENTS}
    assert used == {path.name for path in SCRIPTS.glob("*.*") if path.stem not in SHARED}


def test_every_feature_is_tried_by_a_client() -> None:
    assert set().union(*(tried_by(each) for each in CLIENTS)) == set(FEATURES)


def test_every_limit_is_of_a_feature_and_a_client_that_exist() -> None:
    for limit in LIMITS:
        assert limit.feature in FEATURES
        assert not limit.client or limit.client in {each.name for each in CLIENTS}


def test_every_package_has_a_version_and_every_client_a_name_of_its_own() -> None:
    for each in CLIENTS:
        for package in each.packages:
            assert re.search(r".(==|@)\d", package), package
    assert len({each.name for each in CLIENTS}) == len(CLIENTS)


def test_clients_of_the_same_packages_share_an_environment_and_no_others_do() -> None:
    made = {each.packages: folder_of(each) for each in CLIENTS if each.packages}
    assert len(set(made.values())) == len(made)


def test_no_script_hides_a_package_that_a_script_imports() -> None:
    imported = set()
    for path in SCRIPTS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    assert {path.stem for path in SCRIPTS.glob("*.py")} & imported == SHARED


def tried_by(each: Client) -> set[str]:
    """The features that a client's script declares, in the function of its variant if it has one."""
    text = (SCRIPTS / each.script).read_text()
    if each.language is Language.NODE:
        # Features are names of functions or of members there.
        return {feature for feature in FEATURES if re.search(rf"\b{feature}\b(\(\) \{{|: |[,)])", text)}
    tree: ast.AST = ast.parse(text)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    found: set[str] = set()
    for call in ast.walk(functions.get(each.variant, tree)):
        match call:
            case ast.Call(ast.Name("case"), [ast.Constant(feature)]):
                found.add(str(feature))
            case ast.Call(ast.Name("features"), keywords=keywords):
                named = {str(keyword.arg) for keyword in keywords}
                found |= named - {"errors"} | (ERRORS if "errors" in named else set())
    return found
