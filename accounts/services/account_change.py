"""Changes of accounts, as a person requests them. While any action takes two people, so does whatever gives somebody a
way to be a second person: an admin more, or a password on an account that is not one's own, or one without its second
factor. So does whatever takes power from another admin, who might be the second person. What a change gives and takes
is seen from its outcome, by making it and taking it back, so that no way can be forgotten here.
"""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from django.contrib.auth.models import User
from django.db import transaction

from accounts.selectors import Power, powers_beside, powers_of_others, users_with_second_factor
from accounts.services.approval import ApprovalRequest, FleetAction, approval_request, is_two_person_rule_on
from accounts.services.grant import grant_give, grant_take
from accounts.services.group import group_change, group_create, group_delete
from accounts.services.second_factor import second_factors_remove
from accounts.services.user import HashedPassword, service_account_create, user_change, user_create
from kernel.access import Role

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
}


class _TakesTwo(Exception):
    """Takes the change back; `password` is the hash that it set, "" for none."""

    def __init__(self, powers: list[Power], password: str) -> None:
        super().__init__()
        self.powers = powers
        self.password = password


def account_change(change: str, *, actor: str, now: datetime, why: str = "", **fields: Any) -> Any:
    """Carry out one of `CHANGES` and return what its service does, or an `Approval` where a second person has to agree.

    Raises:
        Refusal: as the service does, also where it would only be requested.
    """
    if not is_two_person_rule_on():
        return CHANGES[change](actor=actor, now=now, **fields)
    try:
        return _carry_out(change, actor, now, fields)
    except _TakesTwo as found:
        name = fields.get("username") or fields.get("name") or fields.get("deployment", "")
        summary = f"{change} {name}: {', '.join(power.described for power in found.powers)}".replace(" :", ":")
        plain = {key: part for key, part in fields.items() if key != "password"}
        secrets = {"password": found.password} if found.password else {}
        request = ApprovalRequest(summary, {"change": change, "fields": plain}, actor, now, why, secrets=secrets)
        return approval_request(ACCOUNTS.name, request)


@transaction.atomic
def _carry_out(change: str, actor: str, now: datetime, fields: Mapping[str, Any]) -> Any:
    before, guarded, others = powers_beside(actor), users_with_second_factor(actor), powers_of_others(actor)
    result = CHANGES[change](actor=actor, now=now, **fields)
    gained = powers_beside(actor) - before
    gained |= {Power("factor", name) for name in guarded - users_with_second_factor(actor)}
    if powers := sorted(gained) + sorted(others - powers_of_others(actor)):
        user = User.objects.filter(username=fields.get("username", "")).first() if fields.get("password") else None
        raise _TakesTwo(powers, user.password if user is not None else "")
    return result


def _perform(arguments: Mapping[str, Any], actor: str, now: datetime) -> str:
    fields = dict(arguments["fields"])
    if fields.get("role") is not None:
        fields["role"] = Role(fields["role"])
    if arguments.get("password"):
        fields["password"] = HashedPassword(arguments["password"])
    CHANGES[arguments["change"]](actor=actor, now=now, **fields)
    return "done"


ACCOUNTS = FleetAction(
    "change-accounts",
    "Make or remove an admin, set another's password or remove a second factor",
    _perform,
    settable=False,
)
