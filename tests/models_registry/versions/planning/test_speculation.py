"""Trees are optimal, compared with every possible tree; bad trees are rejected; options of each engine's methods."""

import json
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.protocol.messages import Artifact
from lab.versions import LOCAL, P5, TRN1, spec
from models_registry.instance_types.planner import InstanceShape
from models_registry.versions.planning.engine_arguments import render_version
from models_registry.versions.planning.spec import InvalidVersion
from models_registry.versions.planning.speculation import (
    Accuracies,
    BadTree,
    Path,
    build_tree,
    check_tree,
    expected_accepted,
)

TWO_HEADS: Accuracies = ((0.6, 0.2, 0.1), (0.5, 0.1))


@st.composite
def accuracies(draw: st.DrawFn, heads: int = 3, guesses: int = 2) -> Accuracies:
    """Few heads of few guesses, in hundredths, whose shares sum to at most 1."""
    drawn = []
    for _ in range(draw(st.integers(1, heads))):
        left, shares = 100, []
        for _ in range(draw(st.integers(1, guesses))):
            shares.append(draw(st.integers(0, left)))
            left -= shares[-1]
        drawn.append(tuple(share / 100 for share in shares))
    return tuple(drawn)


def all_paths(heads: Accuracies, depth: int) -> list[Path]:
    return [
        path for length in range(1, depth + 1) for path in product(*(range(len(shares)) for shares in heads[:length]))
    ]


def best_by_trying_every_tree(heads: Accuracies, size: int, depth: int) -> float:
    """The largest expectation of any prefix-closed set of at most `size` paths."""
    paths = all_paths(heads, depth)
    return max(
        expected_accepted(tree, heads)
        for count in range(size + 1)
        for tree in combinations(paths, count)
        if all(len(path) == 1 or path[:-1] in tree for path in tree)
    )


def test_the_most_probable_paths_are_taken_and_prefixes_come_first() -> None:
    tree = build_tree(TWO_HEADS, size=4, depth=2)
    assert tree.as_json() == [[0], [0, 0], [1], [2]]  # 0.6, 0.3, 0.2, 0.1
    assert tree.expected_accepted == pytest.approx(1.2)


def test_equal_paths_go_to_the_shorter_and_then_the_lower_guess() -> None:
    assert build_tree(((0.5, 0.5), (1.0,)), size=3, depth=2).as_json() == [[0], [1], [0, 0]]


def test_depth_limits_paths() -> None:
    assert max(map(len, build_tree(((0.9,), (0.9,), (0.9,)), size=9, depth=2).paths)) == 2


def test_guesses_that_are_never_right_are_left_out() -> None:
    assert build_tree(((0.5, 0.0), (0.0,)), size=9, depth=2).as_json() == [[0]]


@given(heads=accuracies(), size=st.integers(1, 5), data=st.data())
def test_no_tree_of_this_size_and_depth_is_expected_to_accept_more(
    heads: Accuracies, size: int, data: st.DataObject
) -> None:
    depth = data.draw(st.integers(1, len(heads)))
    tree = build_tree(heads, size=size, depth=depth)
    assert tree.expected_accepted == pytest.approx(best_by_trying_every_tree(heads, size, depth))
    assert tree.expected_accepted == pytest.approx(expected_accepted(tree.paths, heads))


@given(heads=accuracies(heads=5, guesses=10), size=st.integers(1, 80))
def test_every_built_tree_passes_the_check(heads: Accuracies, size: int) -> None:
    tree = build_tree(heads, size=size, depth=len(heads))
    assert len(tree.paths) <= size
    if tree.paths:
        assert set(check_tree(tree.as_json(), heads=len(heads), top_k=10)) == set(tree.paths)


