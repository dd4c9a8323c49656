"""A server and its core exit together, whichever exits first."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_agent.engines.vllm.core_process import EXIT_CORE_ENDED

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[4]
LIMIT_S = 120.0
SERVER = textwrap.dedent("""
    import os, sys, time
    from pathlib import Path
    from engine_agent.engines.vllm.core_process import CoreContext, CoreProcess

    def work(line):
        os.write(1, f"{line}\\n".encode())  # in one piece: the server writes to the same pipe
        time.sleep(600)

    CoreProcess.shutdown_hook = staticmethod(lambda: Path(sys.argv[1]).touch())
    core = CoreContext().Process(target=work, name="EngineCore", kwargs={"line": "working"})
    core.start()
    os.write(1, f"{core.pid}\\n".encode())
    time.sleep(600)
""")
Server = subprocess.Popen[str]


@pytest.fixture
def shutdown_hook(tmp_path: Path) -> Path:
    return tmp_path / "last-act"


@pytest.fixture
def server(shutdown_hook: Path) -> Iterator[Server]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(shutdown_hook)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        yield process
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def working_core(server: Server) -> int:
    """The core's process id, once it works."""
    assert server.stdout is not None
    said = {server.stdout.readline().strip(), server.stdout.readline().strip()}
    assert "working" in said
    (pid,) = said - {"working"}
    return int(pid)


def is_gone_within(pid: int, limit_s: float) -> bool:
    """Whether a process exits; a zombie counts as exited."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_a_core_dies_with_a_killed_server(server: Server) -> None:
    core = working_core(server)
    server.kill()
    assert is_gone_within(core, LIMIT_S)


def test_a_server_ends_after_its_killed_core_and_says_why(server: Server, shutdown_hook: Path) -> None:
    os.kill(working_core(server), signal.SIGKILL)
    _, errors = server.communicate(timeout=LIMIT_S)
    assert server.returncode == EXIT_CORE_ENDED
    assert errors == "EngineCore exited 2 s ago: the server exits\n"
    assert shutdown_hook.exists()


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("openai/api_server.py", "import sys\nif __name__ == '__main__':\n    print('program', *sys.argv[1:])\n"),
        ("launchers/api_server/entry.py", "import sys\ndef main():\n    print('function', *sys.argv[1:])\n"),
    ],
)
def test_the_api_server_is_started_where_its_version_has_it(tmp_path: Path, module: str, source: str) -> None:
    """Up to 0.25 it is a program, in 0.32 a function."""
    file = tmp_path / "vllm" / "entrypoints" / module
    file.parent.mkdir(parents=True)
    file.write_text(source)
    code = (
        "import sys; from engine_agent.engines.vllm.core_process import api_server; sys.argv = ['vllm', '--port', '1']"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; api_server()()"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert done.stdout == f"{'program' if 'openai' in module else 'function'} --port 1\n"
