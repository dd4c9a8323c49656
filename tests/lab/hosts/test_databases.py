"""Power-off of the database's primary: what counts as wrong."""

import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from lab.hosts import client
from lab.hosts.databases import DECIDES_WITHIN_S, PowerOff, Promotion, Writer


@dataclass
class _Databases:
    """Two hosts, the second of which decides again so long after its promotion."""

    pass_s: float = 1.0
    lost: set[str] = field(default_factory=set)
    places: Any = None

    def other(self, host: str) -> str:
        return "c2" if host == "c1" else "c1"

    def writer(self, _host: str) -> Any:
        return _Writer("", "", "lab")

    def promote(self, _host: str) -> Promotion:
        return Promotion(took_s=3.0, pass_s=self.pass_s, ended_at=time.monotonic(), doubt="it may be cut off")

    def missing(self, _writer: Writer) -> set[str]:
        return self.lost

    def rejoin(self, _host: str) -> float:
        return 9.0


class _Writer(Writer):
    def start(self) -> None:
        self.acknowledged |= {"lab-1": 0.0, "lab-2": 0.0}

    def stop(self) -> None:
        pass


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What the laboratory was asked to do to a host."""
    done: list[tuple[str, str]] = []
    monkeypatch.setattr(client, "ask", lambda _places, command, name: done.append((command, name)))
    monkeypatch.setattr("lab.hosts.databases.time.sleep", lambda _s: None)
    return done


def _tried(databases: _Databases) -> PowerOff:
    off = PowerOff(databases, "c1")  # type: ignore[arg-type]
    off.begin()
    off.heal()
    off.end()
    return off


def test_the_host_loses_its_power_and_gets_it_back(asked: list[tuple[str, str]]) -> None:
    off = _tried(_Databases())

    assert asked == [("power-off", "c1"), ("boot", "c1")]
    assert not off.problems
    assert off.said == (
        "promoted by force in 3.0 s, decided 1.0 s later, 2 writes acknowledged of which 0 are missing, "
        "rejoined in 9.0 s"
    )


@pytest.mark.usefixtures("asked")
def test_an_acknowledged_write_that_is_missing_is_wrong() -> None:
    assert _tried(_Databases(lost={"lab-2"})).problems == ["lab-2 was acknowledged and is missing"]


@pytest.mark.usefixtures("asked")
def test_a_pass_that_comes_too_late_is_wrong() -> None:
    late = DECIDES_WITHIN_S + 1

    assert _tried(_Databases(pass_s=late)).problems == ["nothing was decided for 16.0 s after the promotion"]
