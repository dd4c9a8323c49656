"""Routes of accounts under /api/v1/: (path, view set, noun)."""

from accounts.api.approvals import ApprovalRuleViewSet, ApprovalViewSet
from accounts.api.tokens import MeViewSet, SessionViewSet, TokenViewSet
from accounts.api.users import GrantViewSet, GroupViewSet, ServiceAccountViewSet, UserViewSet

ROUTES = (
    ("me", MeViewSet, "me"),
    ("users", UserViewSet, "user"),
    ("service-accounts", ServiceAccountViewSet, "service-account"),
    ("groups", GroupViewSet, "group"),
    ("grants", GrantViewSet, "grant"),
    ("tokens", TokenViewSet, "token"),
    ("sessions", SessionViewSet, "session"),
    ("approvals", ApprovalViewSet, "approval"),
    ("approval-rules", ApprovalRuleViewSet, "approval-rule"),
)
