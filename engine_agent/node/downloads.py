"""Downloads of a node from the control plane: artifacts by digest, each in a thread, whose files continue where an
earlier attempt stopped, from any of its servers. The agent downloads them itself, because its engines must neither have
its credential nor be able to change what other engines run."""

import errno
import os
import random
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from pathlib import Path

from engine_agent.engines.artifacts import CannotFetch
from engine_agent.engines.s3_artifact import Arrived
from engine_agent.node.enrolment import Enrolment, control_connection
from engine_agent.node.identity import Identity

ANSWER_LIMIT_S = 30.0
ATTEMPTS = 5
"""Of one file without a further byte, over all servers."""
FIRST_PAUSE_S, LONGEST_PAUSE_S, JITTER = 0.5, 30.0, 0.5
BUSY_LIMIT_S = 3600.0
"""How long a control plane may be too busy for one file: all hosts of a fleet may fetch at the same time."""
CHUNK_BYTES = 256 * 1024
MOST_DIGITS = 5
WORDS_EVERY_S = 5.0
"""Interval of changes in the progress; each one causes a report to the control plane."""


class Fetch:
    """One artifact on its way. `name`: as errors and the progress name it; `whole`: its bytes once they are unpacked,
    0 for one that is not packed."""

    def __init__(self, digest: str, name: str, whole: int, now_s: Callable[[], float]) -> None:
        self.digest = digest
        self.name = name
        self.trouble = ""
        self.is_over = False
        self.arrived = Arrived()
        self.unpacked = 0
        self._whole = whole
        self._now_s = now_s
        self._words, self._words_at_s = "", 0.0

    def words(self) -> str:
        now_s = self._now_s()
        if not self._words or now_s - self._words_at_s >= WORDS_EVERY_S:
            is_unpacking = self.unpacked and self._whole
            doing = f"unpacked {self.unpacked * 100 // self._whole} %" if is_unpacking else self.arrived.words()
            self._words, self._words_at_s = f"{self.name}: {doing}", now_s
        return self._words


