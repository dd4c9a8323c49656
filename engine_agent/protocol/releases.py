"""Which release of the agent this is. A release is what was packed together: its source, and the versions of what it
imports; its id names those. An agent that runs from a checkout is of none."""

import re
from pathlib import Path

import msgspec

RELEASE_FILE = "release.json"
"""Beside the folder `engine_agent` of a release."""
_ID = re.compile(r"[0-9a-f]{16}")


class Release(msgspec.Struct, frozen=True):
    """What a release says of itself. `version` is the project's, `protocol` what its agents speak."""

    id: str
    version: str
    protocol: int


def is_release_id(text: str) -> bool:
    """Whether a release can be called so."""
    return _ID.fullmatch(text) is not None


def release_in(folder: Path) -> Release | None:
    """The release that was unpacked into a folder; None if none was, such as for a checkout."""
    try:
        found = msgspec.json.decode((folder / RELEASE_FILE).read_bytes(), type=Release)
    except (OSError, msgspec.DecodeError):
        return None
    return found if is_release_id(found.id) else None


VERSION_MOST = 32
"""Characters of an agent's version that are kept: what `version_text` makes has fewer."""


def version_text(version: str, release: str) -> str:
    """How an agent states its version: `0.1.0+` and the release's id; without a release the version alone."""
    return f"{version}+{release}" if release else version


def release_of(agent_version: str) -> str:
    """The id in what `version_text` made; "" if there is none."""
    found = agent_version.partition("+")[2]
    return found if is_release_id(found) else ""
