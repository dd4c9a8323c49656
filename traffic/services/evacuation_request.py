"""Evacuations for real, where a rule asks for two people: the request of one, carried out when another approved it."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from accounts.models import Approval
from accounts.services.approval import Asked, FleetAction, approval_ask, takes_two
from traffic.models import TrafficOverride
from traffic.planning.overrides import EvacuationMode
from traffic.services.override import Terms, describe_order, evacuation_check, evacuation_start


def evacuation_ask(
    *, region: str, mode: str, confirm: str, terms: Terms, deployment: str = ""
) -> TrafficOverride | Approval:
    """Evacuate, or, where it takes two people, ask for the second. Drills move little and take one.

    Raises:
        InvalidInput: as `evacuation_start` does.
    """
    if mode != EvacuationMode.REAL or not takes_two(EVACUATE.name):
        return evacuation_start(region=region, mode=mode, confirm=confirm, terms=terms, deployment=deployment)
    order = evacuation_check(region=region, mode=mode, confirm=confirm, terms=terms, deployment=deployment)
    arguments = {"region": region, "deployment": deployment, "duration_s": terms.duration_s, "why": terms.why}
    asked = Asked(describe_order(order), arguments, terms.actor, terms.now, terms.why, deployment, region)
    return approval_ask(EVACUATE.name, asked)


def _perform(arguments: Mapping[str, Any], actor: str, now: datetime) -> str:
    terms = Terms(duration_s=arguments["duration_s"], why=arguments["why"], actor=actor, now=now)
    region, deployment = arguments["region"], arguments["deployment"]
    mode = EvacuationMode.REAL.value
    order = evacuation_start(region=region, mode=mode, confirm=region, terms=terms, deployment=deployment)
    return f"{describe_order(order)} begun"


EVACUATE = FleetAction("evacuate-region", "Evacuate a region for real", _perform)
