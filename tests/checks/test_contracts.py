"""The import contract of the nouns finds imports of higher layers and circles of files."""

from typing import Any

import pytest
from grimp import ImportGraph

from tests.checks.contracts import NounLayers

LAYERS = ["pages", "api | tasks", "services", "models", "planner | planning"]


def check(*imports: tuple[str, str]) -> dict[str, Any]:
    graph = ImportGraph()
    for importer, imported in imports:
        graph.add_import(importer=importer, imported=imported)
    options = {"packages": ["fleet"], "layers": LAYERS}
    contract = NounLayers("nouns", {"root_packages": ["fleet"]}, options)
    return dict(contract.check(graph, verbose=False).metadata)


@pytest.mark.parametrize(
    ("importer", "imported", "is_broken"),
    [
        ("fleet.cells.api", "fleet.nodes.services", False),
        ("fleet.cells.services.actions", "fleet.nodes.services.reports", False),
        ("fleet.cells.services.actions", "fleet.nodes.planning.states", False),
        ("fleet.cells.planning.plan", "fleet.nodes.models", True),
        ("fleet.cells.services", "fleet.nodes.api.requests", True),
        ("fleet.clouds.base", "fleet.cells.pages", False),
    ],
)
def test_layers_count_across_nouns(importer: str, imported: str, is_broken: bool) -> None:
    assert check((importer, imported))["broken"] == ([(importer, imported)] if is_broken else [])


def test_a_circle_of_files_is_found_across_folders() -> None:
    imports = [("fleet.a.services", "fleet.b.services"), ("fleet.b.services", "fleet.c.services")]
    assert check(*imports)["circles"] == []
    (circle,) = check(*imports, ("fleet.c.services", "fleet.a.services"))["circles"]
    assert circle[0] == circle[-1] == "fleet.a.services"


def test_nouns_may_import_each_other_through_different_files() -> None:
    imports = [("fleet.a.services", "fleet.b.models"), ("fleet.b.services", "fleet.a.models")]
    assert check(*imports) == {"broken": [], "circles": []}
