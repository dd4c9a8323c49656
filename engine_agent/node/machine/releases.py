"""Installs a release of the agent on a host: download, check, unpack, test, switch, and remove older ones.

Each step leaves the running release unchanged until the next one is complete, so a kill between two steps only costs a
repetition. `switch_to` starts a trial of the new release. The script that starts the agent
(`engine_agent.node.machine.service`) goes back to the previous release if the new one does not confirm itself in time.
"""

import contextlib
import errno
import hashlib
import os
import random
import shutil
import socket
import ssl
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from pathlib import Path

from engine_agent.node import procfs
from engine_agent.node.enrolment import control_connection
from engine_agent.node.identity import Identity
from engine_agent.node.journal import write_durably
from engine_agent.node.machine.paths import HostPaths
from engine_agent.protocol.machine_messages import ReleaseOrder, is_release_id, release_in

ANSWER_LIMIT_S = 30.0
FETCH_LIMIT_S = 240.0
"""Including pauses. All hosts of a ring download together, and the control plane serves few of them at a time or may be
restarting."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 30.0
JITTER = 0.5
MOST_DIGITS = 5
TRY_LIMIT_S = 60.0
VENV_LIMIT_S = 120.0
LARGEST_BYTES = 512 * 1024**2
UNPACKED_TIMES = 6
"""Upper bound for the size of an unpacked archive: ours are compressed to a quarter."""
KEEP_FREE_BYTES = 256 * 1024**2
CHUNK_BYTES = 256 * 1024
UNREACHABLE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN})


class ReleaseTrouble(Exception):
    """A release cannot be installed; the text says why. The running release is unchanged."""


class _RetryLater(ValueError):
    """A server cannot answer now. `after_s`: its requested pause; 0: none."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


def folder_of(paths: HostPaths, order: ReleaseOrder) -> Path:
    return paths.releases / order.digest[:16]


