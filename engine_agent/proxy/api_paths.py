"""The table of paths as the cell proxy looks things up in it: by the bytes of a request."""

from collections.abc import Mapping
from typing import Final

from engine_agent.protocol.api_surface import API_PATHS, AnsweredBy, ApiPath, Counting

CELL_PATHS: Final[Mapping[bytes, ApiPath]] = {
    row.path.encode(): row for row in API_PATHS if row.answered_by is AnsweredBy.CELL
}


def counting_of(method: bytes, path: bytes) -> Counting:
    """Where the answer to such a request says what was used. What is in no table is read like a completion."""
    if method != b"POST":
        return Counting.NOTHING
    row = CELL_PATHS.get(path)
    return Counting.STREAM_OPTIONS if row is None else row.counting
