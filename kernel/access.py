"""Access control: three roles, grants for single deployments, and scopes that limit tokens.

`settings.ACCESS_SOURCE` returns a user's access. A view without declarations lets viewers read and operators change."""

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

if TYPE_CHECKING:  # it loads the authentication, which loads models, which use these roles
    from rest_framework.views import APIView


class Role(StrEnum):
    """Roles of users: read, operate the fleet, or administer users and rules. Each includes the previous ones."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    @property
    def rank(self) -> int:
        return _RANKS[self]

    def covers(self, needed: "Role") -> bool:
        """Whether this role includes `needed`."""
        return self.rank >= needed.rank


_RANKS = {role: rank for rank, role in enumerate(Role)}


class Scope(StrEnum):
    """The most that a token allows, regardless of its user."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"

    @property
    def cap(self) -> Role:
        return {Scope.READ: Role.VIEWER, Scope.WRITE: Role.OPERATOR, Scope.ADMIN: Role.ADMIN}[self]


@dataclass(frozen=True, slots=True)
class Access:
    """The access of one caller. Without a `role` it has none. `grants`: higher roles by deployment."""

    role: Role | None = None
    grants: Mapping[str, Role] = field(default_factory=dict)
    scope: Scope = Scope.ADMIN

    def role_on(self, deployment: str = "") -> Role | None:
        """Returns the role for a deployment, or with "" the general one."""
        known = [role for role in (self.role, self.grants.get(deployment) if deployment else None) if role]
        if self.role is None or not known:
            return None
        return min(max(known, key=lambda role: role.rank), self.scope.cap, key=lambda role: role.rank)

    def may(self, needed: Role, deployment: str = "") -> bool:
        """Whether the caller has this role, for a deployment or in general."""
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
"""(request, path arguments of a page) -> its deployment, or ""."""


def access_of(request: HttpRequest | Request) -> Access:
    """Returns the access of a request's sender, which is read once per request."""
    known: Access | None = request.__dict__.get("_access")
    if known is None:
        scope = getattr(getattr(request, "auth", None), "scope", Scope.ADMIN)
        known = request.__dict__["_access"] = access_of_user(request.user, Scope(scope))
    return known


def access_of_user(user: Known, scope: Scope = Scope.ADMIN) -> Access:
    """Returns a user's access with a token of this scope, or with a session."""
    source: Source = import_string(settings.ACCESS_SOURCE)
    return source(user, scope)


def may(request: HttpRequest) -> dict[str, Access]:
    """Context processor: templates use `may.operate` and `may.administer`."""
    return {"may": access_of(request)} if hasattr(request, "user") else {"may": Access()}


class RolePermission(BasePermission):
    """The API's default permission class. A view set may declare:

    - `needs`: action -> role; other actions take viewer to read and operator to change,
    - `reads`: POST actions that change nothing, which viewers and read-only tokens may call,
    - `deployment_of(obj)`: the deployment of one of its objects, for grants,
    - `requested_deployment(request)`: the deployment of a request without an object, for grants."""

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
    """Returns the deployment of the requested object, else of the request, else ""."""
    if getattr(view, "detail", False) and hasattr(view, "deployment_of"):
        lookup = {view.lookup_field: view.kwargs[view.lookup_url_kwarg or view.lookup_field]}
        return str(view.deployment_of(get_object_or_404(view.get_queryset(), **lookup)) or "")
    if not getattr(view, "detail", False) and hasattr(view, "requested_deployment"):
        return str(view.requested_deployment(request) or "")
    return ""


def deployment_in_body(request: Request) -> str:
    """The default `requested_deployment`: the request's field `deployment`."""
    named = request.data.get("deployment") if isinstance(request.data, dict) else None
    return named if isinstance(named, str) else ""


Page = Callable[..., HttpResponse]


def needs(role: Role, deployment: DeploymentOf | None = None) -> Callable[[Page], Page]:
    """Decorates a page or its action: anonymous users go to the login, those without the role are refused (403).

    `deployment(request, **path arguments)` returns its deployment, for grants."""

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
    """Require a role of the sender of a request. Raises PermissionDenied, which names the required role."""
    access = access_of(request)
    if not access.may(role, deployment):
        raise PermissionDenied(f"Needs the {role} role; you have {access.role_on(deployment) or 'none'}.")