class Downloads:
    """`on_change` is called from another thread when a fetch has ended."""

    def __init__(
        self, enrolment: Enrolment, on_change: Callable[[], None], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._enrolment = enrolment
        self._on_change = on_change
        self._now_s = now_s
        self._fetches: dict[str, Fetch] = {}
        self._closed = threading.Event()

    @property
    def running(self) -> tuple[Fetch, ...]:
        return tuple(fetch for fetch in [*self._fetches.values()] if not fetch.is_over)

    def words(self, digest: str) -> str:
        """The progress of an artifact that is on its way; an empty text for others."""
        fetch = self._fetches.get(digest)
        return fetch.words() if fetch is not None and not fetch.is_over else ""

    def begin(self, digest: str, name: str, fill: Callable[[Fetch], None], whole: int = 0) -> None:
        """Starts to fetch an artifact unless it is on its way. Raises CannotFetch if the last fetch of it failed; the
        next call tries again."""
        fetch = self._fetches.get(digest)
        if fetch is not None and not fetch.is_over:
            return
        if self._fetches.pop(digest, None) is not None and fetch is not None and fetch.trouble:
            raise CannotFetch(fetch.trouble)
        fetch = self._fetches[digest] = Fetch(digest, name, whole, self._now_s)
        threading.Thread(target=self._run, args=(fetch, fill), name=name, daemon=True).start()

    def close(self) -> None:
        """Ends fetches; what arrived is kept for the next one."""
        self._closed.set()

    def check_open(self) -> None:
        """Raises CannotFetch if the agent stops."""
        if self._closed.is_set():
            raise CannotFetch("the agent stops")

    def _run(self, fetch: Fetch, fill: Callable[[Fetch], None]) -> None:
        try:
            fill(fetch)
        except CannotFetch as error:
            fetch.trouble = str(error)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            fetch.trouble = f"{fetch.name} cannot be stored: {'the disk is full' if full else error}"
        except Exception as error:  # a thread's exception would be lost
            fetch.trouble = f"{fetch.name} cannot be fetched: {type(error).__name__}: {error}"
        finally:
            fetch.is_over = True
            if not self._closed.is_set():
                self._on_change()

    # --- files --------------------------------------------------------------------------------------------------------

    def file(self, fetch: Fetch, url: str, path: Path, most_bytes: int) -> None:
        """Downloads `url`, a path on the control plane's servers, to a file, from where an earlier attempt stopped.
        Raises CannotFetch if no server has it, or it does not arrive."""
        failures = 0
        coming = path.with_name(f"{path.name}.coming")
        pause_s, busy_until_s = FIRST_PAUSE_S, self._now_s() + BUSY_LIMIT_S
        while True:
            before = coming.stat().st_size if coming.exists() else 0
            trouble, wait_s = "", 0.0
            for server in self._enrolment.servers.all:
                try:
                    self._append(server, fetch, url, coming, most_bytes)
                    coming.replace(path)
                    return
                except _RetryLater as error:
                    trouble, wait_s = f"{server}: {error}", max(wait_s, error.after_s)
                except (OSError, HTTPException, ValueError) as error:
                    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    trouble = f"{server}: {error}"
            has_grown = coming.exists() and coming.stat().st_size > before
            if has_grown:
                failures, pause_s, busy_until_s = 0, FIRST_PAUSE_S, self._now_s() + BUSY_LIMIT_S
            is_busy = wait_s > 0 and self._now_s() < busy_until_s
            failures += not is_busy
            if failures >= ATTEMPTS:
                raise CannotFetch(f"{fetch.name} does not arrive: {trouble}")
            self._closed.wait(min(LONGEST_PAUSE_S, max(wait_s, pause_s)) * random.uniform(1, 1 + JITTER))
            self.check_open()
            pause_s *= 1 if is_busy else 2

    def _append(self, server: str, fetch: Fetch, url: str, coming: Path, most_bytes: int) -> None:
        at = coming.stat().st_size if coming.exists() else 0
        credential = self._enrolment.stored_credential()
        connection = control_connection(server, Identity(self._enrolment.home), ANSWER_LIMIT_S)
        try:
            headers = {"Authorization": f"Bearer {credential}", **({"Range": f"bytes={at}-"} if at else {})}
            connection.request("GET", url, headers=headers)
            answer = connection.getresponse()
            if answer.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                coming.unlink(missing_ok=True)
                raise _RetryLater("it has another file")
            self._check_answer(answer)
            if answer.status == HTTPStatus.OK and at:
                coming.unlink()
                at = 0
            self._receive(answer, fetch, coming, most_bytes - at)
        finally:
            connection.close()

    def _check_answer(self, answer: HTTPResponse) -> None:
        if answer.status in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
            return
        if answer.status == HTTPStatus.TOO_MANY_REQUESTS or answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            stated = answer.headers.get("Retry-After", "")
            after_s = float(stated) if stated.isdecimal() and len(stated) <= MOST_DIGITS else FIRST_PAUSE_S
            raise _RetryLater(f"it answered {answer.status}", after_s)
        raise ValueError(f"it answered {answer.status}: {answer.read(300).decode(errors='replace')}")

    def _receive(self, answer: HTTPResponse, fetch: Fetch, coming: Path, most_bytes: int) -> None:
        left = answer.length
        if left is None or left > most_bytes:
            raise ValueError(f"it sends {left} bytes; at most {most_bytes} may be")
        with coming.open("ab") as file:
            while left and (chunk := answer.read1(CHUNK_BYTES)):
                file.write(chunk)
                left -= len(chunk)
                fetch.arrived.add(len(chunk))
                self.check_open()
            file.flush()
            os.fsync(file.fileno())
        if left:
            raise _RetryLater(f"{left} bytes are missing")


class _RetryLater(ValueError):
    """A server cannot answer now. `after_s`: the pause of a busy one; 0: the answer broke off."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s
