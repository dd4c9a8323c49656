"""Gives and takes roles for single deployments. A grant only adds: it never lowers what a user may do."""

from datetime import datetime

from django.contrib.auth.models import User
from django.db import transaction

from accounts.models import Grant
from accounts.services.user import groups_named
from kernel.access import Role
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput


@transaction.atomic
def grant_give(*, deployment: str, role: Role, actor: str, now: datetime, user: str = "", group: str = "") -> Grant:
    """A role for a deployment, to a user or to a group; one that they had there is replaced. The deployment may be one
    that comes later.

    Raises:
        InvalidInput: not exactly one of user and group, or one that does not exist.
    """
    if bool(user) == bool(group):
        raise InvalidInput(field="user", rule="one", message="name a user or a group, and not both")
    account = User.objects.filter(username=user).first() if user else None
    if user and account is None:
        raise InvalidInput(field="user", rule="exists", message=f"there is no user {user!r}")
    team = groups_named([group])[0] if group else None
    row, _ = Grant.objects.update_or_create(
        user=account,
        group=team,
        deployment=deployment,
        defaults={"role": role.value, "created_by": actor, "created_at": now},
    )
    _event("given", row, actor, now)
    return row


@transaction.atomic
def grant_take(*, grant_id: int, actor: str, now: datetime) -> None:
    """End a grant.

    Raises:
        Conflict: it has ended.
    """
    grant = Grant.objects.select_related("user", "group").filter(pk=grant_id).first()
    if grant is None:
        raise Conflict("this grant has ended already")
    _event("taken", grant, actor, now)
    grant.delete()


def _event(what: str, grant: Grant, actor: str, now: datetime) -> None:
    event_record(
        kind=f"grant.{what}",
        message=f"{grant} {what} by {actor}",
        now=now,
        actor=actor,
        deployment=grant.deployment,
    )
