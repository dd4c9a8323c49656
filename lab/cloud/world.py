"""A cloud for tests: a front of moto that adds what moto lacks or gets wrong.

A WSGI application. Each call is counted, limited, made to fail if a test requested it, and then answered by a handler
of this package or by moto. Each World has its own AWS account, so two Worlds, or another test's S3, share nothing of
moto's state, which belongs to the process."""

import contextlib
import os
import secrets
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qs
from weakref import WeakValueDictionary

import boto3
from botocore.config import Config
from moto.backends import get_backend
from moto.core.base_backend import BackendDict
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

from lab.cloud.machines import Limits, Machines
from lab.cloud.wire import (
    NOT_IN_THIS_CLOUD,
    Answer,
    Call,
    Environ,
    Refused,
    amended,
    read_answer,
    read_call,
    write_answer,
)


class Clock:
    """Seconds since 1970. `stands_at`: it starts there and moves by `advance` alone; None: it runs."""

    def __init__(self, stands_at: float | None = None) -> None:
        self._stands_at, self._ahead_s = stands_at, 0.0

    def now(self) -> float:
        return (time.time() if self._stands_at is None else self._stands_at) + self._ahead_s

    def advance(self, seconds: float) -> None:
        self._ahead_s += seconds


@dataclass
class Delays:
    """How long things take. Defaults: what EC2 and Route 53 usually need."""

    visible_s: float = 0.0
    """Until a launched instance is found by id or in a list; AWS promises no figure."""
    pending_s: float = 30.0
    shutting_down_s: float = 30.0
    forgotten_s: float = 3600.0
    """How long a terminated instance is still described: about an hour."""
    task_visible_s: float = 0.0
    """Until a started task of ECS is in lists and described."""
    task_pending_s: float = 10.0
    task_stopping_s: float = 10.0
    task_forgotten_s: float = 3600.0
    """How long a stopped task is still described: about an hour."""
    insync_s: float = 60.0
    """Until all of Route 53's servers know a change: usually within 60 seconds."""
    target_registered_s: float = 90.0
    """Until a load balancer begins to check a new target: "a few minutes", as its guide has it."""


def moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


class When(StrEnum):
    """`AFTER`: the call was carried out, and its answer is lost."""

    BEFORE = "before"
    AFTER = "after"


class Ending(StrEnum):
    """The failure that the client gets instead of an answer."""

    RESET = "reset"
    CUT = "cut"


@dataclass
class Fault:
    """`code`: of the error; `delay_s`: real seconds before all else; `ending`: no error, and no whole answer; `times`:
    how often yet; `region`: empty for all."""

    operation: str
    code: str = ""
    when: When = When.BEFORE
    times: int = 1
    delay_s: float = 0.0
    ending: Ending | None = None
    region: str = ""
    message: str = "Injected by the test."


def next_fault(faults: list[Fault], call: Call, when: When) -> Fault | None:
    """The first that fits, with one time less; those that are spent are forgotten."""
    for fault in faults:
        fits = (fault.operation, fault.when) == (call.operation, when) and fault.region in ("", call.region)
        if fits and fault.times > 0:
            fault.times -= 1
            if not fault.times:
                faults.remove(fault)
            return fault
    return None


_OF_OBJECTS = {
    ("GET", ""): "GetObject",
    ("HEAD", ""): "HeadObject",
    ("PUT", ""): "PutObject",
    ("DELETE", ""): "DeleteObject",
    ("POST", "uploads"): "CreateMultipartUpload",
    ("PUT", "uploadId"): "UploadPart",
    ("POST", "uploadId"): "CompleteMultipartUpload",
    ("DELETE", "uploadId"): "AbortMultipartUpload",
}
_OF_BUCKETS = {
    ("GET", "list-type"): "ListObjectsV2",
    ("GET", "uploads"): "ListMultipartUploads",
    ("POST", "delete"): "DeleteObjects",
}


def s3_operation(environ: Environ) -> str:
    """Its name, with the bucket in the path; "" for those that nothing here asks about."""
    query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    _, _, key = environ.get("PATH_INFO", "/").lstrip("/").partition("/")
    method = environ["REQUEST_METHOD"]
    table = _OF_OBJECTS if key else _OF_BUCKETS
    names = [name for name in ("uploadId", "uploads", "list-type", "delete") if name in query]
    return table.get((method, names[0] if names else ""), "")


