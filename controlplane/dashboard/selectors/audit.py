"""Audit records as the page shows them: in pages by number, each with what changed in words."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from audit.models import AuditRecord, Outcome
from audit.selectors import AuditQuery, audit_records
from kernel.tones import Tone

RECORDS_PER_PAGE = 50
TONES = {Outcome.DONE: Tone.OK, Outcome.DENIED: Tone.BAD}
LONGEST_VALUE = 120
PAGES = frozenset({"cell", "node", "deployment", "rollout", "incident", "key"})
"""Nouns whose pages are called like them and take the key."""


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One record. `page` is the name of its object's page, "" if it has none; `lines` say what changed."""

    record: AuditRecord
    tone: Tone
    page: str
    key: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AuditList:
    """`older` is the cursor of the next page, None at the end."""

    rows: tuple[AuditRow, ...]
    older: int | None
    filtered: bool


def audit_list(query: AuditQuery, limit: int = RECORDS_PER_PAGE) -> AuditList:
    fetched = list(audit_records(query)[: limit + 1])
    narrowed = any((query.actor, query.action, query.object, query.outcome, query.request_id))
    older = fetched[limit - 1].number if len(fetched) > limit else None
    return AuditList(tuple(_row(record) for record in fetched[:limit]), older, narrowed)


def _row(record: AuditRecord) -> AuditRow:
    noun, _, key = record.object.partition("/")
    return AuditRow(
        record=record,
        tone=TONES[Outcome(record.outcome)],
        page=noun if noun in PAGES and key and "/" not in key else "",
        key=key,
        lines=tuple(_lines(json.loads(record.changes))),
    )


def _lines(changes: dict[str, Any]) -> Iterator[str]:
    for row in _entries(changes.get("rows")):
        name = f"{row.get('table', '')} {row.get('key', '')}".strip()
        columns = row.get("changed") or row.get("was")
        if not isinstance(columns, dict):
            yield f"{name}: {row.get('did', 'changed')}"
            continue
        for column, value in columns.items():
            if "changed" in row and isinstance(value, list) and len(value) == 2:
                yield f"{name}: {column} {_short(value[0])} → {_short(value[1])}"
            else:
                yield f"{name}: {column} was {_short(value)}"
    for event in _entries(changes.get("events")):
        yield str(event.get("message", ""))
    if isinstance(body := changes.get("asked"), dict):
        yield from (f"request {name} = {_short(value)}" for name, value in body.items())


def _entries(part: Any) -> list[dict[str, Any]]:
    return [entry for entry in part if isinstance(entry, dict)] if isinstance(part, list) else []


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"
