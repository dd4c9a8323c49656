"""One run of all checks prints a line for each result and exits with 1 if one failed."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from engine_agent.node.checks import deep
from engine_agent.node.checks.deep import LOCK_FILE, DeepPlan, run_deep
from engine_agent.node.checks.result import Result, result_from

pytestmark = pytest.mark.processes


def test_a_node_is_checked_by_one_command(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "engine_agent", "deep-checks", "--state", str(tmp_path), "--seconds", "0"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    results = {result.check: result for result in map(result_from, done.stdout.splitlines())}
    assert set(results) == {"memory", "disk", "matmul cpu"}
    assert results["memory"].ok
    assert results["matmul cpu"].ok
    assert done.returncode == int(any(result.ok is False for result in results.values())), done.stderr


def test_a_plan_of_links_that_is_none_is_refused(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "engine_agent", "deep-checks", "--state", str(tmp_path), "--links"]
    done = subprocess.run(argv, input="{}", capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "invalid plan of links" in done.stderr


def test_the_first_python_that_works_computes(tmp_path: Path) -> None:
    plan = DeepPlan(tmp_path, (tmp_path / "missing", Path(sys.executable)), seconds=0)
    assert [result.ok for result in deep._compute(plan)] == [True]


@pytest.mark.parametrize(
    ("program", "ok", "found"),
    [
        ("#!/bin/sh\nkill -SEGV $$", False, "exited with status -11"),
        ("#!/bin/sh\necho no module named x >&2; exit 3", None, "exited with status 3: no module named x"),
        ("#!/bin/sh\nexec sleep 60", False, "no answer from"),
    ],
)
def test_a_python_that_crashes_or_hangs_is_a_finding(
    program: str, ok: bool | None, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep, "COMPUTE_STARTS_S", 0.2)
    python = tmp_path / "python"
    python.write_text(program)
    python.chmod(0o700)
    (result,) = deep._compute_in(python, 0.0)
    assert result.ok is ok
    assert found in result.found


def test_checks_come_one_by_one(tmp_path: Path) -> None:
    first = next(iter(run_deep(DeepPlan(tmp_path, seconds=0, memory_mib=8))))
    assert first.check == "memory"


def test_nodes_of_a_machine_check_its_disk_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*_: object) -> Result:
        with (tmp_path / LOCK_FILE).open("ab") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return Result("disk", True, "alone")

    monkeypatch.setattr("engine_agent.node.checks.deep.check_disk", check)
    plan = DeepPlan(tmp_path / "n-00000001", seconds=0, memory_mib=8, computes=False)
    assert [result.found for result in run_deep(plan)][1:] == ["alone"]
