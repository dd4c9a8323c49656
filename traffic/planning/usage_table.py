"""Usage as a table for other programs: its columns, and how a cell of text reads in CSV. Pure."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Protocol

from traffic.planning.price import SHOWN
from traffic.planning.usage_query import DIMENSIONS

COUNT_COLUMNS = (
    "arrived", "limited", "failed", "refused", "requests", "errors", "cancelled", "estimated", "prompt_tokens",
    "cached_tokens", "completion_tokens",
)  # fmt: skip
AMOUNT_COLUMNS = ("charged_usd", "machine_cost_usd")
COLUMNS = ("start", *DIMENSIONS, *COUNT_COLUMNS, *AMOUNT_COLUMNS)
FORMULA_BEGINS = ("=", "+", "-", "@", "\t", "\r", "\n")
"""With these a cell begins that spreadsheets run (OWASP, "CSV Injection")."""
CSV_PIECE_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row. Dimensions that were not grouped by are empty."""

    start: datetime | None
    group: Mapping[str, str]
    counts: Mapping[str, int]
    charged: Decimal
    machine_cost: Decimal

    def cells(self) -> list[Any]:
        """In the order of `COLUMNS`."""
        return [
            time_text(self.start),
            *(self.group.get(name, "") for name in DIMENSIONS),
            *(self.counts[name] for name in COUNT_COLUMNS),
            money_text(self.charged),
            money_text(self.machine_cost),
        ]


def time_text(at: datetime | None) -> str:
    """ "2026-11-26T12:00:00Z"; empty for all of the time."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if at else ""


def money_text(amount: Decimal) -> str:
    """US dollars to the millionth: "12.340000"."""
    return f"{amount.quantize(SHOWN):f}"


def safe_text(text: str) -> str:
    """The text so that no spreadsheet takes it for a formula."""
    return f"'{text}" if text.startswith(FORMULA_BEGINS) else text


class HasCells(Protocol):
    def cells(self) -> list[Any]: ...


def csv_pieces(rows: Iterable[HasCells], columns: tuple[str, ...] = COLUMNS) -> Iterator[bytes]:
    """The table as CSV (RFC 4180), with its header, in pieces of some kilobytes."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\r\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([safe_text(cell) if isinstance(cell, str) else cell for cell in row.cells()])
        if buffer.tell() >= CSV_PIECE_BYTES:
            yield buffer.getvalue().encode()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue().encode()
