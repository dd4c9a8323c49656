"""docs/api-applications.md contains the tables of ingresses and cell proxies."""

import pytest

from engine_agent.protocol.api_surface import API_PATHS
from tests.docs.api_tables import with_tables
from tests.docs.pages import text_of

PAGE = "docs/api-applications.md"


def test_the_page_is_what_the_tables_give() -> None:
    assert with_tables(text_of(PAGE)) == text_of(PAGE), f"run python -m tests.docs.api_tables {PAGE}"
    for row in API_PATHS:
        assert f" {row.path}`" in text_of(PAGE)


def test_a_page_without_a_place_for_a_table_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match="a place for each of cells, limits, members, others, refused, once, and has gone, others, mem",
    ):
        with_tables(text_of(PAGE).replace("begin cells", "begin gone"))


@pytest.mark.parametrize("page", ["README.md", "docs/operate/traffic.md"])
def test_it_is_linked(page: str) -> None:
    assert "api-applications.md)" in text_of(page)
