"""Odd values, and every place of a request that takes one: what `test_odd_values.py` walks."""

import json
import re
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any
from urllib.parse import quote

import pytest
from django.db import transaction
from django.http import QueryDict
from django.utils.datastructures import MultiValueDict

from tests.controlplane.api.client import resolved

LONG = 20_000
ODD_TEXTS = {
    "empty": "",
    "NUL": "%00",
    "NUL inside": "a%00b",
    "no UTF-8": "%ff",
    "half a surrogate": "%ed%a0%80",
    "right to left": quote("\u202egnp\u2066\u0301\U0001f4a9"),
    "line feed": "a%0d%0ab",
    "long": LONG * "x",
    "long number": 5000 * "9",
    "beyond 64 bits": str(2**63),
    "negative": "-1",
    "too large": "1e400",
    "no number": "nan",
    "list": "[]",
    "object": quote('{"a":1}'),
    "null": "null",
    "last date": "9999-12-31T23:59:59Z",
}
"""Texts in a path, a query or a form, percent-encoded."""
ODD_JSON = {
    "null": "null",
    "true": "true",
    "zero": "0",
    "negative": "-1",
    "fraction": "1.5",
    "beyond 64 bits": str(2**63),
    "long number": 5000 * "9",
    "too large": "1e400",
    "empty text": '""',
    "NUL": '"a\\u0000b"',
    "half a surrogate": '"\\ud800"',
    "right to left": '"\\u202egnp\\u2066\\u0301"',
    "text": '"text"',
    "long text": f'"{LONG * "x"}"',
    "empty list": "[]",
    "list": '["a"]',
    "list of objects": '[{"a": 1}]',
    "empty object": "{}",
    "object": '{"a": 1}',
    "NUL in a name": '{"\\u0000": 1}',
    "nested objects": 1000 * '{"a":' + "1" + 1000 * "}",
    "nested lists": 1000 * "[" + 1000 * "]",
    "one name twice": '{"a": 1, "a": 2}',
}
"""In the place of a value of a JSON body."""
ODD_BODIES = {"million letters": f'"{1_000_000 * "x"}"', "no JSON": "{", "nothing": "", "no UTF-8": "\udcff"}
FORM = "application/x-www-form-urlencoded"
HOLE = "the odd value"

Place = tuple[str | int, ...]


class Walk:
    """Sends requests whose effects are taken back, and keeps those that were answered wrongly. `each`: how many odd
    values each place gets; the next place gets the next ones."""

    def __init__(self, client: Any, each: int) -> None:
        self._client, self._each = client, each
        client.raise_request_exception = False
        self._turns = {id(values): cycle(values.items()) for values in (ODD_TEXTS, ODD_JSON, ODD_BODIES)}
        self.wrong: list[str] = []

    def odd(self, values: dict[str, str]) -> Iterator[tuple[str, str]]:
        """The next of these values, or all of them."""
        return islice(self._turns[id(values)], min(self._each, len(values)))

    def texts(self, what: str, method: str, path: str, read: list[str], kind: str = "") -> None:
        """Send odd texts as each of the parameters that a view reads."""
        for parameter in read:
            for name, odd in self.odd(ODD_TEXTS):
                pair = f"{parameter}={odd}&{parameter}={odd}"
                if kind == FORM:
                    self.send(f"{what}: {name} as {parameter}", method, path, pair, FORM)
                else:
                    self.send(f"{what}: {name} as {parameter}", method, f"{path}?{pair}")

    def bodies(self, method: str, path: str, body: Any) -> None:
        """Send odd values in every place of a body."""
        for name, odd in self.odd(ODD_BODIES):
            self.send(name, method, path, odd)
        for place in places(body):
            for name, odd in self.odd(ODD_JSON):
                self.send(f"{name} at {place}", method, path, with_odd(body, place, odd))

    def send(self, what: str, method: str, path: str, body: str = "", kind: str = "application/json") -> Any:
        whole = transaction.atomic()
        whole._from_testcase = True  # type: ignore[attr-defined]  # as the transaction around a test: views see none
        with whole:
            answer = self._client.generic(method, path, body.encode("utf-8", "surrogateescape"), content_type=kind)
            transaction.set_rollback(True)
        if answer.status_code >= 500 or not is_in_dialect(answer, path):
            said = "" if answer.streaming else answer.content[:300].decode()
            self.wrong.append(f"{what}: {method} {path[:120]} {body[:200]} -> {answer.status_code} {said}")
        return answer

    def names_read(self, method: str, path: str, body: str = "", kind: str = FORM) -> list[str]:
        """The parameters of the query or the form that a view reads."""
        read: dict[str, None] = {}

        def noting(plain: Any) -> Any:
            def note(of: Any, name: Any, *arguments: Any, **named: Any) -> Any:
                if isinstance(of, QueryDict) and isinstance(name, str):
                    read[name] = None
                return plain(of, name, *arguments, **named)

            return note

        with pytest.MonkeyPatch.context() as patch:
            for name in ("get", "getlist", "__getitem__"):
                patch.setattr(MultiValueDict, name, noting(getattr(MultiValueDict, name)))
            self.send("nothing odd", method, path, body, kind)
        return [name for name in read if name != "csrfmiddlewaretoken"]


