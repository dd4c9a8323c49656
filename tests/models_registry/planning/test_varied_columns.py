"""What may be varied, and which draft follows from a choice: tables."""

from dataclasses import replace
from typing import Any

import pytest

from lab.versions import LOCAL, P5, spec
from models_registry.planning.varied_columns import (
    InvalidVaried,
    budget_of,
    cells_count,
    cells_of,
    choice_text,
    frozen_choice,
    is_apart,
    parse_varied,
    places_of,
    varied_columns,
)

NGRAM = {"method": "ngram", "tokens": 3}
ON_P5 = {"max_concurrency": 2}
BASE = spec("vllm", LOCAL, {"tp": 1}, engine_options={"max-num-seqs": 8, "dtype": "float32"})


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        ({}, "nothing is varied"),
        ({"golden_prompts": [[]]}, "'golden_prompts' cannot be varied; it must be engine_options.NAME"),
        ({"engine_options": [{}]}, "cannot be varied"),
        ({"parallelism.depth": [1]}, "cannot be varied"),
        ({"max_concurrency": []}, "must have a list of 1 to 32 values"),
        ({"max_concurrency": "8"}, "must have a list"),
        ({"max_concurrency": list(range(1, 40))}, "1 to 32"),
        ({"max_concurrency": [0]}, "a whole number from 1"),
        ({"parallelism.tp": [True]}, "a whole number from 1"),
        ({"speculation": ["ngram"]}, "must be an object"),
        ({"engine_options.x": [[1]]}, "a number, a text, true, false or null"),
        ({"engine_options.x": [1, 1]}, "a value twice"),
        ({"cells": [0]}, "a whole number from 1"),
        ({"cells": ["1p+3d"]}, "a whole number from 1"),
        ({"cells": [{"prefill": 1}]}, "prefill and decode from 1"),
        ({"cells": [{"prefill": 0, "decode": 2}]}, "prefill and decode from 1"),
        ({"cells": [{"prefill": 1, "decode": 2, "more": 1}]}, "prefill and decode from 1"),
        ({"cells": [4, {"prefill": 1, "decode": 3}, {"prefill": 1, "decode": 3}]}, "a value twice"),
    ],
)
def test_what_cannot_be_varied_says_what_can(stated: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidVaried, match=told):
        parse_varied(stated)


def test_names_of_options_are_spelt_one_way() -> None:
    assert parse_varied({"engine_options.max-num-seqs": [1, None]}) == {"engine_options.max_num_seqs": (1, None)}


@pytest.mark.parametrize(
    ("choice", "columns"),
    [
        ([("engine_options.max_num_seqs", 32)], {"engine_options": {"max-num-seqs": 32, "dtype": "float32"}}),
        ([("engine_options.max_num_seqs", None)], {"engine_options": {"dtype": "float32"}}),
        ([("engine_options.new", True)], {"engine_options": {**BASE.engine_options, "new": True}}),
        ([("parallelism.tp", 2)], {"parallelism": {"local.cpu": {"tp": 2}}}),
        ([("parallelism.tp", 2), ("parallelism.pp", 2)], {"parallelism": {"local.cpu": {"tp": 2, "pp": 2}}}),
        ([("max_concurrency", 4), ("speculation", NGRAM)], {"max_concurrency": 4, "speculation": NGRAM}),
        ([("roles", {"prefill": {"max_concurrency": 4}})], {"roles": {"prefill": {"max_concurrency": 4}}}),
    ],
)
def test_a_choice_becomes_columns(choice: list[tuple[str, Any]], columns: dict[str, Any]) -> None:
    assert varied_columns(BASE, choice, LOCAL.name) == columns
    assert BASE.engine_options == {"max-num-seqs": 8, "dtype": "float32"}, "the base stays"


@pytest.mark.parametrize(
    ("choice", "columns"),
    [
        (
            [("engine_options.max_num_seqs", 32)],
            {"by_type": {P5.name: {**ON_P5, "engine_options": {"max-num-seqs": 32}}}},
        ),
        ([("engine_options.dtype", None)], {"by_type": {P5.name: {**ON_P5, "engine_options": {"dtype": None}}}}),
        ([("max_concurrency", 4)], {"by_type": {P5.name: {"max_concurrency": 4}}}),
        ([("parallelism.tp", 2)], {"parallelism": {"local.cpu": {"tp": 1}, P5.name: {"tp": 2}}}),
        ([("max_concurrency", 2), ("engine_options.max_num_seqs", 8), ("parallelism.tp", 4)], {}),
    ],
)
def test_a_choice_for_one_of_several_instance_types_is_for_that_one_alone(
    choice: list[tuple[str, Any]], columns: dict[str, Any]
) -> None:
    several = replace(BASE, parallelism={LOCAL.name: {"tp": 1}, P5.name: {"tp": 4}}, by_type={P5.name: ON_P5})
    assert varied_columns(several, choice, P5.name) == columns


def test_cells_are_no_column_and_are_read_off_a_choice() -> None:
    pools = {"prefill": 1, "decode": 2, "mixed": 1}
    assert varied_columns(BASE, [("cells", pools)], LOCAL.name) == {}
    choice = frozen_choice([["cells", pools], ["max_concurrency", 4]])
    assert (cells_of(choice), is_apart(choice)) == (pools, True)
    assert choice_text(choice) == "cells=1p+2d+1m, max_concurrency=4"
    assert (cells_of([("cells", 4)]), is_apart([("cells", 4)]), cells_of([])) == (4, False, None)
    assert (cells_count(pools), cells_count(4)) == (4, 4)


def test_limits_are_read_off_a_choice() -> None:
    choice = [
        ("max_concurrency", 4),
        ("engine_options.max_num_seqs", 6),
        ("engine_options.max_num_batched_tokens", 512),
    ]
    assert (places_of(choice, 16), budget_of(choice)) == (6, 512)
    assert (places_of([], 16), budget_of([])) == (16, None)


def test_a_choice_reads_in_a_line_and_can_be_a_key() -> None:
    stored: list[list[Any]] = [
        ["engine_options.max_num_seqs", 8],
        ["speculation", {"method": "ngram"}],
        ["quantization", {}],
    ]
    choice = frozen_choice(stored)
    assert choice_text(choice) == "max_num_seqs=8, speculation=ngram, quantization=none"
    assert {choice: 1}[frozen_choice(stored)] == 1
    assert choice_text(()) == "as it is"
