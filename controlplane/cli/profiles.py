"""Profiles: servers with their tokens, in a file that only its owner may read. Never prints a token."""

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from controlplane.cli.errors import Failure
from controlplane.cli.exit_codes import ExitCode


@dataclass(frozen=True, slots=True)
class Profile:
    server: str
    token: str


@dataclass(frozen=True, slots=True)
class Profiles:
    """`current`: the default profile; empty: none."""

    current: str = ""
    known: Mapping[str, Profile] = field(default_factory=dict)

    def with_profile(self, name: str, profile: Profile) -> "Profiles":
        return Profiles(name, {**self.known, name: profile})

    def without(self, name: str) -> "Profiles":
        left = {known: profile for known, profile in self.known.items() if known != name}
        return Profiles("" if self.current == name else self.current, left)


def profiles_file(environ: Mapping[str, str]) -> Path:
    """Path of the file: `$XDG_CONFIG_HOME/switchyard/profiles.json`, else below `~/.config`."""
    base = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".config")
    return Path(base) / "switchyard" / "profiles.json"


def read_profiles(path: Path) -> Profiles:
    """The stored profiles, empty without a file. Raises Failure if other users may read the file, or it is damaged."""
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise Failure(f"{path} has tokens, and other users may read it: chmod 600 {path}", ExitCode.USAGE)
        stored = json.loads(path.read_text())
        known = {str(name): Profile(**profile) for name, profile in stored["profiles"].items()}
        return Profiles(str(stored.get("current", "")), known)
    except FileNotFoundError:
        return Profiles()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise Failure(f"{path} is damaged ({error}): repair or delete it", ExitCode.USAGE) from None


def write_profiles(path: Path, profiles: Profiles) -> None:
    """Replace the file atomically, readable only by its owner (0600, in a folder of 0700)."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    content = {"current": profiles.current, "profiles": {name: asdict(one) for name, one in profiles.known.items()}}
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(content, file, indent=2)
    fresh.replace(path)
