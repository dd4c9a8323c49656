"""Assembles the REST API from `ROUTES` of every noun: (path, view set, noun). Every path works with and without a
trailing slash."""

from typing import Any

from django.http import Http404
from django.urls import include, path, re_path
from django.views.decorators.cache import cache_page, never_cache
from rest_framework.permissions import AllowAny
from rest_framework.request import Request
from rest_framework.routers import DefaultRouter
from rest_framework.views import APIView

from controlplane.api.apply.view import ApplyViewSet
from controlplane.api.audit import AuditViewSet
from controlplane.api.events import EventViewSet
from controlplane.api.incident_reports import IncidentReportViewSet
from controlplane.api.operations import OperationsViewSet
from controlplane.api.schema import Documentation, Schema
from controlplane.api.stress import WhatIfViewSet
from controlplane.api.what_if import PlanViewSet
from controlplane.api.why import ROUTES as WHY
from kernel.nouns import noun_modules

SCHEMA_CACHED_S = 3600
"""Rendering takes tenths of a second, access is public, and it changes only with the code. Browsers revalidate it."""


class ResourceRouter(DefaultRouter):
    """`/cells` and `/cells/` are the same; the root lists all resources."""

    include_format_suffixes = False

    def __init__(self) -> None:
        super().__init__()
        self.trailing_slash = "/?"


class NothingHere(APIView):
    """Responds to unknown paths of the API with 404, without authentication: the schema is public."""

    permission_classes = [AllowAny]

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        raise Http404


router = ResourceRouter()
OWN = (
    ("audit", AuditViewSet, "audit-record"),
    ("events", EventViewSet, "event"),
    ("apply", ApplyViewSet, "apply"),
    ("operations", OperationsViewSet, "operations"),
    ("incidents", IncidentReportViewSet, "incident-report"),
    ("plan", PlanViewSet, "plan"),
    ("what-if", WhatIfViewSet, "what-if"),
    *WHY,
)
APPS = ("accounts", "fleet", "models_registry", "traffic")
FOUND = (route for app in APPS for module in noun_modules(app, "api") for route in getattr(module, "ROUTES", ()))
for prefix, view_set, noun in sorted((*OWN, *FOUND), key=lambda route: (-route[0].count("/"), route[0])):
    router.register(prefix, view_set, basename=noun)  # `machines/invitations` before `machines/{id}`

urlpatterns = [
    path("schema/", never_cache(cache_page(SCHEMA_CACHED_S)(Schema.as_view())), name="schema"),
    path("docs/", Documentation.as_view(), name="api-docs"),
    path("v1/", include((router.urls, "api"))),
    re_path(r"^", NothingHere.as_view()),
]
