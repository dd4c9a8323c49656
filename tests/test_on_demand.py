"""Workers collect files on demand: every test runs once, lanes stay on one worker, and no failure is lost."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.on_demand import CRASHED_AMONG, Queue

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parent.parent
CONFTEST = """
import sys
sys.path.insert(0, {root!r})
from tests import on_demand

def pytest_configure(config):
    plugin = on_demand.WorkerOnDemand(config) if hasattr(config, "workerinput") else on_demand.Distribution()
    config.pluginmanager.register(plugin)
"""
NOTED = """
import os
from pathlib import Path
import pytest
pytestmark = [{marks}]

@pytest.fixture(scope="session")
def shared():
    Path("ran").open("a").write("set up {name}\\n")

@pytest.mark.parametrize("number", [1, 2, 3])
def test_it(number, shared):
    Path("ran").open("a").write(f"{name} {{number}} {{os.environ['PYTEST_XDIST_WORKER']}}\\n")
"""


def run(folder: Path, *options: str, workers: int = 2, of: str = ".") -> "subprocess.CompletedProcess[str]":
    (folder / "conftest.py").write_text(CONFTEST.format(root=str(ROOT)))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    cloud\n    scenario\n    timeout\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "xdist",
        "-n",
        str(workers),
        "-p",
        "no:cacheprovider",
        *options,
        of,
    ]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        command, check=False, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


def write(folder: Path, name: str, marks: str = "") -> None:
    (folder / f"test_{name}.py").write_text(NOTED.format(name=name, marks=marks))


def test_each_runs_once_a_lane_on_one_worker_and_failures_count(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write(tmp_path, name)
    for name in ("first", "second"):
        write(tmp_path, name, "pytest.mark.cloud")
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    (tmp_path / "test_failing.py").write_text("def test_it():\n    assert 1 == 2\n")
    ended = run(tmp_path)
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED
    assert re.search(r"=+ 1 failed, 15 passed, 1 error in ", ended.stdout), ended.stdout
    assert "assert 1 == 2" in ended.stdout
    assert "No module named 'no_such_module'" in ended.stdout
    lines = (tmp_path / "ran").read_text().splitlines()
    tests = [line.split() for line in lines if not line.startswith("set up")]
    names = ("a", "b", "c", "first", "second")
    assert sorted((name, number) for name, number, _ in tests) == [(name, each) for name in names for each in "123"]
    assert len({worker for name, _, worker in tests if name in ("first", "second")}) == 1


def test_neighbours_of_a_named_file_do_not_run(tmp_path: Path) -> None:
    write(tmp_path, "a")
    write(tmp_path, "b")
    assert " 3 passed in " in run(tmp_path, of="test_a.py").stdout
    assert "b 1" not in (tmp_path / "ran").read_text()


def test_without_a_test_the_run_fails(tmp_path: Path) -> None:
    write(tmp_path, "a")
    assert run(tmp_path, "-k", "nothing").returncode == pytest.ExitCode.NO_TESTS_COLLECTED


def test_a_crash_names_the_tests_that_ran(tmp_path: Path) -> None:
    (tmp_path / "test_crashing.py").write_text("import os\n\ndef test_it():\n    os._exit(1)\n")
    write(tmp_path, "a")
    ended = run(tmp_path)
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED
    assert re.search(f"{CRASHED_AMONG}.* test_crashing.py::test_it", ended.stdout)
    assert "3 passed" in ended.stdout


def test_after_the_last_allowed_failure_no_file_is_started(tmp_path: Path) -> None:
    marks = "import pytest\npytestmark = [pytest.mark.scenario]\n"
    (tmp_path / "test_first.py").write_text(f"{marks}\ndef test_it():\n    assert 0\n")
    write(tmp_path, "a")
    ended = run(tmp_path, "-x", workers=1)
    assert re.search(r"=+ 1 failed in ", ended.stdout), ended.stdout


def test_a_queue_gives_each_unit_once(tmp_path: Path) -> None:
    queues = [Queue(str(tmp_path / "queue")) for _ in range(2)]
    assert [queue.take(3) for queue in (*queues, *queues)] == [0, 1, 2, None]


def test_a_closed_queue_is_empty(tmp_path: Path) -> None:
    queue = Queue(str(tmp_path / "queue"))
    queue.close(5)
    assert queue.take(5) is None
