"""The list of incidents and the page of one."""

from django.http import Http404

from controlplane.dashboard.fragments import Asked, Choice, Filter, Fragment, Page
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


def _incident(asked: Asked) -> Incident:
    incident = incident_find(asked.key)
    if incident is None:
        raise Http404(f"There is no incident {asked.key!r}.")
    return incident


def _page(asked: Asked) -> IncidentPage:
    return incident_page(asked.once(_incident))


def _evidence(asked: Asked) -> Evidence:
    return evidence_of(asked.once(_incident))


def _related(asked: Asked) -> IncidentList:
    return related_to(asked.once(_incident))


def _events(asked: Asked) -> EventList:
    return incident_events(asked.once(_incident), EVENTS_OF_ONE_INCIDENT)


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