if TYPE_CHECKING:
    from lab.cloud.ecs import Task
    from lab.cloud.entry import Target

CALLS_KEPT = 100_000
WAITING = {"ReceiveMessage"}
"""Calls that may take seconds. `forget` does not wait for them."""

os.environ.setdefault("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")  # 1,300 images, made anew for each account and region
MOTO = DomainDispatcherApplication(create_backend_app)
"""All of moto's services; it keeps their state by account."""

Handler = Callable[["World", Call], dict[str, Any]]
HANDLERS: dict[tuple[str, str], Handler] = {}
StartResponse = Callable[[str, list[tuple[str, str]]], object]


WATCHES: list[Callable[["World"], None]] = []
"""Called whenever time may have passed."""


def handles(service: str, operation: str) -> Callable[[Handler], Handler]:
    """The function answers this operation, in place of moto."""

    def remember(handler: Handler) -> Handler:
        HANDLERS[service, operation] = handler
        return handler

    return remember


@dataclass(frozen=True, slots=True)
class Made:
    """A call that was made. `outcome`: empty, or the code of its error."""

    service: str
    operation: str
    region: str
    access_key: str
    outcome: str


class World:
    """One account of a cloud. Tests read and change its fields while it serves."""

    def __init__(self, clock: Clock | None = None, handlers: Mapping[tuple[str, str], Handler] = HANDLERS) -> None:
        self.clock, self.delays, self.handlers = clock or Clock(), Delays(), handlers
        self.account = f"{secrets.randbelow(9 * 10**11) + 10**11}"
        self.access_key, self.secret = f"AKIA{secrets.token_hex(8).upper()}", secrets.token_hex(20)
        self.machines = Machines(self)
        self.limits = Limits()
        self.quotas: dict[str, int] = {}
        """vCPUs by name of quota; none: as many as you like."""
        self.launches: dict[tuple[str, str, str], tuple[str, tuple[str, ...]]] = {}
        """Region, zone and client token -> digest of the request, and the machines."""
        self.groups: dict[str, dict[str, dict[str, Any]]] = {}
        """Region -> placement groups by name."""
        self.changes: dict[str, float] = {}
        """Route 53's, by id -> when it was made."""
        self.targets: dict[str, dict[tuple[str, int], Target]] = {}
        """Of load balancers: ARN of a group -> address and port."""
        self.tasks: dict[str, Task] = {}
        """Of ECS, by ARN."""
        self.ecs_agents: dict[str, float] = {}
        """Container instances with an ECS agent, by ARN -> its last poll (`lab.cloud.ecs_agents`)."""
        self.unpullable: set[str] = set()
        """Images that no registry has."""
        self.failing_targets: set[str] = set()
        """Addresses that fail their health checks."""
        self.placed: Counter[str] = Counter()
        """Zone -> how many machines were given network nodes in it."""
        self.faults: list[Fault] = []
        self.silent_zones: set[str] = set()
        self.calls: deque[Made] = deque(maxlen=CALLS_KEPT)
        self.bugs: list[Exception] = []
        """What moto or this package failed with; a test asserts that it is nothing."""
        self.prices: dict[tuple[str, str], float] = {}
        """Instance type and region -> US dollars an hour on demand."""
        self.denials: dict[str, str] = {}
        """Encoded message of a denial -> what STS decodes it to."""
        self.endpoint = ""
        self._lock = threading.RLock()
        _WORLDS[self.account] = self

    # --- for tests ----------------------------------------------------------------------------------------------------

    def count(self, operation: str) -> int:
        return Counter(made.operation for made in self.calls)[operation]

    def backend(self, service: str, region: str) -> Any:
        backends: Any = cast("Any", get_backend)(service)
        return backends[self.account][region]

    def client(self, service: str, region: str = "us-east-1", read_timeout_s: float = 60.0, **keys: str) -> Any:
        """Returns a client without retries, with the account's own key or the given one (`aws_access_key_id`, ...)."""
        keys = keys or {"aws_access_key_id": self.access_key, "aws_secret_access_key": self.secret}
        config = Config(retries={"mode": "standard", "total_max_attempts": 1}, read_timeout=read_timeout_s)
        return _session().client(service, region_name=region, endpoint_url=self.endpoint, config=config, **keys)

    def settle(self) -> None:
        """Applies changes that are due. Each call starts with it."""
        self.machines.settle()
        for watch in WATCHES:
            watch(self)

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """A consistent view for readers on other threads than the calls."""
        with self._lock:
            self.settle()
            yield

    def forget(self) -> None:
        """Give moto's memory of this account back."""
        for backends in list(cast("Any", BackendDict)._instances):
            backends.pop(self.account, None)

    # --- calls --------------------------------------------------------------------------------------------------------

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        environ["HTTP_X_MOTO_ACCOUNT_ID"] = self.account
        call = read_call(environ, frozenset(self.handlers), frozenset({"route53"}))
        if call is not None and call.service == "s3":
            call = replace(call, operation=s3_operation(environ))
        if call is None or not call.operation:
            return cast("Iterable[bytes]", MOTO(environ, start_response))
        try:
            status, headers, body = self._answer(call)
        except _Lost as lost:
            if lost.ending is Ending.RESET:
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            status, headers, body = lost.answer
            headers, body = [*headers, ("Content-Length", str(len(body)))], body[: len(body) // 2]
        else:
            headers = [*headers, ("Content-Length", str(len(body)))]
        start_response(f"{status} .", [(key, str(value)) for key, value in headers])
        return [body]

    def _answer(self, call: Call) -> Answer:
        before = self._fault(call, When.BEFORE)
        if before and before.ending:
            self._record_call(call, before.ending)
            raise _Lost(before.ending, (200, [], b"<nothing/>"))
        with contextlib.nullcontext() if call.operation in WAITING else self._lock:
            answer, outcome = self._carried_out(call, before)
        after = self._fault(call, When.AFTER)
        self._record_call(call, after.code or after.ending or "" if after else outcome)
        if after and after.ending:
            raise _Lost(after.ending, answer)
        return write_answer(call, Refused(after.code, after.message)) if after and after.code else answer

    def _carried_out(self, call: Call, fault: Fault | None) -> tuple[Answer, str]:
        handler = self.handlers.get((call.service, call.operation))
        try:
            with self._lock:
                self.limits.take(call, self.clock.now())
                if fault and fault.code:
                    raise Refused(fault.code, fault.message)
                self.settle()
            if handler:
                return write_answer(call, handler(self, call)), ""
            status, headers, body = self.forwarded(call)
            if status >= 500:
                read_answer(call, (status, headers, body))
        except Refused as error:
            return write_answer(call, error), error.code
        except Exception as error:
            self.bugs.append(error)
            return write_answer(call, Refused(NOT_IN_THIS_CLOUD, f"{call.operation}: {error!r}")), NOT_IN_THIS_CLOUD
        return (status, headers, body), "" if status < 400 else str(status)

    def _fault(self, call: Call, when: When) -> Fault | None:
        fault = next_fault(self.faults, call, when)
        if fault and fault.delay_s:
            time.sleep(fault.delay_s)
        return fault

    def _record_call(self, call: Call, outcome: str) -> None:
        self.calls.append(Made(call.service, call.operation, call.region, call.access_key, str(outcome)))

    def forwarded(self, call: Call) -> Answer:
        got: list[Any] = []
        body = b"".join(MOTO(call.environ, lambda status, headers, _=None: got.extend((int(status[:3]), headers))))
        status, headers = got
        return status, [(key, value) for key, value in headers if key.lower() != "content-length"], body

    def moto(self, call: Call, form: Mapping[str, str | None] | None = None) -> dict[str, Any]:
        asked = amended(call, form) if form else call
        return read_answer(asked, self.forwarded(asked))


def world_of(account: str) -> World:
    return _WORLDS[account]


class _Lost(Exception):  # it carries an answer, and is no error
    def __init__(self, ending: Ending, answer: Answer) -> None:
        super().__init__(ending)
        self.ending, self.answer = ending, answer


_WORLDS: WeakValueDictionary[str, World] = WeakValueDictionary()
_sessions: list[boto3.session.Session] = []


def _session() -> boto3.session.Session:
    """One for all clients: the second one would cost another 0.2 s and 22 MiB."""
    if not _sessions:
        _sessions.append(boto3.session.Session())
    return _sessions[0]
