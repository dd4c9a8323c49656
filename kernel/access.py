"""Who may do what: three roles, grants for single deployments, and scopes that cap what a token's user may do.

It answers from what `settings.ACCESS_SOURCE` says of a user. It never changes anything, and what nobody declared is
refused to viewers: a view that declares nothing lets viewers read and operators change.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import wraps
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.contrib.auth.models import AbstractBaseUser, AnonymousUser
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404
from django.utils.module_loading import import_string
from rest_framework.permissions import SAFE_METHODS, BasePermission
from rest_framework.request import Request

if TYPE_CHECKING:  # it loads the authentication, which loads models, which are made of these roles
    from rest_framework.views import APIView


class Role(StrEnum):
    """What a user may do: look, run the fleet, or decide who may and by which rules. Each covers those before it."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    @property
    def rank(self) -> int:
        return tuple(Role).index(self)

    def covers(self, needed: "Role") -> bool:
        """Whether this role may do what `needed` may."""
        return self.rank >= needed.rank


class Scope(StrEnum):
    """What a token may be used for, at most, whoever its user is."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"

    @property
    def cap(self) -> Role:
        return {Scope.READ: Role.VIEWER, Scope.WRITE: Role.OPERATOR, Scope.ADMIN: Role.ADMIN}[self]


@dataclass(frozen=True, slots=True)
class Access:
    """What one caller may do. `role` None: nothing at all. `grants`: deployment -> role, where that is more."""

    role: Role | None = None
    grants: Mapping[str, Role] = field(default_factory=dict)
    scope: Scope = Scope.ADMIN

    def role_on(self, deployment: str = "") -> Role | None:
        """The role that counts for things of a deployment; "" for things of none."""
        known = [role for role in (self.role, self.grants.get(deployment) if deployment else None) if role]
        if self.role is None or not known:
            return None
        return min(max(known, key=lambda role: role.rank), self.scope.cap, key=lambda role: role.rank)

    def may(self, needed: Role, deployment: str = "") -> bool:
        """Whether the caller may do what takes this role, for things of a deployment or of none."""
        role = self.role_on(deployment)
        return role is not None and role.covers(needed)

    @property
    def view(self) -> bool:
        return self.may(Role.VIEWER)

    @property
    def operate(self) -> bool:
        """In templates: `{% if may.operate %}`; for one deployment `{% if may|operates:name %}`."""
        return self.may(Role.OPERATOR)

    @property
    def administer(self) -> bool:
        return self.may(Role.ADMIN)


Known = AbstractBaseUser | AnonymousUser
Source = Callable[[Known, Scope], Access]
DeploymentOf = Callable[..., str]
"""Of a page's request and path arguments: the deployment that it is about, or "" for none."""


def access_of(request: HttpRequest | Request) -> Access:
    """What the sender of a request may do; looked up once a request."""
    known: Access | None = request.__dict__.get("_access")
    if known is None:
        scope = getattr(getattr(request, "auth", None), "scope", Scope.ADMIN)
        known = request.__dict__["_access"] = access_of_user(request.user, Scope(scope))
    return known


def access_of_user(user: Known, scope: Scope = Scope.ADMIN) -> Access:
    """What a user may do with a token of this scope, or with a session."""
    source: Source = import_string(settings.ACCESS_SOURCE)
    return source(user, scope)


def may(request: HttpRequest) -> dict[str, Access]:
    """Context processor: templates ask `may.operate` and `may.administer`."""
    return {"may": access_of(request)} if hasattr(request, "user") else {"may": Access()}


class RolePermission(BasePermission):
    """The API's default. A view set may say:

    - `needs`: action -> role; other actions take viewer to read and operator to change,
    - `reads`: actions that change nothing though they are sent by POST: viewers may, and tokens that may only read,
    - `deployment_of(obj)`: the deployment of one of its objects, for grants,
    - `requested_deployment(request)`: the deployment that a request without an object is about, for grants.
    """

    def has_permission(self, request: Request, view: "APIView") -> bool:
        access = access_of(request)
        if access.role is None:
            return False
        needed = needed_role(view, str(request.method))
        if access.scope is Scope.READ and not _only_reads(view, str(request.method)):
            self.message = "This token may only read; make one with the scope write or admin."
            return False
        if access.may(needed):
            return True
        self.message = f"Needs the {needed} role; you have {access.role_on() or 'none'}."
        return bool(access.grants) and access.may(needed, _deployment(request, view))


def needed_role(view: "APIView", method: str) -> Role:
    """The role that a view's current action takes."""
    needs: Mapping[str, Role] = getattr(view, "needs", {})
    by_default = Role.VIEWER if _only_reads(view, method) else Role.OPERATOR
    return needs.get(getattr(view, "action", None) or "", by_default)


def _only_reads(view: "APIView", method: str) -> bool:
    return method in SAFE_METHODS or getattr(view, "action", None) in getattr(view, "reads", ())


def _deployment(request: Request, view: Any) -> str:
    """Of the requested object, else of the request; "" where the view names neither."""
    if getattr(view, "detail", False) and hasattr(view, "deployment_of"):
        lookup = {view.lookup_field: view.kwargs[view.lookup_url_kwarg or view.lookup_field]}
        return str(view.deployment_of(get_object_or_404(view.get_queryset(), **lookup)) or "")
    if not getattr(view, "detail", False) and hasattr(view, "requested_deployment"):
        return str(view.requested_deployment(request) or "")
    return ""


def deployment_in_body(request: Request) -> str:
    """The usual `requested_deployment`: the request's field `deployment`, if it is a text."""
    named = request.data.get("deployment") if isinstance(request.data, dict) else None
    return named if isinstance(named, str) else ""


Page = Callable[..., HttpResponse]


def needs(role: Role, deployment: DeploymentOf | None = None) -> Callable[[Page], Page]:
    """Decorates a page or its action: anonymous users go to the login, those without the role are refused (403).

    `deployment(request, **path arguments)` names the deployment that it is about, so that grants count.
    """

    def decorate(page: Page) -> Page:
        @wraps(page)
        def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
            if not request.user.is_authenticated:
                return redirect_to_login(request.get_full_path())
            require(request, role, deployment(request, **kwargs) if deployment else "")
            return page(request, *args, **kwargs)

        return guarded

    return decorate


def require(request: HttpRequest | Request, role: Role, deployment: str = "") -> None:
    """Refuse the sender of a request who has not the role.

    Raises:
        PermissionDenied: naming the role that it needs.
    """
    access = access_of(request)
    if not access.may(role, deployment):
        raise PermissionDenied(f"Needs the {role} role; you have {access.role_on(deployment) or 'none'}.")