@pytest.mark.parametrize(
    ("given_heads", "size", "depth", "message"),
    [
        ((), 1, 1, "there are no accuracies"),
        (((0.5,), ()), 1, 1, "head 1 has no accuracies"),
        (((1.5,),), 1, 1, r"accuracy of head 0, guess 0 is 1.5; it must be from 0 to 1"),
        (((float("nan"),),), 1, 1, "is nan"),
        (((0.6, 0.8),), 1, 1, r"sum to 1.4000; at most one guess of a head is right.*not of the top k"),
        (TWO_HEADS, 0, 1, "size is 0; it must be a whole number from 1"),
        (TWO_HEADS, 1, 3, "depth is 3; it must be from 1 to the number of heads, 2"),
    ],
)
def test_a_tree_that_cannot_be_built_says_why(given_heads: Accuracies, size: int, depth: int, message: str) -> None:
    with pytest.raises(BadTree, match=message):
        build_tree(given_heads, size=size, depth=depth)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ([], "must be a list of paths"),
        ({"0": 1}, "must be a list of paths"),
        ([[]], r"path \[\] must be a list of whole numbers from 0, with at least one"),
        ([[0], [True]], r"path \[True\] must be"),
        ([[0], [-1]], r"path \[-1\] must be"),
        ([[0], [0]], r"path \[0\] occurs twice"),
        ([[0], [0, 0], [0, 0, 0]], r"path \[0, 0, 0\] has 3 guesses, but there are 2 heads"),
        ([[4]], r"has guess 4, but guesses go from 0 to 3"),
        ([[0], [1, 0]], r"path \[1, 0\] lacks its prefix \[1\]"),
    ],
)
def test_a_bad_tree_is_named(tree: Any, message: str) -> None:
    with pytest.raises(BadTree, match=message):
        check_tree(tree, heads=2, top_k=4)


DRAFT = {"tokens": 5, "draft_uri": "file:///models/draft", "draft_digest": "sha256:cd"}


def config(machine: InstanceShape, engine: str, speculation: dict[str, Any]) -> tuple[Any, Artifact | None]:
    plan = render_version(spec(engine, machine, speculation=speculation), machine).plan
    return json.loads(plan.args[plan.args.index("--speculative-config") + 1]), plan.draft


def test_n_grams_need_no_second_model() -> None:
    assert config(LOCAL, "vllm", {"method": "ngram", "tokens": 3, "lookup_max": 5}) == (
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
        None,
    )


def test_a_draft_model_is_named_where_it_lies_and_goes_along_as_an_artifact() -> None:
    assert config(P5, "vllm", {"method": "draft_model", **DRAFT}) == (
        {"method": "draft_model", "model": "/models/draft", "num_speculative_tokens": 5, "max_model_len": 2048},
        Artifact("file:///models/draft", "sha256:cd"),
    )


def test_heads_are_a_chain_on_vllm_and_fewer_tokens_may_be_guessed_in_larger_batches() -> None:
    ranges = [[1, 4, 5], [5, 16, 2], [17, 64, 0]]
    assert config(P5, "vllm", {"method": "medusa", **DRAFT, "tokens_per_batch_size": ranges}) == (
        {
            "method": "medusa",
            "model": "/models/draft",
            "num_speculative_tokens": 5,
            "num_speculative_tokens_per_batch_size": ranges,
            "max_model_len": 2048,
        },
        Artifact("file:///models/draft", "sha256:cd"),
    )


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_vllm_takes_drafts_on_the_targets_features(method: str) -> None:
    assert config(P5, "vllm", {"method": method, **DRAFT})[0]["method"] == method


@pytest.mark.parametrize(
    "ranges",
    [
        *([], [[1, 4]], [[2, 4, 1]], [[1, 4, 4]], [[1, 4, -1]], [[4, 1, 1]], [[1, 4, 1], [4, 8, 1]], [[1, 4, True]], 5),
        [[first, first, 1] for first in range(1, 18)],
    ],
)
def test_ranges_that_vllm_would_not_take_are_refused_with_an_example(ranges: object) -> None:
    stated = {"method": "ngram", "tokens": 3, "tokens_per_batch_size": ranges}
    with pytest.raises(InvalidVersion, match=r"tokens_per_batch_size.* such as \[\[1, 4, 3\], \[5, 64, 0\]\]"):
        render_version(spec("vllm", LOCAL, speculation=stated), LOCAL)


