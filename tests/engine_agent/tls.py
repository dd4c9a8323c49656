"""Identities of one fleet for rigs whose parts meet over TLS: made once in a process, and gone with it."""

import functools
import tempfile
from pathlib import Path

from engine_agent.node.identity import Identity
from engine_agent.protocol.identity import IdentityKind
from tests.engine_agent.authority import FleetOfTests

_homes = tempfile.TemporaryDirectory(prefix="switchyard-tls-")


@functools.cache
def fleet_of_rigs() -> FleetOfTests:
    """The fleet that every part of a rig is of."""
    return FleetOfTests()


@functools.cache
def identity_of(kind: IdentityKind, subject: str) -> Identity:
    """The identity of this part, which all who ask for it share: do not renew or revoke it."""
    return fleet_of_rigs().certify(Path(_homes.name) / f"{kind}-{subject}", kind, subject)
