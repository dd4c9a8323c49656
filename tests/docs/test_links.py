"""Every relative link in Markdown leads to a file, and every anchor to a heading of it."""

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from tests.docs.pages import FENCED, INDENTED, INLINE_CODE, ROOT, our_markdown, text_of

LINK = re.compile(r"\]\(\s*<?([^)\s>]+)")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
EXTERNAL = re.compile(r"[a-z][a-z0-9+.-]*:|//", re.IGNORECASE)


def slug(heading: str) -> str:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    """Returns the anchors that GitHub derives from the headings; a repeated one gets a number."""
    found: list[str] = []
    for heading in HEADING.findall(FENCED.sub("", text_of(path))):
        anchor = slug(heading)
        found.append(f"{anchor}-{repeated}" if (repeated := found.count(anchor)) else anchor)
    return set(found)


def links(path: Path) -> Iterator[str]:
    text = text_of(path)
    for code in (FENCED, INDENTED, INLINE_CODE):
        text = code.sub("", text)
    yield from (link for link in LINK.findall(text) if not EXTERNAL.match(link))


def broken_links(path: Path) -> Iterator[str]:
    """Yields links of a page to a missing file or heading."""
    for link in links(path):
        name, _, anchor = unquote(link).partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists():
            yield f"{link}: there is no {name}"
        elif anchor and anchor not in anchors(target):
            yield f"{link}: {name or 'the page'} has no such heading"


def test_every_link_leads_somewhere() -> None:
    broken = {str(path.relative_to(ROOT)): found for path in our_markdown() if (found := [*broken_links(path)])}
    assert not broken


def test_every_page_is_read_by_the_test() -> None:
    found = {path.relative_to(ROOT).as_posix() for path in our_markdown()}
    pages = {
        "README.md",
        "CONTRIBUTING.md",
        "docs/operate/README.md",
        "docs/architecture.md",
        "docs/runbooks/README.md",
    }
    assert pages <= found
