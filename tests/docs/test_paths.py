"""Files, modules and pages that documentation and code name exist."""

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from bench.__main__ import benches
from tests.docs.pages import INLINE_CODE, ROOT, code_of, our_markdown, text_of
from tests.docs.test_links import anchors

pytestmark = pytest.mark.processes

PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*/?")
TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
MODULE = re.compile(r"[a-z]\w*(?:\.\w+){2,}")
RUN_MODULE = re.compile(r"(?:python3?|PYTHON\)?) -m ([a-z_][\w.]*)")
RUN_BENCH = re.compile(r"-m bench ([a-z0-9_]+)")
RUN_FILE = re.compile(r"(?:python3?|pytest) ((?:bench|controlplane|tests)/[\w/]+\.py)")
PAGE = re.compile(r"\bdocs/[\w/.-]+\.md\b(?:#[\w-]+)?")


@cache
def tracked() -> tuple[str, ...]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(listed.stdout.splitlines())


@cache
def top_level() -> set[str]:
    """Returns the top-level folders; a path that begins with one of them is a path of the repository."""
    return {name.partition("/")[0] for name in tracked() if "/" in name}


def named_paths(page: Path) -> Iterator[str]:
    for code in INLINE_CODE.findall(text_of(page)):
        path = code.partition("::")[0]
        if "/" in path and PATH.fullmatch(path) and path.partition("/")[0] in top_level() and "NAME" not in path:
            yield path


def named_tests(page: Path) -> Iterator[tuple[str, str]]:
    for code in INLINE_CODE.findall(text_of(page)):
        if test := TEST.fullmatch(code):
            yield test[1], test[2]


def named_modules(page: Path) -> Iterator[str]:
    """Yields modules such as `fleet.reconcile.planning.planner`, or names in them; two parts might be the name of an
    event."""
    for code in INLINE_CODE.findall(text_of(page)):
        if MODULE.fullmatch(code) and code.partition(".")[0] in top_level():
            yield code


def named_in_commands(page: Path) -> Iterator[str]:
    """Yields the modules and files that commands run: `python -m simulator`, `pytest tests/…`."""
    for line in code_of(page):
        yield from (name for name in RUN_MODULE.findall(line) if name.partition(".")[0] in top_level())
        yield from RUN_FILE.findall(line)


def is_module(dotted: str) -> bool:
    *parts, last = dotted.split(".")
    whole, file = ROOT.joinpath(*parts, last), ROOT.joinpath(*parts).with_suffix(".py")
    if whole.is_dir() or whole.with_suffix(".py").exists():
        return True
    return file.exists() and bool(re.search(rf"\b{last}\b", text_of(file)))


def missing_of(page: Path) -> Iterator[str]:
    """Yields the paths, modules and tests that a page names and the checkout lacks."""
    yield from (path for path in named_paths(page) if not (ROOT / path).exists())
    yield from (module for module in named_modules(page) if not is_module(module))
    yield from (
        f"{file}::{test}"
        for file, test in named_tests(page)
        if (ROOT / file).exists() and not re.search(rf"def {test}\b", text_of(file))
    )


def heading_exists(page: str) -> bool:
    """Whether the checkout holds a page and, if an anchor follows its name, a heading with that anchor."""
    name, _, anchor = page.partition("#")
    return (ROOT / name).exists() and (not anchor or anchor in anchors(ROOT / name))


def test_every_named_file_and_module_exists() -> None:
    gone = {str(page.relative_to(ROOT)): missing for page in our_markdown() if (missing := [*missing_of(page)])}
    assert not gone, f"pages name what does not exist (moved, renamed?): {gone}"


def test_every_command_runs_what_exists() -> None:
    gone = {
        str(page.relative_to(ROOT)): missing
        for page in our_markdown()
        if (missing := [n for n in named_in_commands(page) if not (ROOT / n).exists() and not is_module(n)])
    }
    assert not gone, f"commands of pages run what does not exist (moved, renamed?): {gone}"


def test_every_bench_that_is_named_exists() -> None:
    gone = {
        (name, bench)
        for name in tracked()
        if Path(name).suffix in {".py", ".md"} or name == "Makefile"
        if (ROOT / name).exists()
        for bench in RUN_BENCH.findall(text_of(name))
        if bench not in benches()
    }
    assert not gone, sorted(gone)


def test_every_page_that_the_code_names_exists() -> None:
    code = [
        name for name in tracked() if Path(name).suffix in {".py", ".html", ".toml", ".yml", ".yaml", ".txt", ".cfg"}
    ]
    gone = {
        f"{name} names {page}"
        for name in [*code, "Makefile"]
        if (ROOT / name).exists()
        for page in PAGE.findall(text_of(name))
        if not heading_exists(page)
    }
    assert not gone, sorted(gone)


def test_the_index_of_the_design_lists_every_page() -> None:
    pages = {path.name for path in (ROOT / "docs/design").glob("*.md")} - {"README.md"}
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", text_of("docs/design/README.md"))) == pages
