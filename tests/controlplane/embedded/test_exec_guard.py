import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from controlplane.embedded.exec_guard import CANNOT_EXEC
from controlplane.embedded.privileges import server_account
from controlplane.embedded.processes import GUARD
from tests.controlplane.embedded.processes import eventually

IS_ROOT = os.geteuid() == 0
OF_THE_SERVERS = ["--account", drop] if (drop := server_account().drop) else []

PARENT = """
import os, subprocess, sys, time
guard, account = sys.argv[1], sys.argv[2:]
child = subprocess.Popen([sys.executable, guard, "--parent", str(os.getpid()), "--death-signal", "15", *account, "--",
                          "/bin/sleep", "600"])
print(child.pid, flush=True)
time.sleep(600)
"""


def _guard(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(GUARD), "--parent", str(os.getpid()), "--death-signal", "15", *options]
    # In a new session: otherwise it would take over the session of all tests.
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, start_new_session=True)


def _as_nobody(*options: str) -> subprocess.CompletedProcess[str]:
    return _guard("--account", "nobody", *options)


def _assert_refused(ended: subprocess.CompletedProcess[str]) -> None:
    """Asserts the refusal for users other than root: nothing starts under another account."""
    assert (ended.returncode, ended.stdout) == (CANNOT_EXEC, "")
    assert "Operation not permitted" in ended.stderr


@pytest.mark.parametrize("account", [[], OF_THE_SERVERS], ids=["as we are", "as the servers"])
def test_the_program_ends_when_its_parent_is_killed(account: list[str]) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(GUARD), *account], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent:
        child = psutil.Process(int(parent.stdout.readline()))
        assert eventually(lambda: child.name() == "sleep")
        parent.send_signal(signal.SIGKILL)
    assert eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_it_does_not_start_once_the_parent_is_gone() -> None:
    command = [sys.executable, str(GUARD), "--parent", "1", "--death-signal", "15", "--", "/bin/echo", "started"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (127, "")
    assert "the parent is gone already" in ended.stderr


def test_a_program_that_is_not_there_is_named() -> None:
    ended = _guard("--", "/no/such/program")
    assert ended.returncode == 127
    assert ended.stderr == "cannot start /no/such/program: [Errno 2] No such file or directory\n"


def test_the_account_passes_a_closed_folder_only_with_leave(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    (closed / "open").mkdir(parents=True)
    (closed / "open" / "note").write_text("read")
    closed.chmod(0o700)
    note = str(closed / "open" / "note")
    if not IS_ROOT:
        _assert_refused(_as_nobody("--traverse", "--", "/bin/cat", note))
        return
    assert _as_nobody("--", "/bin/cat", note).returncode != 0
    assert _as_nobody("--traverse", "--", "/bin/cat", note).stdout == "read"
    probe = f"import os; print(os.access({note!r}, os.R_OK))"
    assert _as_nobody("--traverse", "--", sys.executable, "-c", probe).stdout == "True\n"


def test_the_account_keeps_no_other_right_of_root() -> None:
    ended = _as_nobody("--traverse", "--", "/bin/cat", "/proc/self/status")
    if not IS_ROOT:
        _assert_refused(ended)
        return
    status = ended.stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert set(fields["Uid"].split()) == {"65534"}
    assert int(fields["CapEff"], 16).bit_count() == 1
    assert fields["Groups"].strip() == ""


def test_the_program_steps_back_and_nobody_but_root_goes_before_others() -> None:
    assert _guard("--nice", "7", "--", "/usr/bin/nice").stdout.strip() == "7"
    before = _guard("--nice", "-5", "--", "/usr/bin/nice")
    assert (before.returncode, before.stdout.strip() in {"-5", str(os.nice(0))}) == (0, True), before.stderr
