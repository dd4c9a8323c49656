"""How examples follow from schemas: what a field states comes first, then its schema, then the common words."""

from typing import Any

import pytest
from rest_framework import serializers

from controlplane.api.examples import COMMON, JSON, STATED, example_of, with_examples

ITEM = {"type": "object", "properties": {"region": {"type": "string"}, "rank": {"type": "integer"}}}
SENT = {
    "type": "object",
    "required": ["region"],
    "properties": {"region": {"type": "string"}, "rank": {"type": "integer"}, "note": {"type": "string"}},
}


@pytest.mark.parametrize(
    ("name", "schema", "shown"),
    [
        ("region", {"type": "string"}, "us-east-1"),
        ("region", {"type": "integer"}, 3),
        ("region", {"enum": ["north", "south"], "type": "string"}, "north"),
        ("mode", {"enum": ["", "real"], "type": "string"}, "real"),
        ("mode", {"type": "string", "default": "drill"}, "drill"),
        ("colour", {"type": "string"}, "colour"),
        ("seen_at", {"type": ["string", "null"], "format": "date-time"}, "2026-11-21T12:00:00Z"),
        ("ended_at", {"type": ["string", "null"], "format": "date-time"}, None),
        ("share", {"type": "number", "maximum": 0.2}, 0.2),
        ("most", {"type": "integer", "minimum": 100}, 100),
        ("wait_ms", {"type": "number"}, 48),
        ("bill_usd", {"type": "string"}, "1.500000"),
        ("regions", {"type": "array", "items": {"type": "string"}}, ["us-east-1"]),
        ("load", {"type": "object", "additionalProperties": {"type": "number"}}, {"us-east-1": 0.5}),
        ("anything", {"type": "object", "additionalProperties": {}}, {}),
        ("shares", {"type": "object", "additionalProperties": {"type": "string"}}, {"us-east-1": "shares"}),
        ("item", {"$ref": "#/components/schemas/Item"}, {"region": "us-east-1", "rank": 0}),
        (
            "item",
            {"oneOf": [{"$ref": "#/components/schemas/Item"}, {"type": "null"}]},
            {"region": "us-east-1", "rank": 0},
        ),
    ],
)
def test_a_value_follows_from_name_and_schema(name: str, schema: dict[str, Any], shown: Any) -> None:
    assert example_of(schema, {"Item": ITEM}, name=name) == shown


def test_a_request_shows_what_is_required_or_stated() -> None:
    assert example_of(SENT, {}, sent=True) == {"region": "us-east-1"}
    assert example_of({**SENT, STATED: {"note": "n"}}, {}, sent=True) == {"region": "us-east-1", "note": "n"}
    assert example_of({**SENT, "required": []}, {}, sent=True) == {"region": "us-east-1", "rank": 0, "note": "note"}


def test_an_example_that_an_operation_states_stays() -> None:
    body = {"content": {JSON: {"schema": ITEM, "example": {"region": "mars"}}}}
    operation: dict[str, Any] = {"responses": {"200": {"content": {JSON: {"schema": ITEM}}}}, "requestBody": body}
    document = {"paths": {"/x": {"post": operation}}, "components": {"schemas": {"Item": {**ITEM, STATED: {}}}}}
    with_examples(document, None, None, public=True)
    assert operation["requestBody"]["content"][JSON]["example"] == {"region": "mars"}
    assert operation["responses"]["200"]["content"][JSON]["example"] == {"region": "us-east-1", "rank": 0}
    assert document["components"]["schemas"] == {"Item": ITEM}


def test_a_serializer_shows_what_it_and_those_it_inherits_state() -> None:
    from controlplane.api.auto_schema import stated_examples

    class Base(serializers.Serializer[Any]):
        class Meta:
            examples = {"a": 1, "b": 2}

    class Derived(Base):
        class Meta:
            examples = {"b": 3}

    assert stated_examples(Derived()) == {"a": 1, "b": 3}


def test_common_words_are_in_their_order() -> None:
    assert list(COMMON) == sorted(COMMON)
