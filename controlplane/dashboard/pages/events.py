"""The timeline of everything that happened, in pages by id."""

from controlplane.dashboard.fragments import Asked, Filter, Fragment, Page
from controlplane.dashboard.pages.choices import choose
from controlplane.dashboard.selectors.events import EventList, event_kinds, event_list


def _list(asked: Asked) -> EventList:
    before = asked.word("before")
    return event_list(
        kind=asked.word("kind"),
        subject=asked.word("subject"),
        before=int(before) if before.isascii() and before.isdigit() and len(before) < 19 else None,
    )


def _filter(asked: Asked) -> Filter:
    return Filter(
        text_label="Exact name of a region, deployment, cell or node",
        text_name="subject",
        text=asked.word("subject"),
        choices=(choose(asked, "kind", "every kind", event_kinds()),),
    )


EVENTS = Page(
    section="events",
    title="Events",
    fragments=(Fragment("events-list", "", ("events",), "dashboard/events/list.html", _list),),
    narrow=_filter,
)
