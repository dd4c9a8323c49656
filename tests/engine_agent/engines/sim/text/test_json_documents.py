"""Documents that satisfy a schema, judged by another's validator."""

import random
import time
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_agent.engines.sim.text.json_documents import write_document
from engine_agent.engines.sim.text.json_schemas import SchemaDocument, SchemaError

NAMES = st.sampled_from(["city", "days", "unit", "tags", "next"])
SCALARS = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.builds(
        lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
        st.integers(-9, 9),
        st.integers(0, 9),
    ),
    st.builds(lambda low: {"type": "number", "exclusiveMinimum": low}, st.floats(-1e6, 1e6)),
    st.builds(lambda step: {"type": "integer", "multipleOf": step}, st.integers(1, 7)),
    st.builds(
        lambda low, span: {"type": "string", "minLength": low, "maxLength": low + span},
        st.integers(0, 30),
        st.integers(0, 9),
    ),
    st.sampled_from(
        [
            {"type": "string", "pattern": pattern}
            for pattern in ("^[A-Z]{2}-\\d{3,5}$", "(red|green)+", "^a?b*c+.$", "[^0-9]\\.x", "^(?:\\w{2}|\\s)$")
        ]
    ),
    st.builds(lambda values: {"enum": values}, st.lists(st.one_of(st.integers(), st.text(), st.none()), min_size=1)),
    st.builds(lambda value: {"const": value}, st.one_of(st.booleans(), st.text(), st.lists(st.integers()))),
    st.sampled_from(
        [{}, True, {"minimum": 3}, {"type": ["string", "null"]}, {"type": "string", "format": "date-time"}]
    ),
)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(
            lambda items, low, span: {"type": "array", "items": items, "minItems": low, "maxItems": low + span},
            inner,
            st.integers(0, 3),
            st.integers(0, 3),
        ),
        st.builds(
            lambda first: {"type": "array", "prefixItems": first, "items": False},
            st.lists(inner, min_size=1, max_size=3),
        ),
        st.builds(
            lambda properties, required, others: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties)[:required],
                "additionalProperties": others,
            },
            st.dictionaries(NAMES, inner, max_size=4),
            st.integers(0, 4),
            st.booleans(),
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            lambda one, other: {"allOf": [{"properties": {"a": one}, "required": ["a"]}, {"properties": {"b": other}}]},
            inner,
            inner,
        ),
    )


SCHEMAS = st.recursive(SCALARS, _containers, max_leaves=8)
STRICT = settings(max_examples=200, deadline=None)


@given(SCHEMAS, st.integers(0, 1000))
@STRICT
def test_a_document_satisfies_its_schema(schema: Any, seed: int) -> None:
    document = write_document(schema, random.Random(seed))

    jsonschema.Draft202012Validator(schema).validate(document)


@given(SCHEMAS, st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.text()), st.lists, max_leaves=5))
@STRICT
def test_our_judge_is_no_milder_than_anothers(schema: Any, value: Any) -> None:
    def without_patterns(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: without_patterns(inner) for name, inner in part.items() if name != "pattern"}
        return [without_patterns(inner) for inner in part] if isinstance(part, list) else part

    is_valid = jsonschema.Draft202012Validator(without_patterns(schema)).is_valid(value)

    assert SchemaDocument(schema).satisfies(value, schema) == is_valid


TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["name", "children", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


@pytest.mark.parametrize(
    "schema",
    [
        TREE,
        {"type": "array", "items": {"type": "integer"}, "minItems": 3, "uniqueItems": True},
        {"oneOf": [{"type": "integer", "minimum": 5}, {"type": "integer", "maximum": 9}]},
        {"type": "object", "minProperties": 3, "additionalProperties": {"type": "integer"}},
        {"type": "object", "required": ["unnamed"], "additionalProperties": {"const": 1}},
        {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"type": "integer", "not": {"const": 4}, "minimum": 3, "maximum": 5},
        {"allOf": [{"$ref": "#/$defs/a"}, {"minimum": 4}], "$defs": {"a": {"type": "integer", "maximum": 4}}},
        {"if": {"type": "integer"}, "then": {"minimum": 10}, "type": "integer"},
        {"properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "allOf": [{"properties": {"a": {"enum": [2, 3]}}}]},
    ],
)
def test_schemas_that_clients_send(schema: Any) -> None:
    for seed in range(30):
        jsonschema.Draft202012Validator(schema).validate(write_document(schema, random.Random(seed)))


def test_the_same_seed_writes_the_same_document() -> None:
    documents = [write_document(TREE, random.Random(seed)) for seed in (1, 1, 2)]

    assert documents[0] == documents[1] != documents[2]


DOUBLING = {
    "$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    | {"d40": {"type": "integer"}},
    "$ref": "#/$defs/d0",
}


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        (5, "object"),
        (False, "false"),
        ({"type": "strange"}, "`type`"),
        ({"type": "string", "minLength": "3"}, "`minLength`"),
        ({"properties": []}, "`properties`"),
        ({"type": "object", "required": [3]}, "`required`"),
        ({"patternProperties": {}}, "`patternProperties` is not supported"),
        ({"type": "string", "pattern": "(?=x)"}, "not supported"),
        ({"$ref": "http://example.com"}, "out of the document"),
        ({"$ref": "#/$defs/none"}, "leads to nothing"),
        ({"$ref": "#"}, "circle"),
        ({"enum": []}, "enum"),
        ({"anyOf": []}, "anyOf"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no document"),
        ({"type": "number", "multipleOf": 0}, "multipleOf"),
        ({"type": "number", "multipleOf": 5e-324, "maximum": 1e308}, "multipleOf"),
        ({"type": "array", "minItems": 10**9}, "minItems"),
        ({"type": "string", "minLength": 10**9}, "minLength"),
        ({"type": "object", "minProperties": 10**9}, "minProperties"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no end"),
        (DOUBLING, "too large"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(schema: Any, word: str) -> None:
    with pytest.raises(SchemaError, match=word):
        write_document(schema, random.Random(1))


def test_no_schema_takes_long() -> None:
    wide = {"anyOf": [{"$ref": "#"}] * 50 + [{"type": "array", "items": {"$ref": "#"}, "minItems": 9}]}
    begun = time.process_time()

    with pytest.raises(SchemaError):
        write_document(wide, random.Random(1))

    assert time.process_time() - begun < 30
