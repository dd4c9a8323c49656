"""The start script goes back from a release that does not confirm itself."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engine_agent.node.machine import service
from engine_agent.node.machine.paths import HostPaths
from engine_agent.node.machine.release_change import ReleaseChange, Tried
from engine_agent.node.machine.releases import switch_to
from engine_agent.protocol.machine_messages import Release, ReleaseOrder
from tests.controlplane.embedded.processes import eventually
from tests.engine_agent.node.machine.made_releases import NEW, OLD, files, put

SLEEP, CAT = shutil.which("sleep"), shutil.which("cat")


def supervised(
    paths: HostPaths, until: Callable[[], bool], *, watch_ends: str = "false", late_until: str = "true"
) -> None:
    """Runs the start script again whenever it exits, until the condition or the deadline.

    The time of a trial is over when the command `watch_ends` succeeds, because a busy host needs seconds to start an
    agent. `late_until`: commands of background shells start when this command succeeds.
    """
    programs = paths.code / "programs"
    programs.mkdir()
    wait = f'cd "{paths.code}"\nuntil %s; do {SLEEP} 0.02; done\n'
    is_background = '[ "$PPID" != "$(head -n 1 agent.pid)" ]'
    for name, text in (
        ("sleep", f"#!/bin/sh\n{wait % watch_ends}"),
        ("cat", f'#!/bin/sh\n{wait % f"! {is_background} || {late_until}"}exec {CAT} "$@"\n'),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    script = ["sh", str(paths.code / "start")]
    processes: list[subprocess.Popen[bytes]] = []

    def is_done() -> bool:
        if not processes or processes[-1].poll() is not None:
            processes.append(subprocess.Popen(script, env=environment, start_new_session=True))
        return until()

    try:
        assert eventually(is_done), (paths.code / "starts").read_text()
    finally:
        for process in processes:  # each left a watcher in its group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def started(paths: HostPaths) -> list[str]:
    try:
        return [line.split()[0] for line in (paths.code / "starts").read_text().splitlines()]
    except FileNotFoundError:
        return []


def test_one_that_ends_at_once_is_left_after_its_starts(paths: HostPaths) -> None:
    service.write_start(paths)
    switch_to(paths, put(paths, "new", files(NEW, then="sys.exit(1)")), 1)
    supervised(paths, lambda: OLD in started(paths))
    assert started(paths)[:4] == [NEW] * service.TRIAL_STARTS + [OLD]
    assert paths.current.resolve().name == "old"
    assert not paths.trial.exists()
    Path(paths.home / "release-tried.json").write_bytes(msgspec.json.encode(Tried(NEW, 1)))
    known = ReleaseChange(paths, Release(OLD, "0.1.0", 2))
    assert known.tried is not None
    assert known.tried.trouble == f"release {NEW} did not connect within 90 s and 3 starts; the previous one stays"
    assert not known.is_due(ReleaseOrder(NEW, "e" * 64, 7, 1))
    assert known.is_due(ReleaseOrder(NEW, "e" * 64, 7, 2))


def test_one_that_hangs_is_left_after_its_time(paths: HostPaths) -> None:
    service.write_start(paths)
    # The name of the module on its command line is what the script knows an agent by.
    switch_to(paths, put(paths, "new", files(NEW, then="signal.pause()")), 1)
    supervised(paths, lambda: OLD in started(paths), watch_ends="[ -s starts ]")
    assert started(paths)[0] == NEW
    assert paths.current.resolve().name == "old"


@pytest.mark.parametrize("late_until", ["true", "[ ! -e trial ]"])
def test_one_that_confirms_itself_is_not_left(paths: HostPaths, late_until: str) -> None:
    service.write_start(paths)
    # Its only child is the watcher, which goes when its time is over.
    then = "(code / 'trial').unlink()\nos.wait()\n(code / 'stayed').touch()\nsignal.pause()"
    switch_to(paths, put(paths, "new", files(NEW, then=then)), 1)
    supervised(paths, (paths.code / "stayed").exists, watch_ends="[ ! -e trial ]", late_until=late_until)
    assert started(paths) == [NEW]
    assert paths.current.resolve().name == "new"


def test_a_release_before_that_is_gone_is_not_gone_back_to(paths: HostPaths) -> None:
    service.write_start(paths)
    switch_to(paths, put(paths, "new", files(NEW, then="sys.exit(1)")), 1)
    shutil.rmtree(paths.releases / "old")
    supervised(paths, paths.went_back.exists)
    assert paths.current.resolve().name == "new"


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """Needs `systemd-analyze` (apt-get install systemd)."""
    unit = tmp_path / service.UNIT
    unit.write_text(
        service._UNIT.format(code="/opt/switchyard", log="/var/lib/switchyard/machine.log", left=service.LEFT),
        encoding="utf-8",
    )
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
