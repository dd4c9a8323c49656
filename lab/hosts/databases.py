"""The database of a laboratory's control plane of two hosts: which host's takes writes, and what becomes of it when
that host loses its power, by the commands that operators run."""

import contextlib
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from lab.hosts import client
from lab.hosts.fleet import FIRST_CONTROL, SECOND_CONTROL, Fleet
from lab.hosts.places import Places
from lab.hosts.topology import NoLaboratory, Topology

PROMOTED_AFTER_S = 2.0
"""What somebody takes to be sure, at the least."""
WRITES_BEFORE_S = 2.0
DECIDES_WITHIN_S = 15.0
"""After a promotion."""
LIMIT_S = 240.0
POLL_S = 0.1
NAMES = {"control-1": FIRST_CONTROL, "control-2": SECOND_CONTROL}


@dataclass
class Writer:
    """Makes groups at one control host; `acknowledged`: those that it said it made, and when, by `time.monotonic`."""

    url: str
    token: str
    prefix: str
    acknowledged: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)

    def start(self) -> None:
        """Write from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Returns when the last write was answered."""
        self._stopping.set()
        self._thread.join()

    def _write(self) -> None:
        headers = {"Authorization": f"Bearer {self.token}"}
        number = 0
        while not self._stopping.wait(POLL_S):
            number += 1
            body = {"name": f"{self.prefix}-{number}", "role": "viewer"}
            with contextlib.suppress(httpx.HTTPError):
                answer = httpx.post(f"{self.url}/api/v1/groups/", json=body, headers=headers, timeout=30.0)
                if answer.is_success:
                    self.acknowledged[body["name"]] = time.monotonic()


@dataclass(frozen=True, slots=True)
class Promotion:
    """Seconds: `took_s` of the commands, `pass_s` from their end to the next pass of the reconciler, `ended_at` by
    `time.monotonic`. `doubt`: why it took force, or ""."""

    took_s: float
    pass_s: float
    ended_at: float
    doubt: str


@dataclass(frozen=True, slots=True)
class Databases:
    """Those of a laboratory that runs, with two hosts of the control plane."""

    places: Places
    topology: Topology
    fleet: Fleet

    def health(self, host: str) -> dict[str, Any]:
        """What a control host says of itself and the other one.

        Raises:
            NoLaboratory: it does not answer.
        """
        try:
            told: dict[str, Any] = httpx.get(f"{self.fleet.control_urls[host]}/healthz", timeout=10.0).json()
        except (httpx.HTTPError, ValueError) as error:
            raise NoLaboratory(f"{host}: {error!r}") from None
        return told

    def primary(self) -> str:
        """The host whose database takes writes, once its commits wait for the other's.

        Raises:
            NoLaboratory: none does for long, or there is one control host only.
        """
        if SECOND_CONTROL not in self.topology.hosts:
            raise NoLaboratory("This laboratory has no second control host, so its database has no standby.")
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            for host in self.fleet.control_urls:
                with contextlib.suppress(NoLaboratory):
                    for each in self.health(host).get("hosts", ()):
                        if each["commits"] == "synchronous":
                            return NAMES[each["name"]]
            time.sleep(POLL_S)
        raise NoLaboratory(f"After {LIMIT_S:g} s no database has commits that wait for a standby.")

    def other(self, host: str) -> str:
        """The control host that this one is not."""
        return next(each for each in self.fleet.control_urls if each != host)

    def writer(self, host: str) -> Writer:
        """Of groups that nobody else makes, at this host."""
        return Writer(self.fleet.control_urls[host], self.fleet.token.read_text().strip(), f"lab-{time.time_ns():x}")

    def command(self, host: str, text: str) -> str:
        """One of the launcher's, on a control host; what it refused, or ""."""
        try:
            self.fleet.second_control().run(self.topology.host(host), text)
        except NoLaboratory as error:
            return str(error)
        return ""

    def promote(self, host: str) -> Promotion:
        """Have the database of this host take the writes, as a person does who knows that the other one is off.

        Raises:
            NoLaboratory: the command refused by force, too, or no pass came after it.
        """
        began = time.monotonic()
        doubt = self.command(host, "promote")
        if doubt and (refused := self.command(host, "promote --force 'it has no power'")):
            raise NoLaboratory(refused)
        ended_at = time.monotonic()
        while time.monotonic() < ended_at + LIMIT_S:
            with contextlib.suppress(NoLaboratory):
                passed_at = time.monotonic() - self.health(host).get("last_pass_s", LIMIT_S)
                if passed_at > ended_at:
                    return Promotion(ended_at - began, passed_at - ended_at, ended_at, doubt)
            time.sleep(POLL_S)
        raise NoLaboratory(f"{host} was promoted, and nothing was decided for {LIMIT_S:g} s.")

    def missing(self, writer: Writer) -> set[str]:
        """What was acknowledged and is not there."""
        known, page = set(), "groups/?page_size=500"
        while page:
            answer = self.fleet.ask("GET", page)
            known |= {row["name"] for row in answer["results"]}
            page = (answer.get("next") or "").partition("/api/v1/")[2]
        return set(writer.acknowledged) - known

    def rejoin(self, host: str) -> float:
        """Make the database of a host that came back the standby; seconds until commits wait for it.

        Raises:
            NoLaboratory: it refuses for long, and why.
        """
        began = time.monotonic()
        while refused := self.command(host, "rejoin"):
            if time.monotonic() > began + LIMIT_S:
                raise NoLaboratory(refused)
            time.sleep(POLL_S)
        self.primary()
        return time.monotonic() - began


@dataclass
class PowerOff:
    """The host of the primary loses its power under a writer, the other one is promoted, the first one rejoins.
    `problems`: what was wrong."""

    databases: Databases
    lost: str
    problems: list[str] = field(default_factory=list)
    said: str = ""

    def __post_init__(self) -> None:
        self.kept = self.databases.other(self.lost)
        self._writer = self.databases.writer(self.kept)
        self._gone_at = 0.0

    def begin(self) -> None:
        """Its power goes, while somebody writes."""
        self._writer.start()
        time.sleep(WRITES_BEFORE_S)
        client.ask(self.databases.places, "power-off", name=self.lost)
        self._gone_at = time.monotonic()

    def heal(self) -> float:
        """Promote the other one; seconds since the power went until something is decided again."""
        time.sleep(PROMOTED_AFTER_S)
        done = self.databases.promote(self.kept)
        if done.pass_s > DECIDES_WITHIN_S:
            self.problems.append(f"nothing was decided for {done.pass_s:.1f} s after the promotion")
        force = "by force" if done.doubt else "without a doubt"
        self.said = f"promoted {force} in {done.took_s:.1f} s, decided {done.pass_s:.1f} s later"
        return done.ended_at + done.pass_s - self._gone_at

    def end(self) -> None:
        """Power again, and its database becomes the standby."""
        self._writer.stop()
        missing = self.databases.missing(self._writer)
        self.problems += [f"{name} was acknowledged and is missing" for name in sorted(missing)][:5]
        client.ask(self.databases.places, "boot", name=self.lost)
        took_s = self.databases.rejoin(self.lost)
        self.said += (
            f", {len(self._writer.acknowledged)} writes acknowledged of which {len(missing)} are missing, "
            f"rejoined in {took_s:.1f} s"
        )
