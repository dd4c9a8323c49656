"""A host changes its release: downloads are checked, no partial release stays, and a kill at any step is repaired."""

import io
import os
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import msgspec
import pytest

from engine_agent.node.machine import releases
from engine_agent.node.machine.paths import HostPaths
from engine_agent.node.machine.release_change import ReleaseChange, Tried
from engine_agent.node.machine.releases import ReleaseTrouble, confirm, install, point, switch_to, trim
from engine_agent.protocol.machine_messages import Release, ReleaseOrder, release_in
from tests.engine_agent.node.machine.made_releases import NEW, OLD, Server, archive, files, order, put

pytestmark = pytest.mark.slow


def fetched(paths: HostPaths, server: Server, wanted: ReleaseOrder, given_up: threading.Event | None = None) -> Path:
    return install(paths, wanted, ("http://127.0.0.1:9", server.url), "secret", given_up or threading.Event())


def left(paths: HostPaths) -> list[str]:
    return sorted(path.name for path in paths.releases.iterdir())


def test_a_release_is_fetched_from_who_has_it_tried_and_ready(paths: HostPaths, server: Server) -> None:
    server.packed = archive(files(NEW))
    wanted = order(server.packed)
    folder = fetched(paths, server, wanted)
    assert release_in(folder) == Release(NEW, "0.1.0", 2)
    assert left(paths) == sorted(["old", folder.name])
    assert server.asked == [f"/agents/releases/{NEW}/{wanted.digest}"]
    fetched(paths, server, wanted)
    assert len(server.asked) == 1  # it is there
    assert paths.current.resolve().name == "old"


def refuse(
    paths: HostPaths, server: Server, wanted: ReleaseOrder, says: str, given_up: threading.Event | None = None
) -> None:
    with pytest.raises(ReleaseTrouble, match=says):
        fetched(paths, server, wanted, given_up)
    assert left(paths) == ["old"]
    assert paths.current.resolve().name == "old"


def test_what_is_wrong_with_it_is_one_sentence_and_nothing_is_left(
    paths: HostPaths, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "SHORTEST_PAUSE_S", 2 * releases.FETCH_LIMIT_S)
    monkeypatch.setattr(releases, "LONGEST_PAUSE_S", 2 * releases.FETCH_LIMIT_S)
    good = server.packed = archive(files(NEW))
    refuse(
        paths,
        server,
        order(good, digest="e" * 64),
        "has SHA-256 .*… instead of eeeeeeeeeeeeeeee…; the running release stays",
    )
    refuse(paths, server, order(good, size_bytes=len(good) - 1), f"is longer than {len(good) - 1} bytes")
    refuse(paths, server, order(good, size_bytes=len(good) + 1), f"1 of {len(good) + 1} bytes are missing")
    refuse(paths, server, order(good, name="2" * 16), f"holds release {NEW} instead of 2222222222222222")
    refuse(paths, server, order(good, name="../../etc"), "the order names no release")
    refuse(paths, server, order(good, size_bytes=2**40), "it must have 1 to")
    server.packed = b"no archive"
    refuse(paths, server, order(server.packed), "the archive cannot be unpacked")
    server.packed = archive({**files(NEW), "../outside": "x"})
    refuse(paths, server, order(server.packed), "'../outside' is not a file of a release")
    server.packed = b""
    refuse(paths, server, order(good), f"release {NEW} cannot be fetched: .*it answered 404")
    monkeypatch.setattr(releases, "KEEP_FREE_BYTES", 2**60)
    refuse(paths, server, order(good), "MiB of disk are free at .*, but release 1111111111111111 needs .*; free some")


