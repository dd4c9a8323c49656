"""The state of a running HAProxy worker, parsed from its runtime API, and servers whose host is gone. Pure."""

import csv
import io
import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from engine_agent.ingress.desired import HOLD_PREFIX, LOCAL_PREFIX, SPILL_PREFIX, ServerKey

IN_MAINTENANCE = 0x01 | 0x02 | 0x20
"""`srv_admin_state` bits: maintenance by command, inherited, or because the address is missing (HAProxy management
guide)."""
FORCED_DRAIN = 0x08
"""`srv_admin_state` bit: drain by command. Only `ready` ends it."""
STOPPED, STOPPING = "0", "3"
"""`srv_op_state`: down; and up, but its health check wants no new requests (`disable-on-404`)."""
STATE_FORMAT = "1"
NO_CELL_SERVER = "no-cell"
"""The server that replaces the cells of a pool while there are none. It is not in the table."""
DOOR_SERVER = "door"
"""The only server of a backend that holds requests."""


RESTED_S = 5
"""Longer than a request refers to a server that does not count it: one whose connection failed, and that waits for a
second, after at most `Times.connect_s`, for its retry. Deleting the server in that time crashes HAProxy (fixed upstream
in July 2026, from 3.0 on)."""


class CellView(StrEnum):
    UP = "up"
    DOWN = "down"
    DRAIN = "drain"
    UNKNOWN = "unknown"


class UnexpectedOutput(ValueError):
    """HAProxy's output has an unknown format."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """One server in the worker. `draining`: by command; `drains_itself`: by its health check. `rested`: it got no
    request for `RESTED_S`. Errors are broken connections and responses; failures are responses of 5xx."""

    backend: str
    name: str
    address: str
    port: int
    weight: int
    max_connections: int
    draining: bool
    maintenance: bool
    usable: bool
    in_flight: int = 0
    queued: int = 0
    requests_total: int = 0
    errors_total: int = 0
    retries_total: int = 0
    redispatches_total: int = 0
    failures_total: int = 0
    bytes_in_total: int = 0
    bytes_out_total: int = 0
    connections_total: int = 0
    drains_itself: bool = False
    rested: bool = True
    reason: str = ""

    @property
    def view(self) -> CellView:
        if self.draining or self.maintenance or self.drains_itself:
            return CellView.DRAIN
        return CellView.UP if self.usable else CellView.DOWN


@dataclass(frozen=True, slots=True)
class RunningBackend:
    """Totals of one backend; errors are responses of 5xx. `queued`: with those that wait for one server.
    `released_total`: of a backend that holds requests, those that were released."""

    name: str
    in_flight: int
    queued: int
    requests_total: int
    errors_total: int
    bytes_in_total: int = 0
    bytes_out_total: int = 0
    released_total: int = 0

    @property
    def holds(self) -> bool:
        return self.in_flight > 0 and self.name.startswith(HOLD_PREFIX)


@dataclass(frozen=True, slots=True)
class RunningHaproxy:
    """One worker: the servers and maps of the table. `structure`: the digest of its configuration."""

    structure: str
    worker_pid: int
    servers: tuple[RunningServer, ...]
    backends: tuple[RunningBackend, ...]
    maps: Mapping[str, Mapping[str, str]]
    started_at_s: int = 0
    log_lines_lost_total: int = 0
    """Of the access log and HAProxy's log."""
    overflow: Mapping[str, int] = field(default_factory=dict)
    """Pool -> requests that its cells could not take, and that went to other regions."""

    @property
    def life(self) -> str:
        """Identifies this life of a worker: a later one can have the same pid, or start in the same second."""
        return f"{self.worker_pid}@{self.started_at_s}"


def was_idle(before: RunningHaproxy, after: RunningHaproxy) -> bool:
    """Whether no server of this worker had a request between two readings, or has one now. HAProxy's own answers, such
    as to checks of other regions, do not count."""
    if before.life != after.life:
        return False
    one, other = ({(each.backend, each.name): each.requests_total for each in look.servers} for look in (before, after))
    waiting = any(each.queued or each.holds for each in after.backends)
    return one == other and not waiting and not any(each.in_flight or each.queued for each in after.servers)


_OVERFLOW = re.compile(r"^0x\S+: key=(\S+) .{0,300}\bhttp_req_cnt=(\d+)", re.MULTILINE)


def read_running(info: str, stats: str, states: str, maps: Mapping[str, str], overflow: str = "") -> RunningHaproxy:
    """Parses the outputs of `show info`, `show stat`, `show servers state`, `show map <name>` and `show table
    overflow`. Not every worker has that table. Raises UnexpectedOutput if one of them is not in the format of HAProxy
    2.8."""
    facts = dict(line.split(": ", 1) for line in info.splitlines() if ": " in line)
    rows = list(csv.DictReader(io.StringIO(stats.lstrip("# "))))
    by_server = {(row["pxname"], row["svname"]): row for row in rows}
    waiting = Counter[str]()  # HAProxy counts requests that wait for a certain server there, not in their backend
    for row in rows:
        waiting[row["pxname"]] += _number(row, "qcur")
    try:
        return RunningHaproxy(
            structure=facts.get("description", ""),
            worker_pid=int(facts["Pid"]),
            started_at_s=int(facts.get("Start_time_sec", 0)),
            log_lines_lost_total=int(facts.get("DroppedLogs", 0)),
            servers=tuple(_read_server(state, by_server) for state in _read_states(states) if _is_of_table(state)),
            backends=tuple(
                _read_backend(row, by_server.get((row["pxname"], DOOR_SERVER)), waiting[row["pxname"]])
                for row in rows
                if row["svname"] == "BACKEND"
            ),
            maps={name: _read_map(text) for name, text in maps.items()},
            overflow={match[1]: int(match[2]) for match in _OVERFLOW.finditer(overflow)},
        )
    except (KeyError, ValueError) as error:
        raise UnexpectedOutput(f"HAProxy's output could not be parsed: {error!r}") from error


