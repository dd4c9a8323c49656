"""The settings: one's own tokens and sessions; users, groups, approvals, webhooks and rules for those who may.

Parts with forms have no topics: they are drawn once, so that nothing is taken from under somebody's fingers.
"""

from controlplane.dashboard.fragments import Fragment, Load, Page
from controlplane.dashboard.selectors import settings as read
from kernel.access import Role


def _part(name: str, title: str, load: Load, *topics: str) -> Fragment:
    return Fragment(f"settings-{name}", title, topics, f"dashboard/settings/{name}.html", load)


def _page(title: str, role: Role, *fragments: Fragment) -> Page:
    tabs = _part("tabs", "", lambda asked: title)
    return Page(section="settings", title="Settings", fragments=(tabs, *fragments), role=role)


SETTINGS = _page(
    "You",
    Role.VIEWER,
    _part("me", "You", lambda asked: read.mine(asked.caller)),
    _part("tokens", "API tokens", lambda asked: read.tokens_view(asked.caller, asked.now)),
    _part("sessions", "Sessions", lambda asked: read.session_rows(asked.caller, asked.now), "sessions"),
)
PEOPLE = _page(
    "Users",
    Role.ADMIN,
    _part("users", "Users", lambda asked: read.people_view()),
    _part("programs", "Service accounts", lambda asked: read.programs_view()),
)
GROUPS = _page(
    "Groups",
    Role.ADMIN,
    _part("groups", "Groups", lambda asked: read.groups_view()),
    _part("grants", "Grants for one deployment", lambda asked: read.grants_view()),
)
APPROVALS = _page(
    "Approvals",
    Role.VIEWER,
    _part("pending", "Waiting for a second person", lambda asked: read.pending_approvals(asked.caller), "approvals"),
    _part("two-people", "What takes two people", lambda asked: read.approval_rules()),
    _part("decided", "Decided", lambda asked: read.past_approvals(), "approvals"),
)
WEBHOOKS = _page(
    "Webhooks",
    Role.VIEWER,
    _part("webhooks", "Webhooks", lambda asked: read.webhooks_view()),
    _part("deliveries", "What they were told", lambda asked: read.deliveries(), "events"),
)
RULES = _page("Rules", Role.VIEWER, _part("rules", "What may replace machines", lambda asked: read.fault_rules()))
