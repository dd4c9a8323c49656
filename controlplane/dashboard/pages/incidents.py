"""The list of incidents and the page of one."""

from django.http import Http404

from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest
from controlplane.dashboard.pages.choices import choose_labelled
from controlplane.dashboard.selectors.events import EventList, incident_events
from controlplane.dashboard.selectors.incidents import (
    Evidence,
    IncidentList,
    IncidentPage,
    evidence_of,
    incident_find,
    incident_list,
    incident_page,
    related_to,
)
from fleet.models import Incident
from fleet.planning.states import IncidentState

EVENTS_OF_ONE_INCIDENT = 30


def _list(request: PageRequest) -> IncidentList:
    return incident_list(state=request.text("state"), text=request.text("q"))


def _filter(request: PageRequest) -> Filter:
    options = (("", "open"), (IncidentState.CLOSED.value, "closed"), ("all", "open and closed"))
    state = choose_labelled(request, "state", options)
    return Filter(text_label="Find by kind, subject or text", text_name="q", text=request.text("q"), choices=(state,))


INCIDENTS = Page(
    section="incidents",
    title="Incidents",
    fragments=(Fragment("incidents-list", "", ("incidents",), "dashboard/incidents/list.html", _list),),
    narrow=_filter,
)


def _incident(request: PageRequest) -> Incident:
    incident = incident_find(request.key)
    if incident is None:
        raise Http404(f"There is no incident {request.key!r}.")
    return incident


def _page(request: PageRequest) -> IncidentPage:
    return incident_page(request.once(_incident))


def _evidence(request: PageRequest) -> Evidence:
    return evidence_of(request.once(_incident))


def _related(request: PageRequest) -> IncidentList:
    return related_to(request.once(_incident))


def _events(request: PageRequest) -> EventList:
    return incident_events(request.once(_incident), EVENTS_OF_ONE_INCIDENT)


TOPICS = ("incidents", "nodes")

INCIDENT = Page(
    section="incidents",
    title="",
    fragments=(
        Fragment("incident", "", TOPICS, "dashboard/incidents/incident.html", _page),
        Fragment("incident-evidence", "Evidence", TOPICS, "dashboard/incidents/evidence.html", _evidence),
        Fragment("incident-actions", "What is done about it", TOPICS, "dashboard/incidents/actions.html", _page),
        Fragment("incident-related", "Related", TOPICS, "dashboard/incidents/related.html", _related),
        Fragment("incident-events", "Events around it", ("events",), "dashboard/events/list.html", _events),
    ),
)
