"""Identities of one fleet for rigs whose parts connect over TLS: created once per process."""

import functools
import tempfile
from pathlib import Path

from engine_agent.node.identity import Identity
from engine_agent.protocol.identity import IdentityKind
from tests.engine_agent.authority import FleetOfTests

_homes = tempfile.TemporaryDirectory(prefix="switchyard-tls-")


@functools.cache
def fleet_of_rigs() -> FleetOfTests:
    """The fleet of every part of a rig."""
    return FleetOfTests()


@functools.cache
def identity_of(kind: IdentityKind, subject: str) -> Identity:
    """The shared identity of this part: do not renew or revoke it."""
    return fleet_of_rigs().certify(Path(_homes.name) / f"{kind}-{subject}", kind, subject)
