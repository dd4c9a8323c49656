"""The list of incidents."""

from controlplane.dashboard.fragments import Asked, Choice, Filter, Fragment, Page
from controlplane.dashboard.selectors.incidents import IncidentList, incident_list
from fleet.planning.states import IncidentState


def _list(asked: Asked) -> IncidentList:
    return incident_list(state=asked.word("state"), text=asked.word("q"))


def _filter(asked: Asked) -> Filter:
    options = (("", "open"), (IncidentState.CLOSED.value, "closed"), ("all", "open and closed"))
    state = Choice(name="state", label="state", options=options, chosen=asked.word("state"))
    return Filter(text_label="Find by kind, subject or words", text_name="q", text=asked.word("q"), choices=(state,))


INCIDENTS = Page(
    section="incidents",
    title="Incidents",
    fragments=(Fragment("incidents-list", "", ("incidents",), "dashboard/incidents/list.html", _list),),
    narrow=_filter,
)
