"""Decides under which account the embedded servers run (PostgreSQL refuses root, so root's servers run as `nobody`) and
where their unix sockets lie: a private folder with a short name, because a socket's path may not exceed 107 bytes while
a checkout's may. The name follows from the home alone, so every command finds it again."""

import hashlib
import os
import pwd
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from controlplane.embedded.configuration import CannotStart

UNPRIVILEGED = "nobody"


@dataclass(frozen=True, slots=True)
class Account:
    """Who owns and runs the servers. `drop` names the account to change to; None: stay who we are."""

    uid: int
    gid: int
    drop: str | None


def server_account() -> Account:
    """The account for this launcher's servers. Raises CannotStart if we are root and there is no unprivileged account,
    or we have no name, which PostgreSQL needs."""
    if os.geteuid() != 0:
        _require_a_name(os.geteuid())
        return Account(uid=os.geteuid(), gid=os.getegid(), drop=None)
    try:
        entry = pwd.getpwnam(UNPRIVILEGED)
    except KeyError:
        raise CannotStart(
            f"PostgreSQL does not run as root and this machine has no account {UNPRIVILEGED!r}: "
            "run as an ordinary user, or set DATABASE_URL."
        ) from None
    return Account(uid=entry.pw_uid, gid=entry.pw_gid, drop=UNPRIVILEGED)


def _require_a_name(uid: int) -> None:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        raise CannotStart(
            f"PostgreSQL needs an account with a name and uid {uid} has none in /etc/passwd: "
            "add one, or set DATABASE_URL."
        ) from None


def is_closed_to(account: Account, path: Path) -> bool:
    """Whether a folder on the way to `path` cannot be passed by `account` (judged by the permission bits alone)."""
    return any(not _may_pass(account, folder) for folder in (path, *path.parents) if folder.is_dir())


def _may_pass(account: Account, folder: Path) -> bool:
    status = folder.stat()
    if status.st_uid == account.uid:
        return bool(status.st_mode & stat.S_IXUSR)
    if status.st_gid == account.gid:
        return bool(status.st_mode & stat.S_IXGRP)
    return bool(status.st_mode & stat.S_IXOTH)


_DIGEST_CHARS = 10


def socket_folder(home: Path) -> Path:
    """The folder for the sockets of `home`, for this user."""
    digest = hashlib.sha256(str(home).encode()).hexdigest()[:_DIGEST_CHARS]
    return Path("/tmp") / f"switchyard-{os.getuid()}-{digest}"  # noqa: S108 - made 0700 and its owner checked below


def prepare_socket_folder(folder: Path, account: Account) -> None:
    """Make `folder` exist, private to `account`. Raises CannotStart for another user's folder, or a link, lies
    there."""
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in {os.geteuid(), account.uid}:
        raise CannotStart(f"{folder} belongs to another account (uid {status.st_uid}): remove it and try again.")
    if status.st_uid != account.uid:
        os.chown(folder, account.uid, account.gid, follow_symlinks=False)
    folder.chmod(0o700)


def remove_socket_folder(folder: Path) -> None:
    """Remove the folder with whatever the servers left in it; nothing there is fine."""
    shutil.rmtree(folder, ignore_errors=True)
