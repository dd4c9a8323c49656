"""One caller of each kind, each with a token."""

from django.contrib.auth.models import Group, User
from django.urls import resolve
from rest_framework.exceptions import PermissionDenied
from rest_framework.test import APIClient, APIRequestFactory, force_authenticate

from accounts.models import ApiToken, Grant, GroupRole
from kernel import clock
from kernel.access import Role, Scope
from kernel.secrets import secret_issue
from tests.controlplane.access.endpoints import Operation
from tests.fleet.rows import NOW


def make_user(username: str, role: Role = Role.VIEWER, **columns: object) -> User:
    """A user whose group has this role."""
    user, _ = User.objects.get_or_create(username=username, defaults=columns)
    group, _ = Group.objects.get_or_create(name=f"{role.value}s")
    GroupRole.objects.get_or_create(group=group, defaults={"role": role.value})
    user.groups.add(group)
    return user


def granted(username: str, deployment: str) -> User:
    """A viewer who operates one deployment."""
    user = make_user(username)
    Grant.objects.create(user=user, deployment=deployment, role=Role.OPERATOR, created_by="root", created_at=NOW)
    return user


def calls(user: User | None, scope: Scope = Scope.ADMIN) -> APIClient:
    """An API client with a token of this user; None: an anonymous client."""
    client = APIClient(raise_request_exception=False)
    if user is not None:
        issued = secret_issue()
        ApiToken.objects.create(
            prefix=issued.prefix,
            digest=issued.digest,
            name="test",
            user=user,
            scope=scope.value,
            created_at=NOW,
            last_used_at=clock.now(),
        )
        client.credentials(HTTP_AUTHORIZATION=f"Bearer {issued.text}")
    return client


def is_let_in(user: User, scope: Scope, operation: Operation) -> bool:
    """Whether an operation's view admits the user; the operation itself is not run."""
    found = resolve(operation.path)
    request = APIRequestFactory().generic(operation.method, operation.path, "{}", content_type="application/json")
    force_authenticate(request, user=user, token=ApiToken(user=user, scope=scope.value))  # type: ignore[arg-type] # ours, not DRF's
    view = found.func.cls(**found.func.initkwargs)  # type: ignore[attr-defined] # as DRF's as_view leaves them there
    view.action_map = found.func.actions  # type: ignore[attr-defined]
    view.kwargs = found.kwargs
    view.request = view.initialize_request(request)
    try:
        view.check_permissions(view.request)
    except PermissionDenied:
        return False
    return True
