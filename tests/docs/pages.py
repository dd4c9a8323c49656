"""Reads the Markdown files of the checkout and the code in them, for the tests of documentation."""

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^(?: {4}|\t).*$", re.MULTILINE)
INLINE_CODE = re.compile(r"`([^`\n]*)`")


@cache
def our_markdown() -> tuple[Path, ...]:
    """Returns the Markdown files of the repository. Hidden folders contain only installed packages."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return tuple(sorted({*ROOT.glob("*.md"), *(file for folder in folders for file in folder.rglob("*.md"))}))


@cache
def text_of(path: str | Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def section(path: str, heading: str) -> str:
    """Returns the text under a heading, up to the next one of the same depth."""
    depth = heading.split(" ", maxsplit=1)[0]
    after = text_of(path).partition(f"\n{heading}\n")[2]
    assert after, f"{path} has no heading {heading!r}"
    return re.split(rf"\n{depth} ", after)[0]


@cache
def operators_pages() -> str:
    """Returns the text of all pages for users, that is, all except those on design and results."""
    internal = ("docs/design", "docs/bench")
    pages = (page for page in our_markdown() if not page.relative_to(ROOT).as_posix().startswith(internal))
    return "\n".join([*map(text_of, pages), text_of("docs/bench/README.md")])


def code_of(path: Path) -> list[str]:
    """Returns every `inline code`, and every line of a block of code."""
    text = text_of(path)
    blocks = [*FENCED.findall(text), *INDENTED.findall(FENCED.sub("", text))]
    return [*INLINE_CODE.findall(text), *(line for block in blocks for line in block.splitlines())]
