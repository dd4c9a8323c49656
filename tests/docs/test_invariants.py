"""Each invariant in docs/architecture.md names its tests, and they exist."""

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.docs.pages import ROOT, section, text_of

TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
INVARIANTS = dict(
    re.findall(r"^### (I\d+): (.+?)(?=^### |\Z)", section("docs/architecture.md", "## Invariants"), re.M | re.S)
)


@cache
def functions_of(path: str) -> set[str]:
    """Returns the names of the test functions of a file, without importing it."""
    tree = ast.parse(text_of(path))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_invariant_has_a_section() -> None:
    wanted = [f"I{number}" for number in range(1, 17)]
    assert list(INVARIANTS) == wanted, "one section each, in order, in docs/architecture.md"


def broken_references(invariant: str) -> Iterator[str]:
    """Yields a sentence for each missing test of an invariant."""
    named = TEST.findall(INVARIANTS[invariant])
    if not named:
        yield f"name a test that fails when {invariant} is broken (`tests/….py::test_…`)"
    for path, name in named:
        if not (ROOT / path).exists():
            yield f"{invariant}: there is no {path}; name the test where it is now"
        elif name and name not in functions_of(path):
            yield f"{invariant}: {path} has no {name}; give the section its new name"


def test_tests_of_invariants_exist() -> None:
    assert not [broken for invariant in INVARIANTS for broken in broken_references(invariant)]
