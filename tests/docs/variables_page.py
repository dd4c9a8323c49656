"""Writes the table of the control plane's variables in docs/operate/configure.md from `controlplane/settings.py`:
`python -m tests.docs.variables_page`.

A row is a setting's variable, its default, and the docstring below the setting. A sentence "Default: …" at the end of
the docstring replaces the default of the code.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/operate/configure.md"
SETTINGS = ROOT / "controlplane/settings.py"
VARIABLE = re.compile(r"SWITCHYARD_[A-Z_]+|DATABASE_URL|REDIS_URL")
LINKS = {
    "DATABASE_URL": "install.md#a-database-with-a-standby",
    "SWITCHYARD_AGENT_URL": "install.md#more-than-one-control-host",
    "SWITCHYARD_API_READS_PER_MIN": "monitoring.md#the-rest-api",
    "SWITCHYARD_ARTIFACT_SOURCES": "models.md#model-versions",
    "SWITCHYARD_AUDIT_EXPORT": "access.md#audit",
    "SWITCHYARD_BATCH_AT_RISK": "batch.md#when-a-batch-ends-or-will-be-late",
    "SWITCHYARD_FILES": "batch.md#files-and-batches",
    "SWITCHYARD_HF_ENDPOINT": "models.md#models-by-name",
    "SWITCHYARD_HOME": "#where-files-are",
    "SWITCHYARD_LOCAL_LAYOUT": "cloud.md#layouts-follow-demand",
    "SWITCHYARD_LOG_FORMAT": "monitoring.md#correlation",
    "SWITCHYARD_METRICS_LISTEN": "monitoring.md#metrics",
    "SWITCHYARD_NODE_PORTS": "../design/agents.md#ports",
    "SWITCHYARD_OIDC_ISSUER": "access.md#single-sign-on",
    "SWITCHYARD_REQUIRE_SECOND_FACTOR": "access.md#second-factors",
    "SWITCHYARD_RESPONSES_DAYS": "batch.md#stored-responses",
    "SWITCHYARD_TRUSTED_ORIGINS": "access.md#https",
    "SWITCHYARD_TRUSTED_PROXIES": "access.md#https",
    "SWITCHYARD_USAGE_EXPORT": "money.md#usage-in-s3",
}
"""Variable -> the section that says more."""
_TABLE = re.compile(r"(?<=<!-- begin variables -->\n\n).*?(?=<!-- end variables -->)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """One variable; `default` and `meaning` are Markdown."""

    name: str
    default: str
    meaning: str


def rows(source: str) -> Iterator[Row]:
    """Yields a row for each variable that a module-level assignment reads.

    Raises:
        ValueError: An assignment reads a variable and has no docstring.
    """
    body = ast.parse(source).body
    for statement, after in pairwise([*body, ast.Pass()]):
        if not isinstance(statement, ast.Assign | ast.AnnAssign):
            continue
        match after:
            case ast.Expr(value=ast.Constant(value=str(documentation))):
                documentation = " ".join(documentation.split())
            case _:
                documentation = ""
        name, default = _read_variable(statement)
        if not name:
            named = re.match(rf"`({VARIABLE.pattern})`: (.+)", documentation)
            if not named:
                continue
            name, documentation = named[1], named[2][0].upper() + named[2][1:] if named[2][0] != "`" else named[2]
        if not documentation:
            raise ValueError(f"write a docstring below the setting of {name}")
        meaning, _, stated = documentation.partition(" Default: ")
        yield Row(name, stated or default, meaning)


def _read_variable(statement: ast.Assign | ast.AnnAssign) -> tuple[str, str]:
    """Returns the name of the variable and its default in Markdown; empty texts if there are none."""
    for node in ast.walk(statement):
        match node:
            case ast.Call(args=[ast.Constant(value=str(name)), *further]) if VARIABLE.fullmatch(name):
                match further:
                    case [ast.Constant(value=default)]:
                        text = str(int(default) if isinstance(default, bool) else default)
                        return name, f"`{text}`" if text else ""
                return name, ""
    return "", ""


def with_table(page: str, source: str) -> str:
    """Returns the page with its table as `source`, the text of the settings, states it.

    Raises:
        ValueError: The page has no place for the table.
    """
    if not _TABLE.search(page):
        raise ValueError("the page needs the lines <!-- begin variables --> and <!-- end variables -->")
    lines = ["| variable | default | meaning |", "| --- | --- | --- |"]
    for row in rows(source):
        more = f" [More]({LINKS[row.name]})." if row.name in LINKS else ""
        lines.append(f"| `{row.name}` | {row.default} | {row.meaning}{more} |".replace("|  |", "| |"))
    return _TABLE.sub(lambda _: "\n".join(lines) + "\n\n", page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), SETTINGS.read_text()))
