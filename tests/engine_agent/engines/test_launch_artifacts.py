"""The first part of a start: weights arrive, the process reports progress, and becomes the engine."""

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_agent.engines import launch_artifacts
from engine_agent.engines.artifacts import Entry, entry_of
from engine_agent.engines.launch_artifacts import EXIT_ADDRESS_IN_USE, EXIT_BAD_ARTIFACT, main
from engine_agent.engines.s3_artifact import download
from engine_agent.protocol.messages import Artifact
from tests.asking import CLIENT
from tests.engine_agent.engines.s3_server import empty_bucket, s3_server, upload
from tests.ports import free_port

SERVE = ["/engine/bin/python", "-m", "serve", "--", "--seed", "1"]


class Became:
    """Records the program that the process would become, and runs the test's check at that moment."""

    def __init__(self, look: Callable[[], None] = lambda: None) -> None:
        self.argv: list[str] = []
        self._look = look

    def __call__(self, program: str, argv: list[str]) -> None:
        assert program == argv[0]
        self.argv = argv
        self._look()


def fetching(*artifacts: Artifact, cache: Path, port: int) -> list[str]:
    fetch = [word for item in artifacts for word in ("--fetch", item.uri, item.digest)]
    return ["--cache", str(cache), "--health-port", str(port), *fetch, "--", *SERVE]


def inheritable() -> set[str]:
    """Files that the next program would inherit."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            if int(number) > 2 and os.get_inheritable(int(number)):
                found.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    return found


def test_weights_come_and_their_locks_pass_to_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, passed = tmp_path / "cache", set[str]()
    became = Became(lambda: passed.update(inheritable()))
    with s3_server() as url:
        client = empty_bucket(url, monkeypatch)
        model = upload(client, tmp_path / "model", {"a.bin": b"weights"})
        draft = upload(client, tmp_path / "draft", {"a.bin": b"fewer"}, "draft")
        assert main(fetching(model, draft, cache=cache, port=free_port()), became) == 0
    entries = [entry_of(each.digest, cache) for each in (model, draft)]
    assert [(each.folder / "a.bin").read_bytes() for each in entries] == [b"weights", b"fewer"]
    assert became.argv == SERVE
    assert passed >= {str(each.lock) for each in entries}


@pytest.mark.processes
def test_what_the_launcher_became_keeps_its_artifact_until_it_ends(tmp_path: Path) -> None:
    entry = entry_of(f"sha256:{'a' * 64}", tmp_path)
    entry.folder.mkdir()
    script = "import sys; print('loaded', flush=True); sys.stdin.readline()"  # an engine
    launcher = fetching(Artifact("s3://m/p", f"sha256:{'a' * 64}"), cache=tmp_path, port=free_port())
    argv = [*launcher[: launcher.index("--") + 1], sys.executable, "-c", script]
    command = [sys.executable, "-m", launch_artifacts.__name__, *argv]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        assert engine.stdout.readline() == "loaded\n"
        assert is_kept(entry)
        engine.stdin.write("end\n")
    assert engine.returncode == 0
    assert not is_kept(entry)


def is_kept(entry: Entry) -> bool:
    """Whether no process can remove the entry now."""
    with entry.lock.open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_until_then_its_port_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[str]()
    real = download

    def look(artifact: Artifact, entry: Entry, room: Callable[[int], None], *more: object) -> None:
        def asked(total: int) -> None:
            room(total)
            answer = CLIENT.get(f"http://127.0.0.1:{port}/health")
            seen.append(f"{answer.status_code} {answer.json()['reason']}")

        real(artifact, entry, asked, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(launch_artifacts, "download", look)
    with s3_server() as url:
        port = free_port()
        artifact = upload(empty_bucket(url, monkeypatch), tmp_path / "source", {"a.bin": b"weights"})
        assert main(fetching(artifact, cache=tmp_path / "cache", port=port), Became()) == 0
    assert seen == ["503 fetching the artifact"]
    assert main(fetching(artifact, cache=tmp_path / "cache", port=port), Became()) == 0  # the port is free again


def test_what_is_wrong_is_the_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = fetching(Artifact("s3://models/x", "sha256:1"), cache=tmp_path, port=free_port())
    assert main(wrong, Became()) == EXIT_BAD_ARTIFACT
    assert (
        capsys.readouterr().err.splitlines()[-1].startswith("'sha256:1' is not the digest of an artifact; it must be")
    )
    (tmp_path / "file").touch()
    command = fetching(Artifact("s3://models/x", f"sha256:{'a' * 64}"), cache=tmp_path / "file", port=free_port())
    assert main(command, Became()) == EXIT_BAD_ARTIFACT
    assert f"the cache {tmp_path}/file cannot be used: " in capsys.readouterr().err


def test_a_limit_that_is_none_ends_it_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWITCHYARD_ARTIFACT_CACHE_GIB", "plenty")
    command = fetching(Artifact("s3://models/x", f"sha256:{'a' * 64}"), cache=tmp_path, port=free_port())
    assert main(command, Became()) == EXIT_BAD_ARTIFACT
    assert "SWITCHYARD_ARTIFACT_CACHE_GIB is 'plenty'; it must be a whole number of GiB" in capsys.readouterr().err


def test_a_port_that_is_taken_ends_it_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = fetching(Artifact("s3://m/x", f"sha256:{'a' * 64}"), cache=tmp_path, port=port)
        assert main(command, Became()) == EXIT_ADDRESS_IN_USE
    assert f"cannot listen on 127.0.0.1:{port}: " in capsys.readouterr().err
