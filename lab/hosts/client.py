"""A laboratory from outside: brings it up, commands it, runs programs on its hosts, takes it down from any state."""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from lab.hosts import kernel
from lab.hosts.conditions import Conditions, read_state, write_state
from lab.hosts.file_tree import remove_files
from lab.hosts.places import CHECKOUT, Places
from lab.hosts.topology import NoLaboratory, Topology, checked

ANSWERS_WITHIN_S = 60.0
GONE_WITHIN_S = 10.0
POLL_S = 0.02
NOT_RUN, NOT_FOUND, SIGNALLED = 126, 127, 128
"""Exit statuses, as shells have them."""


class Forward(NamedTuple):
    """A port on the real host's loopback for one of a host, or of a region: then of the targets that the load balancer
    of its cloud has there. `by_loopback`: as a tunnel to the host reaches it, which is
    how people come to what listens on its loopback alone; else over the network, as clients outside do."""

    here: int
    host: str
    there: int
    by_loopback: bool = False


def start(
    topology: Topology,
    places: Places,
    forwards: Sequence[Forward] = (),
    cloud: Mapping[str, str | float] | None = None,
) -> None:
    """Make the laboratory and boot every host; it runs on without us. `cloud`: `lab.hosts.cloud.Settings`, for a
    topology with one. Raises NoLaboratory if one runs already, or this host cannot have any."""
    topology = checked(topology)
    places.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _alone(places):
        if is_running(places):
            raise NoLaboratory(
                f"A laboratory runs already in {places.home}: `lab status` shows it, `lab down` ends it."
            )
        settings = {
            **write_state(topology, Conditions()),
            "forwards": [list(each) for each in forwards],
            "cloud": cloud,
        }
        said = _start(settings, places)
        places.record.write_text(json.dumps({**said, **settings}))


def _start(settings: dict[str, Any], places: Places) -> dict[str, Any]:
    with places.log.open("ab") as log:
        starting = subprocess.Popen(
            [sys.executable, "-m", "lab.hosts.init"],
            cwd=CHECKOUT, env=_environment(places), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    if starting.stdin is None or starting.stdout is None:
        raise NoLaboratory("The laboratory's process has no pipes.")
    with starting.stdin as given, starting.stdout as output:
        given.write(json.dumps(settings).encode() + b"\n")
        given.flush()
        line = output.readline()
    starting.wait()
    said: dict[str, Any] = json.loads(line or b"{}")
    if "pid" not in said:
        raise NoLaboratory(said.get("error") or f"The laboratory did not start; see {places.log}.")
    return said


def stop(places: Places, *, wipe: bool = False) -> bool:
    """End a laboratory, whatever state it is in; `wipe` also removes what its hosts wrote. Whether one ran. Raises
    NoLaboratory if it does not end."""
    if not places.home.exists():
        return False
    with _alone(places):
        ran = is_running(places)
        for pid in pids(places):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + GONE_WITHIN_S
        while pids(places):
            if time.monotonic() > deadline:
                raise NoLaboratory(f"The laboratory (process {pids(places)[0]}) does not end.")
            time.sleep(POLL_S)
        for left in (places.record, places.socket):
            left.unlink(missing_ok=True)
        if wipe:
            remove_files(places.home / "hosts")
    return ran


def pids(places: Places) -> list[int]:
    """The laboratory's PID 1, found by what it was started with: its record may never have been written."""
    home = f"SWITCHYARD_HOME={places.home.parent}".encode()
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and _is_ours(Path("/proc", entry), home)]


def _is_ours(process: Path, home: bytes) -> bool:
    try:
        command, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
    except OSError:
        return False
    return b"lab.hosts.init" in command.split(b"\0") and home in environment.split(b"\0")


def is_running(places: Places) -> bool:
    return bool(pids(places))


def topology_of(places: Places) -> Topology:
    return read_state(_record(places))[0]


def forwards_of(places: Places) -> list[Forward]:
    return [Forward(*each) for each in _record(places)["forwards"]]


def _record(places: Places) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(places.record.read_text())
    except (OSError, ValueError):
        raise NoLaboratory(f"No laboratory runs in {places.home}: `make lab` or `lab up` starts one.") from None
    return record


def ask(places: Places, do: str, **arguments: Any) -> Any:
    """Have the laboratory do something, and what it answers. Raises NoLaboratory if none runs, or it refuses."""
    try:
        folder = os.open(places.home, os.O_PATH)
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(ANSWERS_WITHIN_S)
                connection.connect(f"/proc/self/fd/{folder}/{places.socket.name}")
                connection.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")
                line = connection.makefile().readline()
        finally:
            os.close(folder)
    except (FileNotFoundError, ConnectionRefusedError):
        raise NoLaboratory(f"No laboratory runs in {places.home}: `make lab` or `lab up` starts one.") from None
    except OSError as error:
        raise NoLaboratory(f"The laboratory in {places.home} does not answer: {error}.") from None
    answer = json.loads(line or '{"error": "The laboratory ended while it did that."}')
    if "error" in answer:
        raise NoLaboratory(answer["error"])
    return answer["done"]


def run_on(places: Places, name: str, command: Sequence[str]) -> int:
    """Run a command on a host, with this process's terminal and standard streams; its exit status. Raises NoLaboratory
    if there is no such host, or it has no power."""
    where = ask(places, "where", name=name)
    if (entering := os.fork()) == 0:
        os._exit(_enter_and_run(where, places, command))
    return _wait(entering)


def captured(places: Places, name: str, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lab.hosts.cli", "exec", name, "--", *command],
        cwd=CHECKOUT, env=_environment(places), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip


def _environment(places: Places) -> dict[str, str]:
    return {**os.environ, "SWITCHYARD_HOME": str(places.home.parent), "SWITCHYARD_CACHE": str(places.cache)}


def _enter_and_run(where: dict[str, Any], places: Places, command: Sequence[str]) -> int:
    kernel.die_with_parent()
    try:
        namespaces = Path("/proc", str(where["pid"]), "ns")
        kinds = ("net", "uts", "ipc", "pid", "mnt", *(["user"] if places.uid else []))
        descriptors = [os.open(namespaces / kind, os.O_RDONLY | os.O_CLOEXEC) for kind in kinds]
        if places.uid:
            kernel.join(Path("/proc", str(where["laboratory"]), "ns/user"))
        for descriptor in descriptors:
            kernel.enter(descriptor)
    except OSError as error:
        sys.stderr.write(f"cannot get into the host: {error}\n")
        return NOT_RUN
    if (running := os.fork()) == 0:
        kernel.die_with_parent()
        _become(command, where["environment"])
    return _wait(running)


def _become(command: Sequence[str], environment: dict[str, str]) -> NoReturn:
    try:
        os.umask(0o022)
        os.chdir(environment["HOME"])
        terminal = {name: os.environ[name] for name in ("TERM",) if name in os.environ}
        os.execvpe(command[0], list(command), {**environment, **terminal})  # noqa: S606 - what it is for
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        os._exit(NOT_FOUND)


def _wait(child: int) -> int:
    """Returns its exit status as a shell reports it. Signals of the terminal reach the command itself."""
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if status >= 0 else SIGNALLED - status


@contextmanager
def _alone(places: Places) -> Iterator[None]:
    with (places.home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