def _read_states(text: str) -> Iterable[dict[str, str]]:
    lines = [line for line in text.splitlines() if line]
    if not lines or lines[0] != STATE_FORMAT:
        raise UnexpectedOutput(f"servers state is not of format {STATE_FORMAT}: {text[:80]!r}")
    names = lines[1].removeprefix("# ").split(" ")
    return [dict(zip(names, line.split(" "), strict=False)) for line in lines[2:]]


def _is_of_table(state: dict[str, str]) -> bool:
    return state["be_name"].startswith((LOCAL_PREFIX, SPILL_PREFIX)) and state["srv_name"] != NO_CELL_SERVER


def _read_server(state: dict[str, str], stats: dict[tuple[str, str], dict[str, str]]) -> RunningServer:
    row = stats.get((state["be_name"], state["srv_name"]), {})
    admin = int(state["srv_admin_state"])
    return RunningServer(
        backend=state["be_name"],
        name=state["srv_name"],
        address=str(ipaddress.ip_address(state["srv_addr"])),
        port=int(state["srv_port"]),
        weight=int(state["srv_uweight"]),
        max_connections=_number(row, "slim"),
        draining=bool(admin & FORCED_DRAIN),
        maintenance=bool(admin & IN_MAINTENANCE),
        usable=state["srv_op_state"] != STOPPED,
        in_flight=_number(row, "scur"),
        queued=_number(row, "qcur"),
        requests_total=_number(row, "stot"),
        errors_total=_number(row, "econ") + _number(row, "eresp"),
        retries_total=_number(row, "wretr"),
        redispatches_total=_number(row, "wredis"),
        failures_total=_number(row, "hrsp_5xx"),
        bytes_in_total=_number(row, "bin"),
        bytes_out_total=_number(row, "bout"),
        connections_total=_number(row, "connect"),
        drains_itself=state["srv_op_state"] == STOPPING,
        rested=_number(row, "lastsess") not in range(RESTED_S) or not _number(row, "stot"),
        reason=_reason(row),
    )


def _reason(row: Mapping[str, str]) -> str:
    """The result of the last complete health check. A star before it means that the next one has begun."""
    return " ".join(filter(None, (row.get("check_status", "").removeprefix("* "), row.get("last_chk", ""))))


def _read_backend(row: dict[str, str], door: Mapping[str, str] | None, queued: int) -> RunningBackend:
    return RunningBackend(
        name=row["pxname"],
        in_flight=_number(row, "scur"),
        queued=queued,
        requests_total=_number(row, "stot"),
        errors_total=_number(row, "hrsp_5xx"),
        bytes_in_total=_number(row, "bin"),
        bytes_out_total=_number(row, "bout"),
        released_total=_number(door or {}, "hrsp_4xx"),
    )


def _read_map(text: str) -> dict[str, str]:
    entries = (line.split(" ", 2) for line in text.splitlines() if line)
    return {entry[1]: entry[2] for entry in entries}


def _number(row: Mapping[str, str], column: str) -> int:
    return int(row.get(column) or 0)


NOTHING_ANSWERS = ("L4TOUT",)
UNREACHABLE = ("No route to host", "Host is down", "Network is unreachable")
"""Errors of routers, or of the kernel without a neighbour, for a host that is gone. HAProxy reports them with `L4CON`.
"""


class LostHosts:
    """How long each server's host has been silent, and in how many readings.

    When a process exits, its kernel resets its connections. A host that fails sends nothing: TCP retransmits for a
    quarter of an hour, and requests wait as long. Keepalives do not help, because the kernel sends none while data is
    unacknowledged. So health checks decide. Once nothing at all has answered them for a while, waiting requests are
    taken back: those whose answer has not begun are tried elsewhere, and streams that can continue do so.

    A host counts as gone after `after_s` seconds and at least as many readings: a paused agent has only two. Where
    streams continue it is `continuing_after_s`, because nothing breaks off then."""

    def __init__(self, after_s: float, continuing_after_s: float) -> None:
        self._after_s = after_s
        self._continuing_after_s = continuing_after_s
        self._silent: dict[ServerKey, tuple[float, int]] = {}

    def note(
        self, servers: Iterable[RunningServer], now_s: float, continues: Callable[[str], bool] = lambda _: False
    ) -> tuple[ServerKey, ...]:
        """Evaluates one reading of all servers. Returns those whose requests are to be taken back. `continues`: whether
        the streams of a backend can continue elsewhere."""
        silent, gone = {}, []
        for server in servers:
            if not is_silent(server):
                continue
            key = (server.backend, server.name)
            since_s, looks = self._silent.get(key, (now_s, 0))
            silent[key] = since_s, looks + 1
            after_s = self._continuing_after_s if continues(server.backend) else self._after_s
            if server.in_flight and min(now_s - since_s, looks + 1) >= after_s:
                gone.append(key)
        self._silent = silent
        return tuple(gone)


def is_silent(server: RunningServer) -> bool:
    """By its health check, nothing answered at its address, neither a process nor a kernel."""
    by_router = server.reason.startswith("L4CON") and any(text in server.reason for text in UNREACHABLE)
    return not server.usable and (server.reason.startswith(NOTHING_ANSWERS) or by_router)