def is_in_dialect(answer: Any, path: str) -> bool:
    """Whether a refusal is in the form of its route."""
    if answer.status_code < 400:
        return True
    kind = str(answer["Content-Type"]).partition(";")[0]
    if path.startswith("/api/"):
        return kind == "application/problem+json" and bool(answer.json()["status"] == answer.status_code)
    if path.startswith("/v1/"):
        return kind == "application/json" and is_openai_error(answer.json())
    if path.startswith("/agents/"):
        return kind == "application/json"
    return kind == ("application/json" if path.startswith(("/playground/say/", "/playground/code/")) else "text/html")


def is_openai_error(shown: Any) -> bool:
    error = shown["error"]
    return error.keys() == {"message", "type", "param", "code"} and isinstance(error["code"], str | None)


def places(value: Any, above: Place = ()) -> Iterator[Place]:
    """Every place in a value of JSON, the whole included."""
    yield above
    if isinstance(value, dict | list):
        parts: Any = value.items() if isinstance(value, dict) else enumerate(value)
        for name, part in parts:
            yield from places(part, (*above, name))


def with_odd(value: Any, place: Place, odd: str) -> str:
    """The text of the value, with another text in one place."""
    return json.dumps(_replaced(value, place)).replace(json.dumps(HOLE), odd)


def _replaced(value: Any, place: Place) -> Any:
    if not place:
        return HOLE
    copy = value.copy()
    copy[place[0]] = _replaced(value[place[0]], place[1:])
    return copy


def bodies_of(operation: dict[str, Any]) -> list[Any]:
    """The examples of an operation of the OpenAPI document, with every member that its schema names. None of one that
    takes bytes."""
    content = operation["requestBody"]["content"].get("application/json")
    if content is None:
        return []
    whole = _sample(content["schema"])
    return [_merged(example["value"], whole) for example in content.get("examples", {}).values()] or [whole]


def _sample(schema: dict[str, Any], depth: int = 0) -> Any:
    schema = resolved(schema)
    for choices in ("oneOf", "anyOf", "allOf"):
        if choices in schema:
            return _sample(schema[choices][0], depth)
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type")
    match next((one for one in kind if one != "null"), None) if isinstance(kind, list) else kind:
        case "object":
            named = schema.get("properties", {}) if depth < 6 else {}
            return {name: _sample(part, depth + 1) for name, part in named.items()}
        case "array":
            return [_sample(schema["items"], depth + 1)]
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return True
    return {"date-time": "2027-01-01T00:00:00Z", "uri": "https://a.example"}.get(schema.get("format", ""), "x")


def _merged(known: Any, more: Any) -> Any:
    if isinstance(known, dict) and isinstance(more, dict):
        return {**more, **{name: _merged(part, more.get(name)) for name, part in known.items()}}
    return known


def filled(path: str, known: dict[str, str]) -> str:
    """A path of the document with its parameters."""
    return re.sub(r"{(\w+)}", lambda name: known.get(name[1], "x"), path)
