"""Django's admin over the raw records, for what no page shows. Admins only, read-only.

Changes go through services, which check rules, write events and are audited, so nothing is added, changed or
deleted here. Secrets and tenants' requests are not shown."""

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.contrib.admin import AdminSite, ModelAdmin
from django.contrib.auth.views import redirect_to_login
from django.db.models import BinaryField, CompositePrimaryKey, ForeignKey, JSONField, Model, TextField
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, URLResolver

from kernel.access import access_of

APPS = ("kernel", "accounts", "audit", "models_registry", "fleet", "traffic", "auth")
EXCLUDED = frozenset({"auth.Permission"})
ALWAYS_HIDDEN = frozenset({"password", "secret", "own_secret", "callback_secret", "former_secret", "session_key"})
HIDDEN = {
    "accounts.ApiToken": {"digest"},
    "accounts.Approval": {"secrets"},
    "accounts.KeyChallenge": {"challenge"},
    "accounts.RecoveryCode": {"digest"},
    "fleet.JoinToken": {"digest"},
    "fleet.AgentCredential": {"digest"},
    "traffic.ApplicationKey": {"digest"},
    "traffic.AsyncRequest": {"digest"},
}
COLUMNS = 7
"""Of a list: as many as fit a screen."""
UNUSED_VIEWS = frozenset({"password_change", "password_change_done", "autocomplete", "view_on_site"})
"""Views of Django's admin that the dashboard replaces, or that a read-only site does not need."""


if TYPE_CHECKING:
    _Table = ModelAdmin[Any]
else:
    _Table = ModelAdmin  # has no type parameters while it runs


class RecordSite(AdminSite):
    site_header = site_title = "Switchyard records"
    index_title = "Raw records"
    site_url = "/"
    enable_nav_sidebar = True
    final_catch_all_view = False

    def has_permission(self, request: HttpRequest) -> bool:
        return bool(request.user.is_active) and access_of(request).administer

    def login(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Anonymous users go to the login; users who are no admins are refused."""
        if not request.user.is_authenticated:
            return redirect_to_login(request.GET.get("next", request.path))
        context = {"exception": "This needs the admin role."}
        return TemplateResponse(request, "403.html", context, status=HTTPStatus.FORBIDDEN)

    def get_urls(self) -> list[URLResolver | URLPattern]:
        return [url for url in super().get_urls() if getattr(url, "name", None) not in UNUSED_VIEWS]


class Record(_Table):
    """One table: newest first, nothing to change."""

    list_per_page = 50
    show_full_result_count = False
    actions = None

    def __init__(self, model: type[Model], site: AdminSite) -> None:
        hidden = ALWAYS_HIDDEN | HIDDEN.get(model._meta.label, set())
        shown = [field for field in model._meta.concrete_fields if field.name not in hidden]
        shown = [field for field in shown if not isinstance(field, BinaryField)]
        long = (JSONField, TextField)
        short = [field.name for field in shown if not isinstance(field, long)]
        declared = {
            "list_display": short[:COLUMNS] or ["__str__"],
            "list_select_related": [field.name for field in shown if isinstance(field, ForeignKey)],
            "list_filter": [field.name for field in shown if field.choices],
            "fields": [field.name for field in shown],
            "ordering": ["-pk"],
        }
        self.__dict__.update(declared)  # of this table; the class serves all of them
        super().__init__(model, site)

    def get_urls(self) -> list[URLPattern]:
        """The list and one record: there are no forms, and no history, since nothing is changed here."""
        return [url for url in super().get_urls() if str(url.name).endswith(("_changelist", "_change"))]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return access_of(request).administer

    def has_module_permission(self, request: HttpRequest) -> bool:
        return access_of(request).administer


def record_site() -> RecordSite:
    """The site with every table of our apps; called once, when all apps are loaded."""
    site = RecordSite(name="admin")
    for label in APPS:
        for model in apps.get_app_config(label).get_models():
            # Django's admin takes no table whose key has several columns.
            if model._meta.label not in EXCLUDED and not isinstance(model._meta.pk, CompositePrimaryKey):
                site.register(model, Record)
    return site
