"""Ends machines that providers run for nobody: their call was lost, or their node's record is gone."""

import logging
from collections.abc import Collection
from datetime import datetime

from fleet.models import Node
from fleet.planning.orphans import OrphanPlan, plan_orphans
from fleet.planning.snapshot import ProviderStatus
from fleet.providers import provider_named
from fleet.providers.base import ProviderError
from kernel.events import event_record
from kernel.tones import Tone

log = logging.getLogger(__name__)


def orphans_end(provider: str, before: Collection[str], *, now: datetime) -> frozenset[str]:
    """Look at all that a provider runs, and end what two looks found to be nobody's. Returns the suspects of this one.

    Blocks as long as the provider does; what it does not answer is looked at again.
    """
    try:
        statuses = provider_named(provider).describe_all()
    except ProviderError as error:
        log.warning("provider %s did not say what it runs: %s", provider, error)
        return frozenset(before)
    running = [node for node, status in statuses.items() if status is not ProviderStatus.GONE]
    # A retired node may run until its provider has confirmed its end.
    known = Node.objects.filter(id__in=running).values_list("id", "terminated_at")
    plan = plan_orphans(running, {node: ended is None for node, ended in known}, before)
    if plan.held:
        log.error("provider %s: %s", provider, plan.held)
    _end(provider, plan, now)
    return plan.suspects


def _end(provider: str, plan: OrphanPlan, now: datetime) -> None:
    for node in plan.end:
        try:
            provider_named(provider).terminate(node)
        except ProviderError as error:
            log.warning("orphan %s of provider %s: %s", node, provider, error)
            continue
        event_record(
            kind="machine.orphan_ended",
            message=f"{node} of provider {provider} belonged to nobody; ended it",
            tone=Tone.WARN,
            now=now,
            node=node,
        )
