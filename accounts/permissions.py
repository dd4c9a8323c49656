"""Rules about accounts that depend on the caller, shared by the API and the pages. They only refuse."""

from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from rest_framework.request import Request

from accounts.models import Approval, ServiceAccount
from kernel.access import Role, require
from kernel.refusals import InvalidInput


def require_human(request: HttpRequest | Request) -> None:
    """Approving is for people: a second program is no second pair of eyes.

    Raises:
        PermissionDenied: the caller is a service account.
    """
    if ServiceAccount.objects.filter(user_id=request.user.pk or 0).exists():
        raise PermissionDenied("A service account cannot approve; a person has to.")


def require_may_reject(request: HttpRequest | Request, approval: Approval) -> None:
    """The requester may withdraw; only admins may reject.

    Raises:
        PermissionDenied: neither.
    """
    if approval.requested_by != request.user.get_username()[:64]:
        require(request, Role.ADMIN)


def token_owner(request: HttpRequest | Request, service_account: str) -> User:
    """Whom a new token is for: the caller, or a program, which takes an admin.

    Raises:
        PermissionDenied: a program was named by another user.
        InvalidInput: there is no such program.
    """
    if not service_account:
        return User.objects.get(pk=request.user.pk or 0)
    require(request, Role.ADMIN)
    account = ServiceAccount.objects.select_related("user").filter(user__username=service_account).first()
    if account is None:
        message = f"there is no service account {service_account!r}"
        raise InvalidInput(field="service_account", rule="exists", message=message)
    return account.user
