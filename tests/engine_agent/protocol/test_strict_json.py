"""JSON of untrusted senders has one meaning, or is rejected."""

import ast
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.protocol.strict_json import strict_loads

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a":1,"a":1}', "the member 'a' is there twice"),
        ('{"a":1,"\\u0061":2}', "the member 'a' is there twice"),
        ('[{"x":{"b":1,"c":2,"b":3}}]', "the member 'b' is there twice"),
        ("[NaN]", "NaN is not a JSON number"),
        ("-Infinity", "-Infinity is not a JSON number"),
        ("1e999", "the number 1e999 is too large"),
        ("9" * 5000, "has more than 64 bits"),
        (str(2**63), "has more than 64 bits"),
        (f'{{"a":[-{2**63 + 1}]}}', "has more than 64 bits"),
        ("[" * 65 + "]" * 65, "nested deeper than 64 levels"),
        ('{"a":' * 100_000, "nested deeper than 64 levels"),
        ("[" + "{}," * 50_000 + "{}]", "more than 50000 objects and lists"),
        ("[" + "1," * 1_000_000 + "1]", "more than 1000000 values"),
        ('{"' + "n" * 1025 + '":1}', "a name of more than 1024 characters"),
        ('{"x":[{"a\\u0000b":1}]}', "has a NUL in its name"),
        ('["\\ud800"]', "half of a surrogate pair"),
        ('{"\\uDC00":1}', "half of a surrogate pair"),
        ('["\ud800"]', "half of a surrogate pair"),
        ('{"a"', "Expecting"),
        ("{} {}", "Extra data"),
    ],
)
def test_what_has_no_one_meaning_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        strict_loads(text)


def test_text_of_any_length_is_no_structure() -> None:
    text = "[{" * 100_000 + "\\" + '"\0\U0001f600'
    assert strict_loads(json.dumps({"messages": [{"content": text}]})) == {"messages": [{"content": text}]}


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text(st.characters(codec="utf-8", exclude_characters="\0")), inner, max_size=3)
        ),
        max_leaves=20,
    )
)
def test_everything_else_is_what_it_is(value: object) -> None:
    assert strict_loads(json.dumps(value)) == value


TRUSTED = {
    "accounts/services/identity_provider.py": "sealed by ourselves",
    "accounts/one_time_codes.py": "sealed by ourselves",
    "audit/row_capture.py": "our own triggers wrote it",
    "audit/services.py": "our own export, whose chain of hashes is verified",
    "kernel/loop_worker.py": "our own processes wrote it",
    "controlplane/api/audit.py": "our own records",
    "controlplane/chat_stream.py": "an answer of our own cells, shown and never acted on",
    "controlplane/cli/commands/bench_search.py": "values of one's own command line; the server judges the whole again",
    "controlplane/cli/commands/engine.py": "one's own build; the server judges the whole again",
    "controlplane/cli/commands/speculation.py": "one's own file; the server judges the whole again",
    "controlplane/cli/commands/rows.py": "a value of one's own command line; the server judges the whole again",
    "controlplane/cli/schema.py": "our own file, or what our own code printed",
    "controlplane/cli/commands/rollouts.py": "a value of one's own command line; the server judges the whole again",
    "controlplane/cli/profiles.py": "one's own file",
    "controlplane/cli/server_target.py": "our own file",
    "controlplane/dashboard/charts.py": "encoded by ourselves a line before",
    "controlplane/dashboard/playground.py": "an answer of our own ingress, shown and never acted on",
    "controlplane/dashboard/events.py": "our own records",
    "controlplane/embedded": "files and programs of this host's own account",
    "controlplane/settings.py": "what our own launcher wrote",
    "engine_agent/engines": "files and ranks of one cell: one reader on both sides",
    "engine_agent/node/enrolment.py": "an answer of the control plane",
    "engine_agent/node/telemetry": "programs of this host",
    "engine_agent/protocol/fingerprint.py": "a digest covers the text",
    "engine_agent/protocol/strict_json.py": "here it is made strict",
    "fleet/reconcile/selectors/cache.py": "columns of jsonb, which has each member once",
    "fleet/nodes/services/reports.py": "encoded by ourselves a line before",
    "fleet/webhooks/services.py": "encoded by ourselves a line before",
    "kernel/rest/view_sets.py": "our own stored answer",
    "kernel/schema_layout.py": "a comment on a table that our own migration wrote",
    "models_registry/versions/planning/diff.py": "a version that was judged when it was made",
    "traffic/async_requests/selectors.py": "an answer of our own cells, shown and never acted on",
    "traffic/async_requests/services/intake.py": "encoded by ourselves a line before",
    "traffic/async_requests/services/queues.py": "sealed by ourselves",
    "traffic/responses/api.py": "an answer of our own ingress",
    "traffic/async_requests/planner.py": "an answer of our own cells",
    "traffic/batch_sinks/planner.py": "lines of result files, which we wrote",
    "traffic/batch_sinks/services/sinks.py": "sealed by ourselves",
    "traffic/batches/planning/lines.py": "validated lines, responses of our own cells, own files",
    "traffic/responses/planner.py": "an answer of our own ingress",
    "traffic/responses/selectors.py": "stored by ourselves",
    "traffic/async_requests/services/requests.py": "stored by ourselves, and an answer of our own cells",
}
"""Files that may use `json.loads`, and why their text is trusted."""


def _is_loose(node: ast.AST) -> bool:
    """Whether it calls `json.loads` or `json.load`, or makes a decoder."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="json"), attr="loads" | "load" | "JSONDecoder")):
            return True
    return False


def loose_readers() -> Iterator[str]:
    for package in (
        "accounts",
        "audit",
        "controlplane",
        "engine_agent",
        "fleet",
        "kernel",
        "models_registry",
        "traffic",
    ):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            if ("json.load" in text or "json.JSONDecoder" in text) and any(
                _is_loose(node) for node in ast.walk(ast.parse(text))
            ):
                yield path.relative_to(ROOT).as_posix()


@pytest.mark.slow
def test_whoever_reads_json_loosely_reads_no_strangers() -> None:
    readers = set(loose_readers())
    allowed = {reader for reader in readers for place in TRUSTED if reader == place or reader.startswith(f"{place}/")}
    assert readers == allowed, "use strict_loads, or say here why nobody else could have written the text"
    unused = {place for place in TRUSTED if not any(f"{reader}/".startswith(f"{place}/") for reader in readers)}
    assert not unused


@pytest.mark.parametrize("text", ['["\\\\"]' * 3, '["\\""]', '["]", "[[["]', '["a\\\\\\"[[["]'])
def test_signs_in_strings_are_no_brackets(text: str) -> None:
    with contextlib.suppress(json.JSONDecodeError):
        assert strict_loads(text, deepest=1) == json.loads(text)


@pytest.mark.parametrize("text", ['"\\"' * 200_000, "[" * 65 + '"' + '\\"' * 400_000, "[[" * 40 + "\\" * 400_001])
def test_strings_that_never_end_are_refused_in_linear_time(text: str) -> None:
    with pytest.raises(ValueError, match=r"nested|Extra data|Expecting|Unterminated"):
        strict_loads(text)
