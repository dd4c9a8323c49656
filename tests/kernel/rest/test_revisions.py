"""Invalid revisions are rejected before they reach PostgreSQL."""

import pytest

from kernel.rest.changes import is_revision


@pytest.mark.parametrize(
    "text",
    ["", "0", "r", "r1", "r0-0-", "r20-10-", "r10-20-9", "r10-20-20", "r10-20-14.10", "r1-2-1;", "r٣-4-"],
)
def test_what_postgresql_would_not_take_is_no_revision(text: str) -> None:
    assert not is_revision(text)
