"""The tables of paths and of members: each row once, and each in use."""

import re

from engine_agent.protocol.api_surface import (
    ANTHROPIC_PATHS,
    API_PATHS,
    CELL_PATHS,
    AnsweredBy,
    ErrorForm,
    anthropic_type,
    error_object,
    openai_type,
)
from engine_agent.protocol.request_checks import REQUEST_MEMBERS


def test_each_path_is_there_once_and_is_written_as_no_reader_could_misread_it() -> None:
    paths = [row.path for row in API_PATHS]
    assert len(set(paths)) == len(paths)
    for path in paths:
        assert re.fullmatch(r"(/([a-z0-9_]+|{[a-z]+}))+", path), path


def test_what_goes_to_cells_is_posted_names_a_model_and_has_no_variable_part() -> None:
    for row in CELL_PATHS.values():
        assert (row.methods, row.has_model, "{" in row.path) == (("POST",), True, False), row
    assert all(not row.has_model for row in API_PATHS if row.answered_by is not AnsweredBy.CELL)


def test_errors_have_what_each_client_reads() -> None:
    openai = error_object(ErrorForm.OPENAI, 404, "gone", code="x", param="model")
    assert openai == {"error": {"message": "gone", "type": "invalid_request_error", "param": "model", "code": "x"}}
    anthropic = error_object(ErrorForm.ANTHROPIC, 404, "gone", code="x")
    assert anthropic["type"] == "error"
    assert anthropic["error"] == {"message": "gone", "type": "not_found_error", "param": None, "code": "x"}
    assert [anthropic_type(status) for status in (415, 429, 502, 503)] == [
        *("invalid_request_error", "rate_limit_error", "api_error", "overloaded_error")
    ]
    assert (openai_type(499), openai_type(500)) == ("invalid_request_error", "server_error")
    assert ANTHROPIC_PATHS == ("/v1/messages", "/v1/messages/count_tokens")


def test_members_are_there_once() -> None:
    names = [member.name for member in REQUEST_MEMBERS]
    assert len(set(names)) == len(names)
