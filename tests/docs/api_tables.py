"""The tables of docs/api-applications.md, generated from those of the ingress and the cell proxy. `python -m
tests.docs.api_tables docs/api-applications.md` updates them; a test compares them."""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from engine_agent.protocol.api_surface import (
    API_PATHS,
    LOADING_PATHS,
    LOADING_REFUSED,
    AnsweredBy,
    ApiPath,
    Counting,
    ErrorForm,
)
from engine_agent.protocol.request_checks import REQUEST_MEMBERS, MemberRule, RequestMember
from engine_agent.protocol.request_limits import DEFAULT_LIMITS, LIMIT_ROWS

_PART = re.compile(r"(<!-- begin ([a-z]+) -->\n\n)[^<]*(\n<!-- end [a-z]+ -->)")


def with_tables(page: str) -> str:
    """Returns the page with current tables.

    Raises:
        ValueError: the page lacks the place of a table.
    """
    tables = {"cells": _cells(), "limits": _limits(), "members": _members(), "others": _others(), "refused": _refused()}
    places = [name for _, name, _ in _PART.findall(page)]
    if sorted(places) != sorted(tables):
        raise ValueError(f"the page needs a place for each of {', '.join(tables)}, once, and has {', '.join(places)}")
    return _PART.sub(lambda part: part[1] + tables[part[2]] + part[3], page)


def _cells() -> str:
    rows = (row for row in API_PATHS if row.answered_by is AnsweredBy.CELL)
    return _table(("path", "what", "streams", "class", "tokens", "errors", "engines"), map(_cell, rows))


def _cell(row: ApiPath) -> tuple[str, ...]:
    return (
        f"`{', '.join(row.methods)} {row.path}`",
        row.what,
        "yes" if row.streams else "",
        "yes" if row.counting is not Counting.NOTHING else "",
        row.counting.value,
        "Anthropic's" if row.errors is ErrorForm.ANTHROPIC else "OpenAI's",
        ", ".join(row.engines),
    )


def _others() -> str:
    rows = (row for row in API_PATHS if row.answered_by is not AnsweredBy.CELL)
    cells = ((f"`{', '.join(row.methods)} {row.path}`", row.what, row.answered_by.value) for row in rows)
    return _table(("path", "what", "who answers"), cells)


def _refused() -> str:
    paths = ", ".join(f"`{path}`" for path in LOADING_PATHS)
    return _table(("path", "why it is refused"), [(paths, LOADING_REFUSED)])


def _members() -> str:
    order = list(MemberRule)
    members: Iterable[RequestMember] = sorted(REQUEST_MEMBERS, key=lambda member: order.index(member.rule))
    cells = ((f"`{member.name}`", member.rule.value, member.why) for member in members)
    return _table(("member", "what becomes of it", "because it"), cells)


def _limits() -> str:
    cells = ((f"`{row.name}`", f"{getattr(DEFAULT_LIMITS, row.name):,}", row.counts, row.why) for row in LIMIT_ROWS)
    return _table(("limit", "default", "what counts", "because"), cells)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ("---",) * len(head), *rows))


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
