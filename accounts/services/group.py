"""Makes, changes and removes groups. A group gives its members a role, and may take them from the identity provider."""

from datetime import datetime

from django.contrib.auth.models import Group
from django.db import transaction

from accounts.models import GroupRole
from accounts.services.user import require_an_admin
from kernel.access import Role
from kernel.events import event_record
from kernel.refusals import Conflict


@transaction.atomic
def group_create(*, name: str, role: Role, actor: str, now: datetime, claim: str = "") -> GroupRole:
    """A group without members.

    Raises:
        Conflict: the name is taken.
    """
    group, created = Group.objects.get_or_create(name=name)
    if not created and GroupRole.objects.filter(group=group).exists():
        raise Conflict(f"there is a group {name} already; change it, or choose another name")
    row = GroupRole.objects.create(group=group, role=role.value, claim=claim)
    event_record(kind="group.created", message=f"group {row} created by {actor}", now=now, actor=actor)
    return row


@transaction.atomic
def group_change(
    *, name: str, actor: str, now: datetime, role: Role | None = None, claim: str | None = None
) -> GroupRole:
    """Change what is given.

    Raises:
        Conflict: no admin would be left.
    """
    row = GroupRole.objects.select_for_update().get(group__name=name)
    row.role = row.role if role is None else role.value
    row.claim = row.claim if claim is None else claim
    row.save()
    require_an_admin()
    event_record(kind="group.changed", message=f"group {row} changed by {actor}", now=now, actor=actor)
    return row


@transaction.atomic
def group_delete(*, name: str, actor: str, now: datetime) -> None:
    """Remove a group; its members keep what other groups give them, its grants end.

    Raises:
        Conflict: no admin would be left.
    """
    Group.objects.get(name=name, role__isnull=False).delete()
    require_an_admin()
    event_record(kind="group.deleted", message=f"group {name} deleted by {actor}", now=now, actor=actor)
