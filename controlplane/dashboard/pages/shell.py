"""What every page carries beside its content: the navigation, with the fleet's health in numbers, and the search, which
also has a page of its own."""

from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest
from controlplane.dashboard.selectors.incidents import FleetHealth, fleet_health
from controlplane.dashboard.selectors.search import SearchResults, search


def health(request: PageRequest) -> FleetHealth:
    return fleet_health()


def _results(request: PageRequest) -> SearchResults:
    return search(text=request.text("q"), now=request.now)


def _filter(request: PageRequest) -> Filter:
    return Filter(text_label="Name", text_name="q", text=request.text("q"))


SHELL = Fragment(
    name="navigation",
    title="",
    topics=("incidents", "cells", "nodes", "approvals"),
    template="dashboard/parts/navigation.html",
    load=health,
)
SEARCH = Page(
    section="search",
    title="Search",
    # Without topics: results must not move under the pointer.
    fragments=(Fragment("search-results", "", (), "dashboard/search/results.html", _results),),
    narrow=_filter,
)