class NoPause(threading.Event):
    """An event whose waits return immediately and record their time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.waited: list[float] = []
        monkeypatch.setattr(releases, "JITTER", 0.0)

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(timeout or 0.0)
        return self.is_set()


def test_a_server_that_is_busy_or_restarted_is_asked_again(
    paths: HostPaths, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = NoPause(monkeypatch)
    server.packed = archive(files(NEW))
    server.busy = [(503, "7"), (429, ""), (502, "1" * 5), (500, "9" * 500), (503, "soon")]
    server.cut = 1
    assert release_in(fetched(paths, server, order(server.packed), pauses)) == Release(NEW, "0.1.0", 2)
    assert pauses.waited == [7.0, 10.0, 30.0, 30.0, 30.0, 30.0]
    assert len(server.asked) == 7


def test_one_that_stays_busy_is_left_in_time_and_one_that_says_no_at_once(
    paths: HostPaths, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = NoPause(monkeypatch)
    monkeypatch.setattr(releases, "LONGEST_PAUSE_S", 1000.0)
    good = archive(files(NEW))
    server.busy = [(503, "5")] * 9
    says = f"release {NEW} cannot be fetched: .*:9: .*refused.*; .* it answered 503$"
    refuse(paths, server, order(good), says, pauses)
    assert pauses.waited == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0]
    server.busy = []
    with pytest.raises(ReleaseTrouble, match=f"{server.url}: it answered 404$"):
        install(paths, order(good), (server.url,), "secret", pauses)
    assert len(pauses.waited) == 6


def test_a_download_that_trickles_is_left_in_time(
    paths: HostPaths, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "FETCH_LIMIT_S", 0.0)
    server.packed = archive(files(NEW))
    server.go_on.clear()
    refuse(paths, server, order(server.packed), "bytes are missing after 0 s")


def test_what_nobody_wants_any_more_is_not_fetched_to_its_end(paths: HostPaths, server: Server) -> None:
    server.packed = archive(files(NEW))
    server.go_on.clear()
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(ReleaseTrouble, match=f"release {NEW} is no longer ordered"):
        install(paths, order(server.packed), (server.url,), "secret", given_up)
    server.busy = [(503, "5")]
    with pytest.raises(ReleaseTrouble, match=f"release {NEW} is no longer ordered"):
        install(paths, order(server.packed), (server.url,), "secret", given_up)
    assert left(paths) == ["old"]


def test_engines_of_other_accounts_can_run_it_whatever_the_umask(paths: HostPaths, server: Server) -> None:
    server.packed = archive({**files(NEW), "site/deep/down.py": ""})
    before = os.umask(0o077)
    try:
        folder = fetched(paths, server, order(server.packed))
    finally:
        os.umask(before)
    # Bytecode is read by who wrote it, and made anew by others.
    own = [path for path in (folder, *folder.rglob("*")) if not path.is_symlink() and "__pycache__" not in path.parts]
    assert folder / "site/deep/down.py" in own
    assert folder / "venv/pyvenv.cfg" in own
    closed = [path for path in own if path.stat().st_mode & (mode := 0o555 if path.is_dir() else 0o444) != mode]
    assert closed == []


def test_one_that_does_not_work_here_is_not_switched_to(paths: HostPaths, server: Server) -> None:
    server.packed = archive(files(NEW, check="it cannot read the journal"))
    with pytest.raises(ReleaseTrouble, match=f"release {NEW} does not work on this host: it cannot read the journal"):
        fetched(paths, server, order(server.packed))


def test_a_link_in_an_archive_is_refused(paths: HostPaths, server: Server) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        entry = tarfile.TarInfo("engine_agent")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc"
        tar.addfile(entry)
    server.packed = packed.getvalue()
    refuse(paths, server, order(server.packed), "'engine_agent' is not a file of a release")


def test_killed_anywhere_it_is_made_good_the_next_time(
    paths: HostPaths, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent is killed before each step in turn, without cleanup."""

    class Killed(BaseException):
        pass

    dead = []
    clear = releases._clear

    def die(*_: object, **__: object) -> None:
        dead.append(True)
        raise Killed

    server.packed = archive(files(NEW))
    wanted = order(server.packed)
    for step in ("_require_room", "_fetch", "_unpack", "_make_environment", "_try"):
        with monkeypatch.context() as broken:
            broken.setattr(releases, step, die)
            broken.setattr(releases, "_clear", lambda paths: None if dead else clear(paths))
            with pytest.raises(Killed):
                fetched(paths, server, wanted)
        assert paths.current.resolve().name == "old"
        dead.clear()
    folder = fetched(paths, server, wanted)
    assert left(paths) == sorted(["old", folder.name])
    with monkeypatch.context() as broken:
        broken.setattr(releases, "point", die)
        with pytest.raises(Killed):
            switch_to(paths, folder, 1)
    assert paths.current.resolve().name == "old"
    Path(paths.home / "release-tried.json").write_bytes(msgspec.json.encode(Tried(NEW, 1)))
    again = ReleaseChange(paths, Release(OLD, "0.1.0", 2))
    assert not again.on_trial
    assert again.is_due(wanted)


def running(code: Path) -> subprocess.Popen[bytes]:
    """A process that names `code`, once it runs: during its exec, /proc shows no arguments."""
    program = "import signal, sys; sys.stdout.write('up\\n'); sys.stdout.flush(); signal.pause()"
    process = subprocess.Popen([sys.executable, "-c", program, str(code)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"up\n"
    return process


def test_what_is_confirmed_stays_and_older_ones_go_but_not_what_runs(paths: HostPaths) -> None:
    for name in ("older", "running", "new"):
        put(paths, name, files(NEW))
    switch_to(paths, paths.releases / "new", 1)
    assert trim(paths) == []  # it may have to go back
    runs = running(paths.releases / "running")
    try:
        assert confirm(paths)
        assert not confirm(paths)
        assert trim(paths) == ["older"]
    finally:
        runs.kill()
        runs.wait()
    assert trim(paths) == ["running"]
    assert left(paths) == ["new", "old"]
    assert paths.previous.resolve().name == "old"


def test_what_runs_stays_where_a_link_leads_to_the_code(paths: HostPaths, tmp_path: Path) -> None:
    linked = HostPaths(tmp_path / "link")
    linked.code.symlink_to(paths.code)
    for name in ("older", "running"):
        put(linked, name, files(NEW))
    point(linked.current, linked.releases / "old")
    whole = (linked.releases / "running").resolve()
    runs = running(whole)
    try:
        assert trim(linked) == ["older"]
    finally:
        runs.kill()
        runs.wait()
    assert left(linked) == ["old", "running"]