def install(
    paths: HostPaths, order: ReleaseOrder, servers: tuple[str, ...], credential: str, cancelled: threading.Event
) -> Path:
    """Installs a release, ready for the switch; an installed one is only tested again. Blocks for a while. `cancelled`
    cancels a download when set. Raises ReleaseTrouble if something was missing or wrong; nothing of it is left."""
    if not is_release_id(order.id) or len(order.digest) != 64 or not order.digest.isalnum():
        raise ReleaseTrouble("the order names no release")
    folder = folder_of(paths, order)
    try:
        if _named(folder) != order.id:
            _clear(paths)
            _require_room(paths, order)
            beside = paths.releases / f".{folder.name}.new"
            _fetch(paths, order, servers, credential, beside / "agent.tar.gz", cancelled)
            _unpack(beside / "agent.tar.gz", beside)
            _make_environment(beside, folder)
            if _named(beside) != order.id:
                raise ReleaseTrouble(f"the archive holds release {_named(beside) or 'none'} instead of {order.id}")
            shutil.rmtree(folder, ignore_errors=True)
            beside.rename(folder)
        let_all_read(folder)
        _try(paths, folder)
    except OSError as error:
        raise ReleaseTrouble(f"release {order.id} cannot be installed: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            _clear(paths)
    return folder


def let_all_read(folder: Path) -> None:
    """Makes the code readable for the accounts of engines and cell proxies, which run it as well, despite the umask. It
    is not secret. Targets of links stay unchanged. Raises OSError if something in it cannot be changed."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else path.stat().st_mode | 0o444)


def switch_to(paths: HostPaths, folder: Path, attempt: int) -> None:
    """Makes this release the one of the next start, on trial. The caller exits afterwards. Raises OSError if the disk
    failed; the next start uses the current release."""
    before = paths.current.resolve()
    paths.trial_tries.unlink(missing_ok=True)
    # First the release to go back to, then the switch: after a kill in between, going back changes nothing.
    write_durably(paths.trial, f"{before}\n{folder} {attempt}\n".encode(), mode=0o644)
    paths.went_back.unlink(missing_ok=True)
    point(paths.current, folder)


def confirm(paths: HostPaths) -> bool:
    """Ends the trial: the running release works. Returns whether it was a new one on trial."""
    if not paths.trial.exists():
        return False
    before = Path(paths.trial.read_text(encoding="utf-8").partition("\n")[0])
    is_new = before != paths.current.resolve()
    if is_new:
        point(paths.previous, before)
    paths.trial.unlink()
    paths.trial_tries.unlink(missing_ok=True)
    return is_new


def point(link: Path, folder: Path) -> None:
    """Points a link to a folder, atomically and durably. Raises OSError if the disk failed; the link is unchanged."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(folder)
    temporary.replace(link)


def trim(paths: HostPaths) -> list[str]:
    """Removes releases except the current one, the previous one, and those with running processes; also failed
    installations. Returns their names. Do not call it during an installation."""
    if paths.trial.exists():
        return []
    _clear(paths)
    kept = {paths.current.resolve(), paths.previous.resolve()}
    running = _code_that_runs()
    gone = []
    for folder in sorted(paths.releases.iterdir()):
        whole = folder.resolve()  # processes were started by this name, wherever links lead
        if folder.is_dir() and whole not in kept and not any(str(whole) in text for text in running):
            shutil.rmtree(folder, ignore_errors=True)
            gone.append(folder.name)
    return gone


def _code_that_runs() -> list[str]:
    texts = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            texts.append(" ".join(procfs.command(int(entry.name))))
            texts.append(procfs.environment(int(entry.name)).get("PYTHONPATH", ""))
    return [text for text in texts if text]


def _named(folder: Path) -> str:
    release = release_in(folder)
    return release.id if release is not None else ""


def _clear(paths: HostPaths) -> None:
    for left in paths.releases.glob(".*.new"):
        shutil.rmtree(left, ignore_errors=True)


def _require_room(paths: HostPaths, order: ReleaseOrder) -> None:
    if not 0 < order.size_bytes <= LARGEST_BYTES:
        raise ReleaseTrouble(f"the archive has {order.size_bytes} bytes; it must have 1 to {LARGEST_BYTES}")
    free = shutil.disk_usage(paths.releases).free
    needed = order.size_bytes * UNPACKED_TIMES + KEEP_FREE_BYTES
    if free < needed:
        mib = 1024**2
        raise ReleaseTrouble(
            f"{free // mib} MiB of disk are free at {paths.releases}, but release {order.id} needs {needed // mib};"
            " free some, and upgrade again"
        )


def _fetch(
    paths: HostPaths,
    order: ReleaseOrder,
    servers: tuple[str, ...],
    credential: str,
    to: Path,
    cancelled: threading.Event,
) -> None:
    """Downloads from the first server that has it. Servers are tried again while one of them may have it soon."""
    to.parent.mkdir(parents=True, mode=0o755)
    until_s, pause_s = time.monotonic() + FETCH_LIMIT_S, SHORTEST_PAUSE_S
    while True:
        reasons, pauses_s = list[str](), list[float]()
        for server in servers:
            try:
                found = _download(server, Identity(paths.home), order, credential, to, until_s, cancelled)
            except (OSError, HTTPException, ValueError) as error:
                reasons.append(f"{server}: {error}")
                if _may_pass(error):
                    pauses_s.append(max(pause_s, error.after_s if isinstance(error, _RetryLater) else 0.0))
                continue
            if found == order.digest:
                return
            raise ReleaseTrouble(
                f"the archive of release {order.id} has SHA-256 {found[:16]}… instead of {order.digest[:16]}…; the"
                " running release stays"
            )
        wait_s = min(LONGEST_PAUSE_S, max(pauses_s, default=0.0)) * random.uniform(1, 1 + JITTER)
        if not pauses_s or time.monotonic() + wait_s > until_s:
            raise ReleaseTrouble(f"release {order.id} cannot be fetched: {'; '.join(reasons)[:400]}")
        if cancelled.wait(wait_s):
            raise _not_wanted(order)
        pause_s *= 2


def _may_pass(error: Exception) -> bool:
    passing = (_RetryLater, ConnectionError, TimeoutError, HTTPException, ssl.SSLEOFError, socket.gaierror)
    return isinstance(error, passing) or (isinstance(error, OSError) and error.errno in UNREACHABLE)


def _not_wanted(order: ReleaseOrder) -> ReleaseTrouble:
    return ReleaseTrouble(f"release {order.id} is no longer ordered")


def _download(
    server: str,
    identity: Identity,
    order: ReleaseOrder,
    credential: str,
    to: Path,
    until_s: float,
    cancelled: threading.Event,
) -> str:
    connection = control_connection(server, identity, ANSWER_LIMIT_S)
    try:
        headers = {"Authorization": f"Bearer {credential}"}
        connection.request("GET", f"/agents/releases/{order.id}/{order.digest}", headers=headers)
        answer = connection.getresponse()
        if answer.status == HTTPStatus.TOO_MANY_REQUESTS or answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            stated = answer.headers.get("Retry-After", "")
            after_s = float(stated) if stated.isdecimal() and len(stated) <= MOST_DIGITS else 0.0
            raise _RetryLater(f"it answered {answer.status}", after_s)
        if answer.status != HTTPStatus.OK:
            raise ValueError(f"it answered {answer.status}")
        return _received(answer, order, to, until_s, cancelled)
    finally:
        connection.close()


def _received(answer: HTTPResponse, order: ReleaseOrder, to: Path, until_s: float, cancelled: threading.Event) -> str:
    digest, left, stated = hashlib.sha256(), order.size_bytes, answer.length
    if stated is not None and stated > left:
        raise _too_long(order)
    with to.open("wb") as file:
        # Reads available bytes instead of complete chunks, so that a slow server cannot exceed the limit.
        while (left or stated is None) and (chunk := answer.read1(CHUNK_BYTES)):
            left -= len(chunk)
            if left < 0:
                raise _too_long(order)
            digest.update(chunk)
            file.write(chunk)
            if cancelled.is_set():
                raise _not_wanted(order)
            if time.monotonic() > until_s:
                raise TimeoutError(f"{left} of {order.size_bytes} bytes are missing after {FETCH_LIMIT_S:.0f} s")
    if left:
        missing = f"{left} of {order.size_bytes} bytes are missing"
        raise _RetryLater(missing) if stated == order.size_bytes else ValueError(missing)
    return digest.hexdigest()


def _too_long(order: ReleaseOrder) -> ReleaseTrouble:
    return ReleaseTrouble(f"the archive of release {order.id} is longer than {order.size_bytes} bytes")


def _unpack(archive: Path, folder: Path) -> None:
    try:
        with tarfile.open(archive) as tar:
            for member in _release_members(tar):
                tar.extract(member, folder, set_attrs=True)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise ReleaseTrouble(f"the archive cannot be unpacked: {error}") from None
    archive.unlink()


def _release_members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yields only regular files inside the release: our archives have no others."""
    for member in tar:
        parts = Path(member.name).parts
        if not member.isreg() or member.name.startswith("/") or ".." in parts:
            raise ValueError(f"{member.name[:80]!r} is not a file of a release")
        member.mode &= 0o755
        yield member


def _make_environment(folder: Path, final: Path) -> None:
    """As in the join script: without pip, and with the folders in it."""
    base = getattr(sys, "_base_executable", sys.executable)
    _run([base, "-m", "venv", "--without-pip", str(folder / "venv")], VENV_LIMIT_S, "an environment cannot be made")
    for packages in (folder / "venv").glob("lib/python*/site-packages"):
        (packages / "switchyard.pth").write_text(f"{final / 'site'}\n{final}\n", encoding="utf-8")


def _try(paths: HostPaths, folder: Path) -> None:
    """Lets the release check this host before anything depends on it."""
    command = [str(folder / "venv/bin/python"), "-m", "engine_agent", "check", "--code", str(paths.code)]
    _run(command, TRY_LIMIT_S, f"release {_named(folder)} does not work on this host")


def _run(command: list[str], limit_s: float, what: str) -> None:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    try:
        done = subprocess.run(
            command, env=environment, cwd="/", capture_output=True, text=True, timeout=limit_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ReleaseTrouble(f"{what}: {error}") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise ReleaseTrouble(f"{what}: {last[:300]}")
