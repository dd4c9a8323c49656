"""A host changes its release: what is fetched is checked, nothing half is left, each death in between is made good, and
what does not confirm itself is left again by the script that starts the agent."""

import contextlib
import hashlib
import http.server
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from engine_agent.machine import releases, service
from engine_agent.machine.paths import HostPaths
from engine_agent.machine.release_change import ReleaseChange, Tried
from engine_agent.machine.releases import ReleaseTrouble, confirm, install, point, switch_to, trim
from engine_agent.protocol.machine_messages import ReleaseOrder
from engine_agent.protocol.releases import RELEASE_FILE, Release, release_in
from tests.controlplane.embedded.processes import eventually

OLD, NEW = "0" * 16, "1" * 16
AGENT = """
import os, signal, sys
from pathlib import Path
if sys.argv[1] == "check":
    sys.exit({check!r})
code = Path(sys.argv[-1])
with (code / "starts").open("a") as starts:
    starts.write(f"{name} {{os.getpid()}}\\n")
{then}
"""
"""Stands in for an agent: it notes that it was started, and does as its release says."""


def files(name: str, *, then: str = "", check: object = 0) -> dict[str, str]:
    return {
        "engine_agent/__init__.py": "",
        "engine_agent/__main__.py": AGENT.format(name=name, then=then, check=check),
        RELEASE_FILE: msgspec.json.encode(Release(name, "0.1.0", 2)).decode(),
    }


def archive(content: dict[str, str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, text in content.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text.encode()), 0o644
            tar.addfile(entry, io.BytesIO(text.encode()))
    return packed.getvalue()


def order(packed: bytes, name: str = NEW, **changes: object) -> ReleaseOrder:
    made = ReleaseOrder(name, hashlib.sha256(packed).hexdigest(), len(packed), 1)
    return msgspec.structs.replace(made, **changes)


@pytest.fixture
def paths(tmp_path: Path) -> HostPaths:
    """A host on which the old release runs."""
    made = HostPaths(tmp_path / "code")
    made.home.mkdir(parents=True)
    put(made, "old", files(OLD))
    point(made.current, made.releases / "old")
    return made


def put(paths: HostPaths, folder: str, content: dict[str, str]) -> Path:
    """A release that is there already, with an environment that finds it."""
    whole = paths.releases / folder
    for name, text in content.items():
        (whole / name).parent.mkdir(parents=True, exist_ok=True)
        (whole / name).write_text(text)
    python = whole / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\ncd "{whole}" && exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return whole


class Server:
    """Serves one archive to whoever shows the credential."""

    def __init__(self) -> None:
        self.packed = b""
        self.asked: list[str] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                allowed = self.headers["Authorization"] == "Bearer secret" and outer.packed
                self.send_response(200 if allowed else 404)
                self.end_headers()
                self.wfile.write(outer.packed if allowed else b"")

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def fetched(paths: HostPaths, server: Server, wanted: ReleaseOrder) -> Path:
    return install(paths, wanted, ("http://127.0.0.1:9", server.url), "secret")


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


def refuse(paths: HostPaths, server: Server, wanted: ReleaseOrder, says: str) -> None:
    with pytest.raises(ReleaseTrouble, match=says):
        fetched(paths, server, wanted)
    assert left(paths) == ["old"]
    assert paths.current.resolve().name == "old"


def test_what_is_wrong_with_it_is_one_sentence_and_nothing_is_left(
    paths: HostPaths, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = server.packed = archive(files(NEW))
    refuse(
        paths, server, order(good, digest="e" * 64), "has SHA-256 .*… instead of eeeeeeeeeeeeeeee…; what runs goes on"
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
    refuse(paths, server, order(good), "MiB of disk are free at .*, and release 1111111111111111 needs .*; make room")


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
    """Each step in turn is the one before which the agent dies: nothing cleans up behind it."""

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


def test_what_is_confirmed_stays_and_older_ones_go_but_not_what_runs(paths: HostPaths) -> None:
    for name in ("older", "running", "new"):
        put(paths, name, files(NEW))
    switch_to(paths, paths.releases / "new", 1)
    assert trim(paths) == []  # it may have to go back
    runs = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()", str(paths.releases / "running")])
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


# --- the script that starts the agent ---------------------------------------------------------------------------------


def supervised(paths: HostPaths, until: Callable[[], bool]) -> None:
    """As what starts the agent does: again whenever it ends, until it says so or the deadline."""
    processes: list[subprocess.Popen[bytes]] = []

    def is_done() -> bool:
        if not processes or processes[-1].poll() is not None:
            processes.append(subprocess.Popen(["sh", str(paths.code / "start")], start_new_session=True))
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
    assert known.tried.trouble == f"release {NEW} did not connect within 90 s and 3 starts; what was before goes on"
    assert not known.is_due(ReleaseOrder(NEW, "e" * 64, 7, 1))
    assert known.is_due(ReleaseOrder(NEW, "e" * 64, 7, 2))


def test_one_that_hangs_is_left_after_its_time(paths: HostPaths) -> None:
    service.write_start(paths, limit_s=1)
    # The name of the module on its command line is what the script knows an agent by.
    switch_to(paths, put(paths, "new", files(NEW, then="signal.pause()")), 1)
    supervised(paths, lambda: OLD in started(paths))
    assert started(paths)[0] == NEW
    assert paths.current.resolve().name == "old"


def test_one_that_confirms_itself_is_not_left(paths: HostPaths) -> None:
    service.write_start(paths, limit_s=1)
    # Its only child is the watcher, which goes when its time is over.
    then = "(code / 'trial').unlink()\nos.wait()\n(code / 'stayed').touch()\nsignal.pause()"
    switch_to(paths, put(paths, "new", files(NEW, then=then)), 1)
    supervised(paths, (paths.code / "stayed").exists)
    assert started(paths) == [NEW]
    assert paths.current.resolve().name == "new"


def test_a_release_before_that_is_gone_is_not_gone_back_to(paths: HostPaths) -> None:
    service.write_start(paths)
    switch_to(paths, put(paths, "new", files(NEW, then="sys.exit(1)")), 1)
    shutil.rmtree(paths.releases / "old")
    supervised(paths, paths.went_back.exists)
    assert paths.current.resolve().name == "new"