@pytest.mark.parametrize("method", [{"method": "ngram", "tokens": 3}, {"method": "medusa", **DRAFT}])
def test_steps_cannot_be_planned_ahead_of_guesses_that_wait_for_the_host(method: dict[str, Any]) -> None:
    version = spec("vllm", LOCAL, speculation=method, engine_options={"async_scheduling": True})
    with pytest.raises(
        InvalidVersion, match=r"async_scheduling is true; vLLM does not start with it and speculation.method"
    ):
        render_version(version, LOCAL)


def test_eagle_3_is_said_to_nxdi_too() -> None:
    plan = render_version(spec("neuron", TRN1, speculation={"method": "eagle3", **DRAFT}), TRN1).plan
    override = json.loads(plan.args[plan.args.index("--additional-config") + 1])["override_neuron_config"]
    keys = ("enable_eagle_speculation", "enable_fused_speculation", "is_eagle3", "speculation_length")
    assert [override[key] for key in keys] == [True, True, True, 5]


@pytest.mark.parametrize(
    ("engine", "speculation", "message"),
    [
        ("vllm", {"method": "mtp"}, r"method is 'mtp'; on engine vllm it must be one of ngram, draft_model"),
        ("vllm", {"method": "medusa", "tree": [[0]]}, r"speculation.tree: vLLM verifies only .* Trees need NxDI"),
        ("vllm", {"method": "medusa", "heads": 4}, r"speculation.heads: vLLM verifies only the chain .* state tokens"),
        ("vllm", {"method": "medusa", "tokens": 4}, r"speculation.draft_uri is None; it must be a text"),
        ("neuron", {"method": "eagle", **DRAFT, "tokens_per_batch_size": [[1, 4, 5]]}, r"names 'tokens_per_batch_si"),
        ("neuron", {"method": "ngram"}, r"method is 'ngram'; on engine neuron it must be one of medusa, eagle, eagle3"),
        ("sim", {"method": "ngram"}, r"speculation is {'method': 'ngram'}; engine sim does not support it, leave"),
        ("vllm", {"tokens": 3}, r"method is None; on engine vllm it must be one of"),
        ("vllm", {"method": "ngram"}, r"speculation.tokens is None; it must be a whole number from 1"),
        ("vllm", {"method": "ngram", "tokens": 3, "lookup_min": 6}, r"lookup_min is 6; .* at most lookup_max, 4"),
        ("vllm", {"method": "ngram", "tokens": 3, "lookup": 6}, r"names 'lookup'; .* \(did you mean lookup_m"),
        ("vllm", {"method": "draft_model", **DRAFT, "draft_uri": "draft"}, r"draft_uri is 'draft'; it must be file:///"),
        ("vllm", {"method": "draft_model", **DRAFT, "draft_digest": "x"}, r"draft_digest is 'x'; it must be sha256:"),
        ("neuron", {"method": "medusa", "heads": 1, "tree": [[0], [1, 0]]}, r"speculation.tree: path \[1, 0\] has 2"),
        ("neuron", {"method": "medusa", "heads": 2, "tree": [[1, 0]]}, r"speculation.tree: .* lacks its prefix \[1\]"),
        ("neuron", {"method": "medusa", "heads": 1, "tree": [[10]]}, r"has guess 10, but guesses go from 0 to 9"),
        ("neuron", {"method": "medusa", "heads": 1, "tree": [[0]]}, r"max_concurrency is 16; Medusa runs one sequence"),
        ("neuron", {"method": "medusa", "heads": 1, "tree": [[0]], "top_k": 11}, r"top_k is 11; NxD reads 10 guesses"),
    ],
)  # fmt: skip
def test_speculation_that_cannot_be_is_refused(engine: str, speculation: dict[str, Any], message: str) -> None:
    machine = TRN1 if engine == "neuron" else LOCAL
    with pytest.raises(InvalidVersion, match=message):
        render_version(spec(engine, machine, speculation=speculation), machine)


def test_medusa_is_refused_by_name_as_its_first_request_would_end_the_engine() -> None:
    medusa = {"method": "medusa", "heads": 2, "tree": [[0], [0, 0]]}
    with pytest.raises(InvalidVersion, match=r"method is 'medusa'; .* crash at the first request.* eagle or eagle3"):
        render_version(spec("neuron", TRN1, speculation=medusa, max_concurrency=1), TRN1)
