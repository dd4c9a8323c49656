"""Widens what engines may be given, by one name for one engine: by an admin, with a reason, and where the rule requires
it only once a second admin approved. Taking an allowance back needs no approval."""

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.db import transaction

from accounts.models import Approval
from accounts.services.approval import ApprovalRequest, FleetAction, approval_request, requires_approval
from engine_agent.protocol.engine_options import is_agents_own, option_name, refused_option, refused_variable
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from models_registry.models import EngineAllowance
from models_registry.planning.engine_arguments import ENGINES
from models_registry.planning.fields import one_of

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_OPTION = re.compile(r"--[a-z0-9][a-z0-9-]*")


def engine_allowance_request(
    *, engine: str, name: str, why: str, actor: str, now: datetime
) -> EngineAllowance | Approval:
    """Allow an engine an option or a variable or, where that requires approval, request it.

    Raises:
        InvalidInput: no such engine, no name of an option or variable, one that only agents set, or no reason.
        Conflict: it is allowed already.
    """
    name = _checked_name(engine, name)
    if not why.strip():
        raise InvalidInput(field="why", rule="required", message=f"Give a reason: why may {engine} be given {name}?")
    if not requires_approval(WIDEN.name):
        return _allow(engine, name, why, actor, now)
    summary = f"allow engine {engine} {name}"
    arguments = {"engine": engine, "name": name, "why": why}
    return approval_request(WIDEN.name, ApprovalRequest(summary, arguments, actor, now, why))


@transaction.atomic
def engine_allowance_withdraw(*, allowance_id: int, actor: str, now: datetime) -> None:
    """Take an allowance back: from now on no version is written with it and no engine started. What runs goes on."""
    row = EngineAllowance.objects.select_for_update().get(pk=allowance_id)
    row.delete()
    _event("withdrawn", f"{row} is not allowed any more, by {actor}", row, actor, now)


def _checked_name(engine: str, name: str) -> str:
    if engine not in ENGINES:
        raise InvalidInput(field="engine", rule="choice", message=f"engine is {engine!r}; {one_of(ENGINES, engine)}")
    is_variable = _VARIABLE.fullmatch(name) is not None
    known = name if is_variable else option_name(name)
    if not is_variable and not _OPTION.fullmatch(known):
        message = f"name is {name!r}; it must be an option, --trust-remote-code, or a variable, LD_PRELOAD"
        raise InvalidInput(field="name", rule="name", message=message)
    if is_agents_own(known):
        raise InvalidInput(field="name", rule="allowed", message=f"{known} is set by agents alone; nobody can allow it")
    refused = refused_variable(engine, known) if is_variable else refused_option(engine, known, None)
    if refused is None:
        raise Conflict(f"engine {engine} may be given {known} already")
    return known


@transaction.atomic
def _allow(engine: str, name: str, why: str, actor: str, now: datetime) -> EngineAllowance:
    row, created = EngineAllowance.objects.get_or_create(
        engine=engine, name=name, defaults={"why": why[:200], "actor": actor[:64], "created_at": now}
    )
    if not created:
        raise Conflict(f"engine {engine} may be given {name} already, by {row.actor}: {row.why}")
    _event("added", f"{row} is allowed by {actor}: {why}", row, actor, now)
    return row


def _event(what: str, message: str, row: EngineAllowance, actor: str, now: datetime) -> None:
    event_record(
        kind=f"engine_allowance.{what}",
        message=message,
        tone=Tone.WARN if what == "added" else Tone.OK,
        now=now,
        actor=actor[:64],
        detail={"engine": row.engine, "name": row.name},
    )


def _perform(arguments: Mapping[str, Any], actor: str, now: datetime) -> str:
    return f"{_allow(now=now, actor=actor, **arguments)} is allowed"


WIDEN = FleetAction("widen-engine-options", "Allow an engine an option or variable beyond the lists", _perform)
