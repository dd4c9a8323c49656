"""Compares the size and the language of the code with the committed budget, `tests/budget.toml` (`make check`).

`python -m tests.checks.house` fails where a number exceeds the budget. With `--lower` it writes the numbers that have
shrunk; with names of files or folders it lists the sentences that the prose check finds there.
"""

import ast
import os
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from tests.checks.prose import PATTERNS, Finding, findings, tracked

ROOT = Path(__file__).resolve().parents[2]
BUDGET = ROOT / "tests/budget.toml"
GENERATED = ("engine_agent/grpc_gateway/messages/",)
SMALL = 70
"""Lines below which a file with a single importer is counted: most of those belong into that importer."""
DOCUMENTS = ("docs", "templates", "README.md", "CONTRIBUTING.md", "SECURITY.md")


def measured() -> dict[str, dict[str, int]]:
    """Returns what the checkout has, by section and name of the budget."""
    sources = [name for name in tracked() if name.endswith(".py") and not name.startswith(("tests/", *GENERATED))]
    texts = {name: (ROOT / name).read_text() for name in sources}
    return {
        "house": {
            "files": len(sources),
            "lines": sum(text.count("\n") for text in texts.values()),
            "small_files": len(small_files(texts)),
            "tables": _tables(),
        },
        "prose": dict(sorted(Counter(_folder(finding.file) for finding in _all_findings()).items())),
    }


def small_files(texts: dict[str, str]) -> list[str]:
    """Returns the modules of fewer than `SMALL` lines that exactly one other module imports.

    Args:
        texts: Source by file name, relative to the checkout.
    """
    modules = {re.sub(r"(/__init__)?\.py$", "", name).replace("/", "."): name for name in texts}
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for name, text in texts.items():
        for imported in _imports(ast.parse(text)):
            if file := modules.get(imported) or modules.get(imported.rpartition(".")[0]):
                importers[file].add(name)
    return sorted(
        name for name, text in texts.items()
        if not name.endswith("__init__.py") and "/migrations/" not in name
        and text.count("\n") < SMALL and len(importers[name] - {name}) == 1
    )  # fmt: skip


def _imports(tree: ast.Module) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _tables() -> int:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    os.environ.setdefault("SWITCHYARD_SECRET_KEY", "of-the-check-" + "x" * 50)
    import django

    django.setup()
    from django.apps import apps

    return len({model._meta.db_table for model in apps.get_models(include_auto_created=True) if model._meta.managed})


def _all_findings() -> Iterable[Finding]:
    for name in tracked():
        yield from findings(name)


def _folder(name: str) -> str:
    return "documents" if name.startswith(DOCUMENTS) else name.partition("/")[0]


def exceeded(actual: dict[str, dict[str, int]], budget: dict[str, dict[str, int]]) -> list[str]:
    """Returns a sentence for each number that exceeds its budget."""
    return [
        f"{section}.{name}: {number}, and the budget is {budget.get(section, {}).get(name, 0)}"
        for section, numbers in actual.items()
        for name, number in numbers.items()
        if number > budget.get(section, {}).get(name, 0)
    ]


def lowered(text: str, actual: dict[str, dict[str, int]]) -> str:
    """Returns the text of the budget with every number that has shrunk; reasons and other sections stay."""
    section, lines = "", []
    for line in text.splitlines(keepends=True):
        if heading := re.match(r"\[(\w+)\]", line):
            section = heading[1]
        elif (entry := re.match(r"(\w+) = (\d+)", line)) and section in actual:
            number = min(int(entry[2]), actual[section].get(entry[1], 0))
            lines.append(line.replace(entry[0], f"{entry[1]} = {number}", 1))
            continue
        lines.append(line)
    return "".join(lines)


def main(arguments: list[str]) -> int:
    """Prints what exceeds the budget, and returns 1 if anything does. With file names it prints their findings."""
    if names := [name for name in arguments if not name.startswith("-")]:
        for finding in (finding for name in tracked() if name.startswith(tuple(names)) for finding in findings(name)):
            print(f"{finding.file}:{finding.line}: {finding.pattern}: {finding.text}")
        return 0
    actual = measured()
    if "--lower" in arguments:
        BUDGET.write_text(lowered(BUDGET.read_text(), actual))
    problems = exceeded(actual, tomllib.loads(BUDGET.read_text()))
    for problem in problems:
        print(problem)
    if any(problem.startswith("prose.") for problem in problems):
        print(f"Sentences with {', '.join(PATTERNS)}: `python -m tests.checks.house FOLDER` lists them.")
    if problems:
        print("Make it smaller. A larger budget needs its reason beside the number, in tests/budget.toml.")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
