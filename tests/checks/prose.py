"""Finds sentences in the project's own dialect: patterns that native English would not have.

Reads docs, templates, docstrings, comments and, outside tests, the other texts in the code. Each match is reported with
the name of its pattern. Much that is hard to read has no pattern, so a file without findings may still need work.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = ("static/vendor/", "tests/scenarios/browser/vendor/", "bench/traces/", "LICENSE", "NOTICE")
LONGEST_CELL = 240
"""Characters of a table cell: two lines of a page."""

_VERBS = "|".join((
    r"mend(?:s|ed|ing)?", r"knock(?:s|ed|ing)?", r"let(?:s|ting)? go of", r"lies in", r"stands in",
    r"(?:goes|went|going|go) on(?! (?:an?|the|with)\b)", r"(?:is|are) told", r"believes?", r"hears? (?:of|from)",
    r"is missed", r"comes? to know",
))  # fmt: skip
_IS = r"\b(?:is|are|was|were|has|have|gets?|stays?|goes|needs?|must|may|can|costs?|comes?)\b"
_FILLERS = "as ever|as before|at once|in vain|for ever|lately|by itself|by themselves"
PATTERNS = {
    "clause as subject": re.compile(
        r"(?:\A|\n\s*\n|[.!:;] |[-*|#>] )(?:What|Whatever|Who|Whoever|Which) "
        rf"(?!is\b|are\b|was\b|does\b|do\b|did\b)[^.?!:;|\n]{{2,70}}{_IS}(?![^.!\n]*\?)"
    ),
    "of others, of its own": re.compile(
        r"\bof (?:others|theirs|(?:its|their|our|your|his|an) own|before|yours|ours)\b", re.IGNORECASE
    ),
    "somebody, nobody": re.compile(r"\b(?:somebody|nobody|anybody|whoever|strangers?)\b(?!')", re.IGNORECASE),
    "private verb": re.compile(rf"\b(?:{_VERBS})\b", re.IGNORECASE),
    "filler": re.compile(rf"\b(?:{_FILLERS})\b|\bbeside (?:it|them|this|the|a|each)\b|, too[.,;:)]", re.IGNORECASE),
    "riddle": re.compile(r"^(?:None|Nothing|True|False|Empty|\"\"|0): |(?<=[.] )(?:None|Nothing): ", re.MULTILINE),
}
"""What is searched for, by the name under which it is reported."""


@dataclass(frozen=True)
class Finding:
    """One match: `file` relative to the checkout, `line` from 1."""

    file: str
    line: int
    pattern: str
    text: str


def tracked() -> list[str]:
    """Returns the files that may hold prose, relative to the checkout."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    return [
        name for name in listed
        if name.endswith((".py", ".md", ".html", ".txt.j2")) and not any(part in name for part in NOT_OURS)
        and not name.startswith("tests/checks/") and (ROOT / name).is_file()
    ]  # fmt: skip


def findings(name: str) -> Iterator[Finding]:
    """Yields what one file has, by line."""
    for line, text in _prose(name):
        for pattern, regex in PATTERNS.items():
            for match in regex.finditer(text):
                yield Finding(name, line + text.count("\n", 0, match.start()), pattern, match.group().strip())
    if name.endswith(".md"):
        for number, text in enumerate((ROOT / name).read_text().splitlines(), start=1):
            if text.startswith("|") and any(len(cell.strip()) > LONGEST_CELL for cell in text.split("|")):
                yield Finding(name, number, "long table cell", text[:40])


def _prose(name: str) -> Iterator[tuple[int, str]]:
    text = (ROOT / name).read_text()
    if name.endswith(".md"):
        yield from _markdown(text)
    elif name.endswith(".py"):
        yield from _python(text, code_strings=not name.startswith("tests/"))
    else:
        blanked = re.sub(
            r"\{#.*?#\}|\{%.*?%\}|\{\{.*?\}\}|<(?:script|style).*?</(?:script|style)>|<[^>]*>",
            _blank,
            text,
            flags=re.DOTALL,
        )
        yield 1, blanked


def _markdown(text: str) -> Iterator[tuple[int, str]]:
    """Without code: blocks in fences, indented blocks and spans."""
    text = re.sub(r"^```.*?^```", _blank, text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(?: {4}|\t).*$", _blank, text, flags=re.MULTILINE)
    yield 1, re.sub(r"`[^`\n]*`", _blank, text)


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match.group())


def _python(text: str, *, code_strings: bool) -> Iterator[tuple[int, str]]:
    """Docstrings, comments and, where asked for, other strings of at least four words."""
    tree = ast.parse(text)
    documentation = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            continue
        if id(node) in documentation or (code_strings and node.value.count(" ") >= 3):
            yield node.lineno, re.sub(r"`[^`\n]*`", _blank, re.sub(r"\n +", "\n", node.value))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], re.sub(r"`[^`\n]*`", _blank, token.string.lstrip("# "))
