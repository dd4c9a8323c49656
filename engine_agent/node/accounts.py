"""Accounts of an agent's processes. An agent that runs as root starts engines, cell proxies and HAProxy under separate
accounts; another agent starts everything as itself. This module chooses accounts and prepares folders; `confine`
changes the account."""

import os
import pwd
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from engine_agent.engines.base import Launch

FIRST_UID_VARIABLE = "SWITCHYARD_SERVICE_UIDS"
FIRST_UID = 60900
"""First of three uids for services without an account. They belong to no user, package or systemd range
(https://systemd.io/UIDS-GIDS)."""
CONFINE = Path(__file__).with_name("confine.py")
LONGEST_LINK_CHAIN = 40


class Service(StrEnum):
    """A service with its own account; the value is the name of the account."""

    ENGINE = "switchyard-engine"
    PROXY = "switchyard-proxy"
    INGRESS = "switchyard-ingress"


@dataclass(frozen=True, slots=True)
class Account:
    name: str
    uid: int
    gid: int


def service_account(service: Service, environment: Mapping[str, str] = os.environ) -> Account | None:
    """The account of a service, or None to run as the agent does. Raises ValueError if `SWITCHYARD_SERVICE_UIDS` is not
    a number."""
    if os.geteuid() != 0:
        return None
    stated = environment.get(FIRST_UID_VARIABLE) or str(FIRST_UID)
    if not stated.isdecimal():
        raise ValueError(
            f"{FIRST_UID_VARIABLE} is {stated!r}; it must be the first of three uids, or 0 for no accounts"
        )
    if int(stated) == 0:
        return None
    try:
        known = pwd.getpwnam(service)
        return Account(service, known.pw_uid, known.pw_gid)
    except KeyError:
        uid = int(stated) + list(Service).index(service)
        return Account(service, uid, uid)


def confined(launch: Launch, account: Account, home: Path) -> Launch:
    """The launch under the account, with `home` as its home. Creates the folders that it writes, owned by the account.
    Raises OSError if a folder cannot be created."""
    kept = (home, *launch.writes)
    for folder in kept:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chown(folder, account.uid, account.gid, follow_symlinks=False)
    programs = (Path(launch.argv[0]), *launch.programs)
    code = [Path(part) for part in launch.env.get("PYTHONPATH", "").split(":") if part.startswith("/")]
    shown = sorted({*(folder for program in programs for folder in program_folders(program)), *code, *launch.reads})
    argv = (
        *(sys.executable, "-I", "-S", str(CONFINE), "--uid", str(account.uid), "--gid", str(account.gid)),
        *(part for folder in kept for part in ("--keep", str(folder))),
        *(part for folder in shown if folder.is_dir() for part in ("--show", str(folder))),
        "--",
        *launch.argv,
    )
    # libraries look up the user's name, and a plain uid has none
    names = {"HOME": str(home), "USER": account.name, "LOGNAME": account.name}
    return Launch(argv, {**launch.env, **names}, launch.reads, launch.writes, launch.programs)


def without_new_rights() -> tuple[str, ...]:
    """The prefix of a command line whose processes must never gain further rights."""
    return (sys.executable, "-I", "-S", str(CONFINE), "--") if os.geteuid() == 0 else ()


def open_way(folder: Path, has_accounts: bool) -> None:
    """Lets accounts pass through a folder of the agent to their own folders; only the owner can read the rest."""
    if has_accounts:
        folder.chmod(0o711)


def program_folders(program: Path) -> list[Path]:
    """The installation that a program belongs to, with those of its links: `/x/bin/python` needs `/x`."""
    folders, path = [], Path(os.path.abspath(program))
    for _ in range(LONGEST_LINK_CHAIN):
        folders.append(path.parent.parent)
        if not path.is_symlink():
            break
        path = Path(os.path.normpath(path.parent / os.readlink(path)))
    return [*folders, Path(os.path.realpath(program)).parent.parent]
