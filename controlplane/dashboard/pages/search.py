"""Search over everything that bears a name: a page of its own, and the list that the search box on every page shows."""

from controlplane.dashboard.fragments import Asked, Filter, Fragment, Page
from controlplane.dashboard.selectors.search import SearchResults, search


def _results(asked: Asked) -> SearchResults:
    return search(text=asked.word("q"), now=asked.now)


def _filter(asked: Asked) -> Filter:
    return Filter(text_label="Name of anything", text_name="q", text=asked.word("q"))


SEARCH = Page(
    section="search",
    title="Search",
    # Without topics: results that move under the pointer help nobody.
    fragments=(Fragment("search-results", "", (), "dashboard/search/results.html", _results),),
    narrow=_filter,
)
