"""The table of API paths, by the bytes of a request."""

from collections.abc import Mapping
from typing import Final

from engine_agent.protocol.api_surface import API_PATHS, AnsweredBy, ApiPath, Counting, ErrorForm

CELL_PATHS: Final[Mapping[bytes, ApiPath]] = {
    row.path.encode(): row for row in API_PATHS if row.answered_by is AnsweredBy.CELL
}

CHAT_PATH: Final = b"/v1/chat/completions"
RESPONSES_PATH: Final = b"/v1/responses"
_PROMPT_MEMBERS: Final[Mapping[bytes, str]] = {
    b"/v1/completions": "prompt",
    RESPONSES_PATH: "input",
    b"/v1/embeddings": "input",
    b"/pooling": "input",
    b"/classify": "input",
}


def prompt_member_of(path: bytes) -> str:
    return _PROMPT_MEMBERS.get(path, "messages")


def form_of(path: bytes) -> ErrorForm:
    row = CELL_PATHS.get(path)
    return ErrorForm.OPENAI if row is None else row.errors


def counting_of(method: bytes, path: bytes) -> Counting:
    """Where the answer to such a request states its usage. Unknown paths count as completions."""
    if method != b"POST":
        return Counting.NOTHING
    row = CELL_PATHS.get(path)
    return Counting.STREAM_OPTIONS if row is None else row.counting
