"""Who changed what, and who was refused, in pages by number. Operators and administrators see it."""

from audit.models import Outcome
from audit.selectors import AuditQuery, audit_actions
from controlplane.dashboard.fragments import Asked, Filter, Fragment, Page
from controlplane.dashboard.pages.choices import choose
from controlplane.dashboard.selectors.audit import AuditList, audit_list
from kernel.access import Role


def _list(asked: Asked) -> AuditList:
    before = asked.word("before")
    number = int(before) if before.isascii() and before.isdigit() and len(before) < 19 else None
    wanted = AuditQuery(
        actor=asked.word("actor"),
        action=asked.word("action"),
        object=asked.word("object"),
        outcome=asked.word("outcome"),
        request_id=asked.word("request_id"),
        before=number,
    )
    return audit_list(wanted)


def _filter(asked: Asked) -> Filter:
    return Filter(
        text_label="Exact object, such as deployment/sim-70b",
        text_name="object",
        text=asked.word("object"),
        choices=(
            choose(asked, "action", "every action", audit_actions()),
            choose(asked, "outcome", "done and denied", (outcome.value for outcome in Outcome)),
        ),
    )


AUDIT = Page(
    section="audit",
    title="Audit",
    fragments=(Fragment("audit-list", "", (), "dashboard/audit/list.html", _list),),
    narrow=_filter,
    role=Role.OPERATOR,
)
