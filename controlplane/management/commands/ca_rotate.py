"""Moves the fleet to another certificate authority, and says how far that is."""

import time
from typing import Any

from django.core.management.base import CommandError, CommandParser

from audit.commands import AuditedCommand
from fleet.agents.planner import AuthorityState
from fleet.agents.services.authority import (
    RotationStep,
    authority_advance,
    authority_ensure,
    authority_rotate,
    rotation_states,
)
from kernel import clock
from kernel.refusals import Conflict

POLL_S = 1.0
NAMED = 10


class Command(AuditedCommand):
    one_transaction = False  # agents receive each step while it waits for them
    help = (
        "Make the next certificate authority and wait until it signs. It signs once every agent that holds a"
        " certificate trusts it; the previous one is trusted until its last certificate has expired, a day later."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--wait-s", type=float, default=120.0, help="seconds to wait until the next one signs")
        parser.add_argument("--status", action="store_true", help="only say how far a rotation is")
        parser.add_argument(
            "--force",
            action="store_true",
            help="let the next one sign though some agents do not know it; they must join anew",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        authority_ensure(clock.now())
        if not options["status"]:
            self._begin()
        deadline = time.monotonic() + (0.0 if options["status"] else options["wait_s"])
        said = ""
        while True:
            step = authority_advance(now=clock.now(), force=options["force"])
            states = rotation_states()
            if (line := _progress(states, step)) != said:
                self.stdout.write(line)
                self.stdout.flush()
                said = line
            if AuthorityState.NEXT not in states or options["status"]:
                return
            if time.monotonic() >= deadline:
                raise CommandError(
                    f"not all agents trust the next authority after {options['wait_s']:.0f} s; the rotation continues"
                    " when they connect, or immediately with --force"
                )
            time.sleep(POLL_S)

    def _begin(self) -> None:
        try:
            row = authority_rotate(actor="manage.py ca_rotate", now=clock.now())
        except Conflict as refusal:
            self.stdout.write(str(refusal))
        else:
            self.stdout.write(f"{row} is made; agents receive it now")


def _progress(states: list[AuthorityState], step: RotationStep) -> str:
    if AuthorityState.NEXT in states:
        named = ", ".join(step.unaware[:NAMED]) + (", …" if len(step.unaware) > NAMED else "")
        return f"the next authority signs once these trust it ({len(step.unaware)}): {named}"
    if AuthorityState.PREVIOUS in states:
        return "the new authority signs; the previous one is trusted until its last certificate has expired"
    return "one authority; no rotation is under way"
