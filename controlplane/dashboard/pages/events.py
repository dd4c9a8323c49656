"""The two logs of what happened, in pages by id: events of the fleet, and audit records of who changed what."""

from audit.models import Outcome
from audit.selectors import AuditQuery, audit_actions
from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest
from controlplane.dashboard.pages.choices import choose
from controlplane.dashboard.selectors.audit import AuditList, audit_list
from controlplane.dashboard.selectors.events import EventList, event_kinds, event_list
from kernel.access import Role

MAX_ID_DIGITS = 18


def _before(request: PageRequest) -> int | None:
    """The id that the page ends before, if the URL names one."""
    text = request.text("before")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_ID_DIGITS else None


def _events(request: PageRequest) -> EventList:
    return event_list(kind=request.text("kind"), subject=request.text("subject"), before=_before(request))


def _event_filter(request: PageRequest) -> Filter:
    return Filter(
        text_label="Exact name of a region, deployment, cell or node",
        text_name="subject",
        text=request.text("subject"),
        choices=(choose(request, "kind", "every kind", event_kinds()),),
    )


def _audit(request: PageRequest) -> AuditList:
    query = AuditQuery(
        actor=request.text("actor"),
        action=request.text("action"),
        object=request.text("object"),
        outcome=request.text("outcome"),
        request_id=request.text("request_id"),
        before=_before(request),
    )
    return audit_list(query)


def _audit_filter(request: PageRequest) -> Filter:
    return Filter(
        text_label="Exact object, such as deployment/sim-70b",
        text_name="object",
        text=request.text("object"),
        choices=(
            choose(request, "action", "every action", audit_actions()),
            choose(request, "outcome", "every outcome", (outcome.value for outcome in Outcome)),
        ),
    )


EVENTS = Page(
    section="events",
    title="Events",
    fragments=(Fragment("events-list", "", ("events",), "dashboard/events/list.html", _events),),
    narrow=_event_filter,
)
AUDIT = Page(
    section="audit",
    title="Audit",
    fragments=(Fragment("audit-list", "", (), "dashboard/audit/list.html", _audit),),
    narrow=_audit_filter,
    role=Role.OPERATOR,
)
