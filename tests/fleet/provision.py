"""Runs a pass of the loop `fleet.provision` in the caller's thread."""

from datetime import datetime

from fleet.machines.services.orders import calls_claim
from fleet.machines.services.provisioning import call_carry_out, machines_describe
from fleet.nodes.selectors import unheard_machines
from fleet.reconcile.planning.settings import FleetSettings
from kernel import clock
from tests.fleet.rows import NOW

MANY = 1000


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        return self.now


def provision() -> None:
    """Ask about the machines in doubt, and carry out what is ordered and due."""
    for provider, nodes in unheard_machines(now=clock.now(), settings=FleetSettings()).in_doubt.items():
        machines_describe(provider, nodes)
    for calls in calls_claim(free={}, otherwise=MANY, now=clock.now()):
        call_carry_out(calls)
