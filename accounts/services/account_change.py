"""Changes of accounts that people request, including groups and grants.

While any action requires two-person approval, so do changes that could create a second person (a new admin, another
user's password, a login without its second factor, another identity provider) and changes that take the role from
another admin. To find them, a change is made and rolled back, and the rights before and after are compared."""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from django.contrib.auth.models import Group, User
from django.db import transaction

from accounts.models import Grant, GroupRole
from accounts.selectors import Right, rights_of_other_people, rights_without_own_password, users_with_second_factor
from accounts.services.approval import ApprovalRequest, FleetAction, approval_request, is_two_person_rule_on
from accounts.services.identity_provider import SealedSecret, provider_remove, provider_row, provider_set
from accounts.services.second_factor import second_factors_remove
from accounts.services.user import (
    HashedPassword,
    groups_named,
    require_an_admin,
    service_account_create,
    user_change,
    user_create,
)
from kernel.access import Role
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput


@transaction.atomic
def group_create(*, name: str, role: Role, actor: str, now: datetime, claim: str = "") -> GroupRole:
    """A group without members. Raises Conflict if the name is taken."""
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
    """Change the given fields. Raises Conflict if no admin would be left."""
    row = GroupRole.objects.select_for_update().get(group__name=name)
    row.role = row.role if role is None else role.value
    row.claim = row.claim if claim is None else claim
    row.save()
    require_an_admin()
    event_record(kind="group.changed", message=f"group {row} changed by {actor}", now=now, actor=actor)
    return row


@transaction.atomic
def group_delete(*, name: str, actor: str, now: datetime) -> None:
    """Remove a group with its grants. Raises Conflict if no admin would be left."""
    Group.objects.get(name=name, role__isnull=False).delete()
    require_an_admin()
    event_record(kind="group.deleted", message=f"group {name} deleted by {actor}", now=now, actor=actor)


@transaction.atomic
def grant_give(*, deployment: str, role: Role, actor: str, now: datetime, user: str = "", group: str = "") -> Grant:
    """Grant a role for a deployment to a user or a group, and replace an earlier grant. The deployment need not exist
    yet. Raises InvalidInput if it is not exactly one of user and group, or one that does not exist."""
    if bool(user) == bool(group):
        raise InvalidInput(field="user", rule="one", message="name either a user or a group")
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
    _grant_event("given", row, actor, now)
    return row


@transaction.atomic
def grant_take(*, grant_id: int, actor: str, now: datetime) -> None:
    """End a grant. Raises Conflict if it has ended."""
    grant = Grant.objects.select_related("user", "group").filter(pk=grant_id).first()
    if grant is None:
        raise Conflict("this grant has ended already")
    _grant_event("taken", grant, actor, now)
    grant.delete()


def _grant_event(what: str, grant: Grant, actor: str, now: datetime) -> None:
    event_record(
        kind=f"grant.{what}",
        message=f"{grant} {what} by {actor}",
        now=now,
        actor=actor,
        deployment=grant.deployment,
    )


SECRETS = frozenset({"password", "client_secret"})
"""Fields that requests for approval keep apart, hashed or encrypted, and never show."""
CHANGES: Mapping[str, Callable[..., Any]] = {
    "create user": user_create,
    "change user": user_change,
    "create service account": service_account_create,
    "remove second factors": second_factors_remove,
    "create group": group_create,
    "change group": group_change,
    "delete group": group_delete,
    "give grant": grant_give,
    "take grant": grant_take,
    "set identity provider": provider_set,
    "remove identity provider": provider_remove,
}


class _NeedsApproval(Exception):
    """Rolls the change back. `password`: the hash that it set, or ""; `client_secret`: the encrypted one, or ""."""

    def __init__(self, rights: list[Right], password: str, client_secret: str) -> None:
        super().__init__()
        self.rights = rights
        self.password = password
        self.client_secret = client_secret


def account_change(change: str, *, actor: str, now: datetime, why: str = "", **fields: Any) -> Any:
    """Make one of `CHANGES` and return the result of its service, or an `Approval` if a second person must approve.
    Raises Refusal if the service does, also for a change that needs approval."""
    if not is_two_person_rule_on():
        return CHANGES[change](actor=actor, now=now, **fields)
    try:
        return _carry_out(change, actor, now, fields)
    except _NeedsApproval as found:
        name = fields.get("username") or fields.get("name") or fields.get("deployment", "")
        summary = f"{change} {name}: {', '.join(right.described for right in found.rights)}".replace(" :", ":")
        plain = {key: part for key, part in fields.items() if key not in SECRETS}
        secrets = {"password": found.password} if found.password else {}
        if "client_secret" in fields:
            secrets["client_secret"] = found.client_secret
        request = ApprovalRequest(summary, {"change": change, "fields": plain}, actor, now, why, secrets=secrets)
        return approval_request(ACCOUNTS.name, request)


@transaction.atomic
def _carry_out(change: str, actor: str, now: datetime, fields: Mapping[str, Any]) -> Any:
    before, guarded, others = (
        rights_without_own_password(actor),
        users_with_second_factor(actor),
        rights_of_other_people(actor),
    )
    result = CHANGES[change](actor=actor, now=now, **fields)
    gained = rights_without_own_password(actor) - before
    gained |= {Right("factor", name) for name in guarded - users_with_second_factor(actor)}
    if rights := sorted(gained) + sorted(others - rights_of_other_people(actor)):
        user = User.objects.filter(username=fields.get("username", "")).first() if fields.get("password") else None
        sealed = provider_row().sealed_secret if fields.get("client_secret") else ""
        raise _NeedsApproval(rights, user.password if user is not None else "", sealed)
    return result


def _perform(arguments: Mapping[str, Any], actor: str, now: datetime) -> str:
    fields = dict(arguments["fields"])
    if fields.get("role") is not None:
        fields["role"] = Role(fields["role"])
    if arguments.get("password"):
        fields["password"] = HashedPassword(arguments["password"])
    if "client_secret" in arguments:
        fields["client_secret"] = SealedSecret(arguments["client_secret"])
    CHANGES[arguments["change"]](actor=actor, now=now, **fields)
    return "done"


ACCOUNTS = FleetAction(
    "change-accounts",
    "Make or remove an admin, set another user's password or remove a second factor",
    _perform,
    settable=False,
)
