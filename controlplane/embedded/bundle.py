"""What a host of the control plane hands to the next one: one file, readable by its owner only. Whoever has it has the
fleet."""

import hashlib
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from controlplane.embedded.configuration import CHECKOUT, CannotStart
from controlplane.embedded.membership import Membership, membership_of
from controlplane.embedded.state_directory import Secrets, write_private_json
from engine_agent.protocol.strict_json import strict_loads

FORMAT = 1
KIND = "switchyard control host"
_MOST_BYTES = 256 * 1024
_PACKAGES = ("accounts", "audit", "controlplane", "engine_agent", "fleet", "kernel", "models_registry", "traffic")


@dataclass(frozen=True, slots=True)
class Bundle:
    """`membership` is that of the host that joins; `token` the operator's; times in seconds since 1970."""

    release: str
    made_at_s: float
    expires_at_s: float
    secrets: Secrets
    token: str
    membership: Membership


def write_bundle(path: Path, bundle: Bundle) -> None:
    """Whole or not at all."""
    write_private_json(path, {"kind": KIND, "format": FORMAT, **asdict(bundle)})


def read_bundle(path: Path) -> Bundle:
    """The bundle, checked by what it says itself.

    Raises:
        CannotStart: it is none, of another release, or too old.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError("it is too large")
        bundle = _bundle(strict_loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise CannotStart(
            f"{path} is no bundle for a control host ({error}): make one on the first host with"
            " `python -m controlplane.embedded invite --address ADDRESS FILE`."
        ) from error
    if bundle.release != this_release():
        raise CannotStart(
            f"{path} is of another release ({bundle.release}; this checkout is {this_release()}): have both hosts run"
            " the same one."
        )
    age_s = time.time() - bundle.made_at_s
    if time.time() > bundle.expires_at_s:
        raise CannotStart(f"{path} was made {age_s / 60:.0f} minutes ago and has expired: make a new one by `invite`.")
    return bundle


def _bundle(stored: Any) -> Bundle:
    if not isinstance(stored, dict) or stored.get("kind") != KIND:
        raise ValueError("it does not say that it is one")
    if stored.get("format") != FORMAT:
        raise ValueError(f"it has format {stored.get('format')!r}, and this release reads {FORMAT}")
    try:
        return Bundle(
            release=str(stored["release"]),
            made_at_s=float(stored["made_at_s"]),
            expires_at_s=float(stored["expires_at_s"]),
            secrets=Secrets(**{name: str(text) for name, text in stored["secrets"].items()}),
            token=str(stored["token"]),
            membership=membership_of(stored["membership"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it lacks {error}") from error


@cache
def this_release() -> str:
    """What tells this checkout's code from another's: 12 hexadecimal digits."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted((CHECKOUT / package).rglob("*.py")):
            digest.update(f"{path.relative_to(CHECKOUT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
