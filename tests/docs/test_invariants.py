"""The table of invariants names a test for each of them, and that test exists."""

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.docs.pages import ROOT, section, text_of

ROW = re.compile(r"^\| (I\d+) \|.*\|(.*)\|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
ROWS = dict(ROW.findall(section("docs/architecture.md", "## Invariants")))


@cache
def functions_of(path: str) -> set[str]:
    """Names of the test functions of a file, which is not imported."""
    tree = ast.parse(text_of(path))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_invariant_has_a_row() -> None:
    assert list(ROWS) == [f"I{number}" for number in range(1, 17)], "one row each, in order, in docs/architecture.md"


def broken_references(invariant: str) -> Iterator[str]:
    """What is wrong with the tests that a row names."""
    named = TEST.findall(ROWS[invariant])
    if not named:
        yield f"name a test that fails when {invariant} no longer holds (`tests/….py::test_…`)"
    for path, name in named:
        if not (ROOT / path).exists():
            yield f"{invariant}: there is no {path}; name the test where it is now"
        elif name and name not in functions_of(path):
            yield f"{invariant}: {path} has no {name}; give the row its new name"


def test_tests_of_invariants_exist() -> None:
    assert not [broken for invariant in ROWS for broken in broken_references(invariant)]
