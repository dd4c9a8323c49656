"""Two versions side by side: exactly the differences are shown."""

from dataclasses import replace
from typing import Any

import pytest

from lab.versions import P5, TRN1, spec
from models_registry.instance_types.planner import INSTANCE_TYPES
from models_registry.versions.planning.diff import (
    NOT_NAMED,
    Change,
    Line,
    VersionDiff,
    arguments_by_flag,
    diff_versions,
)
from models_registry.versions.planning.spec import HeadCounts

BEFORE = spec(
    "vllm",
    P5,
    {"nodes": 2, "tp": 2},
    artifact_uri="file:///weights",
    engine_options={"enforce_eager": True, "seed": 7},
    golden_prompts=(("2 + 2 =", "4"),),
)


def diff(**changes: Any) -> VersionDiff:
    return diff_versions(BEFORE, replace(BEFORE, version="4", **changes), INSTANCE_TYPES)


def differing(lines: tuple[Line, ...]) -> dict[str, tuple[Any, Any, str]]:
    return {line.name: (line.before, line.after, line.change) for line in lines if line.change is not Change.SAME}


def test_versions_that_say_the_same_are_the_same_whatever_their_names() -> None:
    found = diff()
    assert found.same
    assert (found.before, found.after) == ("llama@3", "llama@4")
    assert {line.name for line in found.fields} >= {
        "engine",
        "engine_options.seed",
        "golden_prompts.1.expect",
        "layers",
    }


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"context_length": 4096}, {"context_length": (2048, 4096, "changed")}),
        (
            {"engine_options": {"seed": 8, "x": True}},
            {
                "engine_options.enforce_eager": (True, None, "removed"),
                "engine_options.seed": (7, 8, "changed"),
                "engine_options.x": (None, True, "added"),
            },
        ),
        ({"engine_options": {"enforce_eager": 1, "seed": 7}}, {"engine_options.enforce_eager": (True, 1, "changed")}),
        (
            {"golden_prompts": (("2 + 2 =", "4"), ("a", "b"))},
            {"golden_prompts.2.prompt": (None, "a", "added"), "golden_prompts.2.expect": (None, "b", "added")},
        ),
        (
            {"golden_prompts": (), "golden_waiver": "a toy"},
            {
                "golden_prompts.1.prompt": ("2 + 2 =", None, "removed"),
                "golden_prompts.1.expect": ("4", None, "removed"),
                "golden_waiver": (None, "a toy", "added"),
            },
        ),
        ({"heads": HeadCounts(64, 16, None)}, {"kv_heads": (8, 16, "changed"), "layers": (80, None, "removed")}),
    ],
)
def test_what_differs_in_what_they_say_shows_by_its_name(changes: dict[str, Any], shown: dict[str, Any]) -> None:
    found = diff(**changes)
    assert differing(found.fields) == shown
    assert not found.same


def test_a_cell_is_compared_by_degrees_and_engine_arguments() -> None:
    (kind,) = diff(parallelism={P5.name: {"nodes": 1, "tp": 8}}, max_concurrency=32).instance_types
    assert kind.change is Change.CHANGED
    assert differing(kind.degrees) == {"nodes": (2, 1, "changed"), "tp": (2, 8, "changed")}
    assert differing(kind.arguments) == {
        "--max-num-seqs": ("16", "32", "changed"),
        "--tensor-parallel-size": ("2", "8", "changed"),
    }


def test_a_number_inside_a_long_option_shows_as_itself() -> None:
    one = spec("neuron", TRN1, {"tp": 32, "cp": 2})
    (kind,) = diff_versions(
        one, replace(one, parallelism={TRN1.name: {"tp": 32, "cp": 4}}), INSTANCE_TYPES
    ).instance_types
    assert differing(kind.arguments) == {
        "--additional-config.override_neuron_config.cp_degree": (2, 4, "changed"),
    }


def test_an_instance_type_of_one_side_alone_says_so() -> None:
    found = diff(parallelism={P5.name: {"nodes": 2, "tp": 2}, "own.gpu": {"within": 1}})
    own, p5 = found.instance_types
    assert p5.change is Change.SAME
    assert (own.problem_before, own.problem_after) == (NOT_NAMED, "this instance type does not exist")
    assert differing(own.degrees) == {"within": (None, 1, "added")}
    assert own.change is Change.CHANGED


def test_a_version_that_cannot_be_rendered_has_a_problem_and_no_arguments() -> None:
    (kind,) = diff(parallelism={P5.name: {"tp": 9}}).instance_types
    assert kind.problem_after.startswith("parallelism.p5.48xlarge.tp is 9; ")
    assert all(line.change is Change.REMOVED for line in kind.arguments)


def test_arguments_are_read_by_their_flags() -> None:
    assert arguments_by_flag(("--a", "1", "--b", "--c", '{"d": [1]}', "--e", "{broken")) == {
        "--a": "1",
        "--b": True,
        "--c": {"d": [1]},
        "--e": "{broken",
    }
