"""Documents that satisfy a schema and texts that match an expression."""

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from engine_agent.engines.sim.planning.constrained import UnsupportedSchema, matching_text, write_document

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
SCHEMAS: list[Any] = [
    TREE,
    True,
    {"type": "string", "minLength": 30, "maxLength": 40},
    {"type": "string", "maxLength": 0},
    {"type": "string", "pattern": "^[A-Z]{2}-\\d{3,5}$"},
    {"type": "string", "format": "date-time"},
    {"type": ["string", "null"]},
    {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 4},
    {"type": "array", "prefixItems": [{"const": 1}, {"enum": ["a", None]}], "items": False, "minItems": 2},
    {"oneOf": [{"type": "integer", "minimum": 5, "maximum": 7}, {"type": "integer", "maximum": 3}]},
    {"type": "object", "minProperties": 3, "additionalProperties": {"type": "integer"}},
    {"type": "object", "required": ["unnamed"], "additionalProperties": {"const": 1}},
    {"allOf": [{"$ref": "#/$defs/a"}, {"minimum": 4}], "$defs": {"a": {"type": "integer", "maximum": 4}}},
    {"type": "object", "allOf": [{"properties": {name: {"type": "null"}}, "required": [name]} for name in "ab"]},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_a_document_satisfies_its_schema(schema: Any) -> None:
    for seed in range(20):
        document = json.loads(write_document(schema, random.Random(seed)))
        jsonschema.Draft202012Validator(schema).validate(document)


def test_the_seed_alone_decides_which() -> None:
    documents = [write_document(TREE, random.Random(seed)) for seed in (1, 1, 2)]

    assert documents[0] == documents[1] != documents[2]


def test_an_object_has_no_property_that_its_schema_does_not_name() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}

    documents = [json.loads(write_document(schema, random.Random(seed))) for seed in range(30)]

    assert {frozenset(document) for document in documents} == {
        frozenset(), frozenset({"city"}), frozenset({"days"}), frozenset({"city", "days"}),
    }  # fmt: skip


def _chain(length: int) -> dict[str, Any]:
    links = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(length)}
    return {"$defs": {**links, f"d{length}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def _doubled(depth: int) -> dict[str, Any]:
    """A small schema of a document with 2 to the power of `depth` values."""
    levels: dict[str, Any] = {f"d{index}": {"type": "array", "items": {"$ref": f"#/$defs/d{index + 1}"},
                                            "minItems": 2} for index in range(depth)}  # fmt: skip
    return {"$defs": {**levels, f"d{depth}": {"const": 1}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (5, "a JSON schema is an object"),
        (False, "Unsatisfiable"),
        ({"type": "strange"}, "strange"),
        ({"type": "string", "minLength": "3"}, "minLength"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "pattern": "(?=x)"}, "look-around"),
        ({"$ref": "http://example.com"}, r"example\.com"),
        ({"$ref": "#"}, "."),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "Unsatisfiable"),
        # Each of these costs llguidance gigabytes, minutes or the process.
        (_chain(5000), "at most 400 objects"),
        (_doubled(40), "2000 steps"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "2000 steps"),
        ({"type": "array", "minItems": 10**9}, "2000 steps"),
        ({"type": "string", "pattern": "^a*$", "minLength": 10**9}, "`minLength`"),
        ({"type": "string", "pattern": "((((a{60}){60}){60}){60}){60}"}, "too large"),
        ({"patternProperties": {"(a{999}){999}": True}}, "too large"),
        ({"type": "integer", "multipleOf": 999983}, "`multipleOf`"),
        ({"anyOf": [{"multipleOf": 997}, {"multipleOf": 991}, {"multipleOf": 0}]}, "`multipleOf`"),
        ({"enum": list(range(6000))}, "16384 bytes"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_satisfied_cheaply_is_rejected_with_the_reason(schema: Any, reason: str) -> None:
    with pytest.raises(UnsupportedSchema, match=reason):
        write_document(schema, random.Random(1))


LITERALS = st.sampled_from(
    ["a", "-", "\\.", "\\d", "\\w", "\\s", "\\S", ".", "[a-f0-9_]", "[^a-z]", '"']
)  # fmt: skip
REPEATS = st.sampled_from(["", "*", "+", "?", "{2}", "{1,3}", "{2,}", "+?"])


def _joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("".join, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda parts, more: f"({'|'.join(parts)}){more}", st.lists(inner, min_size=1, max_size=3), REPEATS),
    )


PATTERNS = st.recursive(st.builds(lambda one, more: f"{one}{more}", LITERALS, REPEATS), _joined, max_leaves=6)


@given(PATTERNS, st.integers(0, 100))
def test_a_text_matches_its_expression_as_a_whole(pattern: str, seed: int) -> None:
    try:
        text = matching_text(pattern, random.Random(seed))
    except UnsupportedSchema:  # Nothing was found in time: an end that is rare among random letters.
        reject()
    assert re.fullmatch(pattern, text)


@pytest.mark.parametrize("pattern", [r"\S+@\S+\.\S+", r".*@example\.com", ".*foo.*", "(?i)é{3}", "x{1000}"])
def test_letters_without_which_an_expression_cannot_match_are_found(pattern: str) -> None:
    assert re.fullmatch(pattern, matching_text(pattern, random.Random(1)))


@pytest.mark.parametrize("pattern", ["(?=a)b", "a\\1", "\\bword", "(a", "a)", "*a", "[z-a]", "(" * 300 + ")" * 300])
def test_an_unsupported_expression_is_rejected(pattern: str) -> None:
    with pytest.raises(UnsupportedSchema):
        matching_text(pattern, random.Random(1))
