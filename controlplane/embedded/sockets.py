"""Where the embedded servers' unix sockets lie: a private folder with a short name, because a socket's path may not
exceed 107 bytes while a checkout's may. The name follows from the home alone, so every command finds it again."""

import hashlib
import os
import shutil
import stat
from pathlib import Path

from controlplane.embedded.account import Account
from controlplane.embedded.errors import CannotStart

_DIGEST_CHARS = 10


def socket_folder(home: Path) -> Path:
    """The folder for the sockets of `home`, for this user."""
    digest = hashlib.sha256(str(home).encode()).hexdigest()[:_DIGEST_CHARS]
    return Path("/tmp") / f"switchyard-{os.getuid()}-{digest}"  # noqa: S108 - made 0700 and its owner checked below


def prepare_socket_folder(folder: Path, account: Account) -> None:
    """Make `folder` exist, private to `account`.

    Raises:
        CannotStart: somebody else's folder, or a link, lies there.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in {os.geteuid(), account.uid}:
        raise CannotStart(f"{folder} is not a folder of ours (owner uid {found.st_uid}): remove it and try again.")
    if found.st_uid != account.uid:
        os.chown(folder, account.uid, account.gid, follow_symlinks=False)
    folder.chmod(0o700)


def remove_socket_folder(folder: Path) -> None:
    """Remove the folder with whatever the servers left in it; nothing there is fine."""
    shutil.rmtree(folder, ignore_errors=True)
