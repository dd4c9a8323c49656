"""Import contract of the nouns: within and across them, `api` and pages call services, and planning stays pure.

Each noun of `fleet`, `traffic` and `models_registry` is a package whose files are named for their layer.
import-linter's
own layers compare siblings of one package; this contract compares the layer names across all nouns, and finds
circles of
files, which folders that import each other would hide.
"""

from collections.abc import Iterator
from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class NounLayers(Contract):
    """Fails where a file imports one of a higher layer of any noun, or where files import each other in a circle."""

    type_name = "noun_layers"

    packages = fields.ListField(subfield=fields.StringField())
    layers = fields.ListField(subfield=fields.StringField())
    """From the highest to the lowest; names of files or folders in a noun, those of one layer separated by `|`."""

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        layers: Any = self.layers
        ranks = {name.strip(): rank for rank, names in enumerate(reversed(layers)) for name in names.split("|")}
        edges = {module: self._imports(graph, module) for module in self._modules(graph)}
        broken = [
            (importer, imported)
            for importer, targets in edges.items()
            for imported in targets
            if _rank(importer, ranks) is not None
            and _rank(imported, ranks) is not None
            and _rank(importer, ranks) < _rank(imported, ranks)  # type: ignore[operator]
        ]
        circles = list(_circles(edges))
        return ContractCheck(kept=not broken and not circles, metadata={"broken": broken, "circles": circles})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, imported in check.metadata["broken"]:
            output.print_error(f"{importer} imports {imported}, which is of a higher layer")
        for circle in check.metadata["circles"]:
            output.print_error("files import each other in a circle: " + " -> ".join(circle))

    def _modules(self, graph: ImportGraph) -> Iterator[str]:
        packages: Any = self.packages
        return (module for module in sorted(graph.modules) if module.split(".")[0] in packages)

    def _imports(self, graph: ImportGraph, module: str) -> list[str]:
        packages: Any = self.packages
        return sorted(
            name for name in graph.find_modules_directly_imported_by(module) if name.split(".")[0] in packages
        )


def _rank(module: str, ranks: dict[str, int]) -> int | None:
    """Returns the rank of the layer that a module's path names after its package, or None if it names none."""
    return next((ranks[part] for part in module.split(".")[1:] if part in ranks), None)


def _circles(edges: dict[str, list[str]]) -> Iterator[list[str]]:
    """Yields one circle for each first back edge of a depth-first walk."""
    done: set[str] = set()
    for start, first in edges.items():
        if start in done:
            continue
        path: list[str] = []
        stack: list[tuple[str, Iterator[str]]] = [(start, iter(first))]
        path.append(start)
        while stack:
            module, targets = stack[-1]
            target = next((name for name in targets if name in edges and name not in done), None)
            if target is None:
                done.add(module)
                stack.pop()
                path.pop()
            elif target in path:
                yield [*path[path.index(target) :], target]
            else:
                path.append(target)
                stack.append((target, iter(edges[target])))
