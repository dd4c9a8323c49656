"""Where a laboratory keeps its things, and what its hosts see of the real one. It reads and changes nothing."""

import importlib.util
import os
import pwd
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lab.hosts.file_tree import OWN
from lab.hosts.topology import Role

CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Places:
    """`home`: the laboratory's folder. `cache`: engines and weights, which hosts of the control plane see. `python`:
    the interpreter that every host has, without any package. `faketime`: the library, if it is installed."""

    home: Path
    cache: Path
    python: Path
    faketime: Path | None
    uid: int
    gid: int

    @property
    def socket(self) -> Path:
        return self.home / "control.sock"

    @property
    def log(self) -> Path:
        """What the laboratory's own processes say."""
        return self.home / "lab.log"

    @property
    def record(self) -> Path:
        """Which laboratory runs: its pid, when that began, its topology."""
        return self.home / "lab.json"

    def files_of(self, host: str) -> Path:
        return self.home / "hosts" / host / "files"

    def given_to(self, host: str) -> Path:
        """What the laboratory gives it and it cannot change."""
        return self.home / "hosts" / host / "given"

    def user(self) -> tuple[str, str]:
        """Name and home of whom a host's processes run as. One who is not root here is not root there."""
        try:
            name = pwd.getpwuid(self.uid).pw_name
        except KeyError:
            name = f"u{self.uid}"
        return name, "/root" if self.uid == 0 else f"/home/{name}"

    def views(self, role: Role) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the real host's folders that a host of this role sees, and those hidden from it. Only hosts of the
        control plane and the database see this checkout; all others have only what they have fetched."""
        prefix = str(self.python.parent.parent)
        environment = [str(Path(sys.prefix).resolve())] if sys.prefix != sys.base_prefix else []
        ours = (str(CHECKOUT), str(self.cache), *environment)
        if role in {Role.CONTROL, Role.DATABASE}:
            return tuple(path for path in (prefix, *ours) if is_within(path, OWN)), ()
        hidden = tuple(path for path in (*ours, str(self.home)) if not is_within(path, OWN))
        return (prefix,) if is_within(prefix, (*OWN, *hidden)) else (), hidden


def is_within(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def read_places(environ: Mapping[str, str] = os.environ) -> Places:
    """The places of this user's laboratory: SWITCHYARD_HOME and SWITCHYARD_CACHE move them, as with `make up`."""
    home = Path(environ.get("SWITCHYARD_HOME") or CHECKOUT / ".switchyard").expanduser().resolve()
    cache = Path(environ.get("SWITCHYARD_CACHE") or CHECKOUT / ".cache").expanduser().resolve()
    python = Path(sys.base_prefix).resolve() / "bin" / "python3"
    return Places(home / "lab", cache, python, faketime_library(), os.geteuid(), os.getegid())


def faketime_library() -> Path | None:
    found = importlib.util.find_spec("libfaketime")
    if found is None or not found.submodule_search_locations:
        return None
    library = Path(found.submodule_search_locations[0], "vendor/libfaketime/src/libfaketime.so.1")
    return library if library.is_file() else None
