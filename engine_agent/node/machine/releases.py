"""Has a host change its release of the agent: fetch, check, unpack beside, try, switch, and forget older ones.

Each step leaves the release that runs as it is until the next is whole, so that being killed between any two costs a
repetition. Switching is for two: `switch_to` writes down on trial what comes, and the script that starts the agent
(`engine_agent.node.machine.service`) goes back to what was before, when what came has not confirmed itself in time.
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
"""With its pauses. All hosts of a ring come at once, and web serves few of them at a time or is restarted just then."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 30.0
JITTER = 0.5
MOST_DIGITS = 5
TRY_LIMIT_S = 60.0
VENV_LIMIT_S = 120.0
LARGEST_BYTES = 512 * 1024**2
UNPACKED_TIMES = 6
"""How much larger an archive is on disk, at the most: ours is packed to a quarter."""
KEEP_FREE_BYTES = 256 * 1024**2
CHUNK_BYTES = 256 * 1024
UNREACHABLE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN})


class ReleaseTrouble(Exception):
    """A release cannot be installed; the text says why. What runs is as it was."""


class _ComeAgain(ValueError):
    """A server has no answer at this moment. `after_s`: how long it asks to be left alone; 0: it did not say."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


def folder_of(paths: HostPaths, order: ReleaseOrder) -> Path:
    """Where a release is, or comes to be, on this host."""
    return paths.releases / order.digest[:16]


def install(
    paths: HostPaths, order: ReleaseOrder, servers: tuple[str, ...], credential: str, given_up: threading.Event
) -> Path:
    """Have a release on this host, ready to be switched to; one that is there is only tried again. Blocks for a while.
    `given_up`, once set, ends a download.

    Raises:
        ReleaseTrouble: what was missing or wrong; nothing of it is left.
    """
    if not is_release_id(order.id) or len(order.digest) != 64 or not order.digest.isalnum():
        raise ReleaseTrouble("the order names no release")
    folder = folder_of(paths, order)
    try:
        if _named(folder) != order.id:
            _clear(paths)
            _require_room(paths, order)
            beside = paths.releases / f".{folder.name}.new"
            _fetch(paths, order, servers, credential, beside / "agent.tar.gz", given_up)
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
    """Engines and cell proxies have accounts of their own and run this code too, whatever the umask was that it came
    under; it is no secret. What links lead to is not ours to change.

    Raises:
        OSError: something in it cannot be changed.
    """
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else path.stat().st_mode | 0o444)


def switch_to(paths: HostPaths, folder: Path, attempt: int) -> None:
    """Have the next start of the machine agent be of that release, on trial. Whoever calls ends then.

    Raises:
        OSError: the disk refused; the next start is of what was.
    """
    before = paths.current.resolve()
    paths.trial_tries.unlink(missing_ok=True)
    # First what is gone back to, then the switch: killed in between, the start goes back to where it is.
    write_durably(paths.trial, f"{before}\n{folder} {attempt}\n".encode(), mode=0o644)
    paths.went_back.unlink(missing_ok=True)
    point(paths.current, folder)


def confirm(paths: HostPaths) -> bool:
    """The release that runs is well: nothing goes back any more. Returns whether it was on trial."""
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
    """Have a link lead to a folder, at once and for good.

    Raises:
        OSError: the disk refused; it leads where it led.
    """
    beside = link.with_name(f".{link.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    beside.symlink_to(folder)
    beside.replace(link)


def trim(paths: HostPaths) -> list[str]:
    """Remove releases but the current one, the one before, and those that something still runs from. Returns which.
    Not for while one is installed: what is left of an attempt goes, too."""
    if paths.trial.exists():
        return []
    _clear(paths)
    kept = {paths.current.resolve(), paths.previous.resolve()}
    running = _code_that_runs()
    gone = []
    for folder in sorted(paths.releases.iterdir()):
        whole = folder.resolve()  # what runs was started by this name, wherever links lead to the code
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
    """Remove what an attempt that was killed left."""
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
            f"{free // mib} MiB of disk are free at {paths.releases}, and release {order.id} needs {needed // mib};"
            " make room, and upgrade again"
        )


def _fetch(
    paths: HostPaths,
    order: ReleaseOrder,
    servers: tuple[str, ...],
    credential: str,
    to: Path,
    given_up: threading.Event,
) -> None:
    """From the first server that has it: each carries what it has packed or was given. All are asked again while one of
    them may answer otherwise in a moment."""
    to.parent.mkdir(parents=True, mode=0o755)
    until_s, pause_s = time.monotonic() + FETCH_LIMIT_S, SHORTEST_PAUSE_S
    while True:
        reasons, pauses_s = list[str](), list[float]()
        for server in servers:
            try:
                found = _download(server, Identity(paths.home), order, credential, to, until_s, given_up)
            except (OSError, HTTPException, ValueError) as error:
                reasons.append(f"{server}: {error}")
                if _may_pass(error):
                    pauses_s.append(max(pause_s, error.after_s if isinstance(error, _ComeAgain) else 0.0))
                continue
            if found == order.digest:
                return
            raise ReleaseTrouble(
                f"the archive of release {order.id} has SHA-256 {found[:16]}… instead of {order.digest[:16]}…; what"
                " runs goes on"
            )
        wait_s = min(LONGEST_PAUSE_S, max(pauses_s, default=0.0)) * random.uniform(1, 1 + JITTER)
        if not pauses_s or time.monotonic() + wait_s > until_s:
            raise ReleaseTrouble(f"release {order.id} cannot be fetched: {'; '.join(reasons)[:400]}")
        if given_up.wait(wait_s):
            raise _given_up(order)
        pause_s *= 2


def _may_pass(error: Exception) -> bool:
    passing = (_ComeAgain, ConnectionError, TimeoutError, HTTPException, ssl.SSLEOFError, socket.gaierror)
    return isinstance(error, passing) or (isinstance(error, OSError) and error.errno in UNREACHABLE)


def _given_up(order: ReleaseOrder) -> ReleaseTrouble:
    return ReleaseTrouble(f"release {order.id} is not wanted any more")


def _download(
    server: str,
    identity: Identity,
    order: ReleaseOrder,
    credential: str,
    to: Path,
    until_s: float,
    given_up: threading.Event,
) -> str:
    connection = control_connection(server, identity, ANSWER_LIMIT_S)
    try:
        headers = {"Authorization": f"Bearer {credential}"}
        connection.request("GET", f"/agents/releases/{order.id}/{order.digest}", headers=headers)
        answer = connection.getresponse()
        if answer.status == HTTPStatus.TOO_MANY_REQUESTS or answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            stated = answer.headers.get("Retry-After", "")
            after_s = float(stated) if stated.isdecimal() and len(stated) <= MOST_DIGITS else 0.0
            raise _ComeAgain(f"it answered {answer.status}", after_s)
        if answer.status != HTTPStatus.OK:
            raise ValueError(f"it answered {answer.status}")
        return _received(answer, order, to, until_s, given_up)
    finally:
        connection.close()


def _received(answer: HTTPResponse, order: ReleaseOrder, to: Path, until_s: float, given_up: threading.Event) -> str:
    """Its SHA-256, once the file is whole."""
    digest, left, stated = hashlib.sha256(), order.size_bytes, answer.length
    if stated is not None and stated > left:
        raise _too_long(order)
    with to.open("wb") as file:
        # What is there, not whole chunks: a server that sends a byte at a time would keep us for ever.
        while (left or stated is None) and (chunk := answer.read1(CHUNK_BYTES)):
            left -= len(chunk)
            if left < 0:
                raise _too_long(order)
            digest.update(chunk)
            file.write(chunk)
            if given_up.is_set():
                raise _given_up(order)
            if time.monotonic() > until_s:
                raise TimeoutError(f"{left} of {order.size_bytes} bytes are missing after {FETCH_LIMIT_S:.0f} s")
    if left:
        missing = f"{left} of {order.size_bytes} bytes are missing"
        raise _ComeAgain(missing) if stated == order.size_bytes else ValueError(missing)
    return digest.hexdigest()


def _too_long(order: ReleaseOrder) -> ReleaseTrouble:
    return ReleaseTrouble(f"the archive of release {order.id} is longer than {order.size_bytes} bytes")


def _unpack(archive: Path, folder: Path) -> None:
    try:
        with tarfile.open(archive) as tar:
            for member in _checked(tar):
                tar.extract(member, folder, set_attrs=True)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise ReleaseTrouble(f"the archive cannot be unpacked: {error}") from None
    archive.unlink()


def _checked(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Files of this release alone: our archives have no others, and one that has them is not ours."""
    for member in tar:
        parts = Path(member.name).parts
        if not member.isreg() or member.name.startswith("/") or ".." in parts:
            raise ValueError(f"{member.name[:80]!r} is not a file of a release")
        member.mode &= 0o755
        yield member


def _make_environment(folder: Path, final: Path) -> None:
    """As the script of the line makes it: without pip, and with the folders named in it."""
    base = getattr(sys, "_base_executable", sys.executable)
    _run([base, "-m", "venv", "--without-pip", str(folder / "venv")], VENV_LIMIT_S, "an environment cannot be made")
    for packages in (folder / "venv").glob("lib/python*/site-packages"):
        (packages / "switchyard.pth").write_text(f"{final / 'site'}\n{final}\n", encoding="utf-8")


def _try(paths: HostPaths, folder: Path) -> None:
    """Have the release look at this host itself, before anything depends on it."""
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
        last = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise ReleaseTrouble(f"{what}: {last[:300]}")
