"""What `lab cloud up` records of a run, and what `make status` and `make down` do with a laboratory that has a cloud.
By its record alone: none is started."""

import json
import os
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lab.hosts import cloud_commands, cloud_fleet
from lab.hosts.cloud_fleet import Happened, Trail, text_of
from lab.hosts.conditions import Conditions, write_state
from lab.hosts.fleet import Fleet, Ports
from lab.hosts.places import CHECKOUT, read_places
from lab.hosts.topology import NoLaboratory, Topology

BEGAN = datetime(2026, 11, 24, 12, 0, tzinfo=UTC)
TOPOLOGY = Topology(("us-east-1",), 1, 0, 0, cloud=True)
PORTS = Ports(8790, 8795)


def event(after_s: float, kind: str, message: str) -> dict[str, str]:
    return {"at": (BEGAN + timedelta(seconds=after_s)).isoformat(), "kind": kind, "message": message}


def test_a_trail_has_steps_and_events_in_order_of_time(tmp_path: Path) -> None:
    pages = {
        "events/?page_size=500": {"results": [event(9.5, "cell.ready", "c is ready")], "next": "http://x/y?page=2"},
        "events/?page=2": {"results": [event(1, "region.ready", "r was read")], "next": None},
    }
    said: list[str] = []
    times = iter([BEGAN, BEGAN + timedelta(seconds=70)])
    trail = Trail(said.append, lambda: next(times))
    trail.say("the control plane answers")
    trail.say("us-east-1 streamed an answer")
    trail.write(tmp_path / "trail", lambda method, path: pages[path])
    assert said == ["the control plane answers", "us-east-1 streamed an answer"]
    assert (tmp_path / "trail").read_text() == (
        "12:00:00      0.0 s  step          the control plane answers\n"
        "12:00:01      1.0 s  region.ready  r was read\n"
        "12:00:09      9.5 s  cell.ready    c is ready\n"
        "12:01:10     70.0 s  step          us-east-1 streamed an answer\n"
    )


def test_a_trail_is_written_without_events_where_nobody_answers(tmp_path: Path) -> None:
    def ask(method: str, path: str) -> Any:
        raise NoLaboratory("nobody answers")

    trail = Trail(lambda text: None, lambda: BEGAN)
    trail.write(tmp_path / "trail", ask)
    assert (tmp_path / "trail").read_text().endswith("events could not be read: nobody answers\n")
    assert text_of([]) == ""
    assert text_of([Happened(BEGAN, "a", "b")]) == "12:00:00      0.0 s  a  b\n"


def test_a_run_that_ends_early_leaves_its_trail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise NoLaboratory("it is refused")

    monkeypatch.setattr(Fleet, "until", refuse)
    monkeypatch.setattr(Fleet, "ask", refuse)
    places = read_places({"SWITCHYARD_HOME": str(tmp_path)})
    running = cloud_fleet.CloudFleet(places, TOPOLOGY, PORTS, lambda text: None)
    with pytest.raises(NoLaboratory, match="it is refused"):
        running.bring_up()
    assert "it ends here: it is refused" in running.trail.read_text()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Of a laboratory with a cloud, as far as its record says."""
    folder = tmp_path / "lab"
    settings = tmp_path / "lab/hosts/c1/files/var/lib/switchyard/settings.json"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps({"secret_key": "k", "operator_password": "swordfish"}))
    forwards = [list(each) for each in cloud_fleet.forwards(TOPOLOGY, PORTS)]
    keys = {"access_key": "a", "secret": "s", "pending_s": 0.0}
    record = {"pid": os.getpid(), **write_state(TOPOLOGY, Conditions()), "forwards": forwards, "cloud": keys}
    (folder / "lab.json").write_text(json.dumps(record))
    return tmp_path


@pytest.mark.parametrize(
    ("region", "cell", "code", "said"),
    [
        ("ready", "ready", 0, "every cell is ready"),
        ("reading", "ready", 1, "us-east-1 is reading: no answer yet"),
        ("ready", "starting", 1, "c is starting"),
    ],
)
def test_the_status_says_how_far_it_is_and_how_a_person_gets_in(
    home: Path, monkeypatch: pytest.MonkeyPatch, region: str, cell: str, code: int, said: str
) -> None:
    answers: dict[str, Any] = {
        "regions/": [{"name": "us-east-1", "cloud": {"state": region, "reason": "no answer yet"}}],
        "cells/?page_size=500": [{"id": "c", "state": cell}],
    }
    columns = ("instance", "host", "state", "type", "zone", "market", "address", "reason")
    monkeypatch.setattr(cloud_commands, "ask", lambda what: [dict.fromkeys(columns, "i-1")])
    monkeypatch.setattr(Fleet, "ask", lambda self, method, path: {"results": answers[path]})
    monkeypatch.setenv("SWITCHYARD_HOME", str(home))
    shown = CliRunner().invoke(cloud_commands.app, ["status"])
    assert (shown.exit_code, said in shown.output, "i-1" in shown.output) == (code, True, True), shown.output
    assert "user operator, password swordfish" in shown.output
    assert str(home / "cloud-trail.txt") in shown.output


def test_a_password_that_is_not_made_yet_is_not_made_by_looking(home: Path) -> None:
    settings = home / "lab/hosts/c1/files/var/lib/switchyard/settings.json"
    settings.unlink()
    running = Fleet(read_places({"SWITCHYARD_HOME": str(home)}), TOPOLOGY, PORTS, print)
    assert "  Login      user operator\n" in running.login()
    assert not settings.exists()


@pytest.mark.parametrize(
    ("target", "has_cloud", "ran"),
    [
        ("status", True, ["-m lab.hosts.cli cloud status"]),
        ("status", False, ["-m controlplane.embedded status"]),
        ("down", True, ["-m lab.hosts.cli down", "-m controlplane.embedded down"]),
        ("down", False, ["-m controlplane.embedded down"]),
    ],
)
def test_make_asks_whoever_runs_the_fleet(
    home: Path, tmp_path: Path, target: str, has_cloud: bool, ran: list[str]
) -> None:
    if not has_cloud:
        (home / "lab/lab.json").unlink()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/ran\n')
    python.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "SWITCHYARD_HOME": str(home)}
    done = subprocess.run(
        ["make", "--no-print-directory", target, f"VENV={python}"],
        cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ran").read_text().splitlines() == ran
