"""Gives each process that runs tests a separate folder, PostgreSQL and Valkey before Django is set up; orders the
tests; and checks that no process which they started is left at the end.

The servers run in a child process, which the kernel kills with this one, even when this one is killed. Where
DATABASE_URL or REDIS_URL is set already, that server is used instead.
"""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
from hypothesis.internal.conjecture import providers

from lab.embedded_servers import EmbeddedServers
from tests.layers import FAST, LAYERS, LONG, RANKS, Spent, layer_of, marks_of
from tests.on_demand import Distribution, WorkerOnDemand, freeze
from tests.session_guard import holds_within, processes_of

# Images of containers set this. Every worker would rewrite, and every process compile, all that it imports, each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_SEED = 1
"""Of pytest-randomly, unless the command line names one: the default run is the same each time."""
GONE_WITHIN_S = 20.0
"""How long what a test has stopped may take to be gone, on a busy machine."""

_servers = pytest.StashKey[EmbeddedServers]()
_folder = pytest.StashKey[Path]()
_guard = pytest.StashKey["subprocess.Popen[bytes]"]()
_spent = pytest.StashKey[Spent]()
_left_running = pytest.StashKey[list[str]]()


# A busy machine misses deadlines without a fault. Only `make test-all` draws new examples, and many.
hypothesis.settings.register_profile("default run", deadline=None, max_examples=12, derandomize=True, database=None)
hypothesis.settings.register_profile("long run", deadline=None, max_examples=100)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help=f"only the layers {' and '.join(FAST)}, not `slow`")
    parser.addoption("--long", action="store_true", help="tests marked `long` as well")
    parser.addoption("--lab", metavar="HOME", help="only scenarios marked `anywhere`, on the laboratory in this home")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Point the settings at this process's servers and home, then load them."""
    hypothesis.settings.load_profile("long run" if config.getoption("long") else "default run")
    if not config.getoption("long"):
        # Else examples contain constants of the modules that this process has imported. These differ between workers,
        # and searching them takes each a second.
        providers._get_local_constants = lambda: providers._local_constants
    if getattr(config.option, "randomly_seed", None) == "default":
        config.option.randomly_seed = DEFAULT_SEED
    config.stash[_spent] = Spent()
    config.stash[_left_running] = []
    _collect_on_demand(config)
    if _only_distributes(config):
        return
    folder = _own_folder(config)
    servers = EmbeddedServers(folder / "servers")
    config.stash[_servers] = servers
    servers.start()
    os.environ.setdefault("DATABASE_URL", servers.addresses["database_url"])
    os.environ.setdefault("REDIS_URL", servers.addresses["redis_url"])
    os.environ.setdefault("SWITCHYARD_SECRET_KEY", "of-tests-" + secrets.token_urlsafe(48))
    # Tests that commit empty all tables after them; the table of audit records takes that only when told so.
    os.environ.setdefault("PGOPTIONS", "-c switchyard.audit_truncate=on")
    os.environ["SWITCHYARD_HOME"] = str(folder / "home")
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    sys.path.insert(0, str(ROOT))
    _load_django()


def _only_distributes(config: pytest.Config) -> bool:
    """Whether this process leaves all tests to workers of pytest-xdist."""
    return bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")


def _collect_on_demand(config: pytest.Config) -> None:
    """Over several workers, unless single tests are named: these are collected by all workers."""
    if any("::" in argument for argument in config.args):
        return
    if _only_distributes(config):
        config.pluginmanager.register(Distribution())
    elif hasattr(config, "workerinput"):
        config.pluginmanager.register(WorkerOnDemand(config))


def _own_folder(config: pytest.Config) -> Path:
    """Returns the folder of this process and its children. A guard process removes the folder and them afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="sy-tests-"))  # short: a socket's path may have no more than 107 bytes
    session_pid = os.getppid() if hasattr(config, "workerinput") else os.getpid()
    command = [sys.executable, "-I", "-S", str(ROOT / "tests/session_guard.py")]
    config.stash[_guard] = subprocess.Popen(
        [*command, str(os.getpid()), str(folder), str(session_pid)],
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    config.stash[_folder] = folder
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    if config.option.basetemp is None or hasattr(config, "workerinput"):
        config.option.basetemp = folder / "t"
    return folder


def _load_django() -> None:
    import django

    django.setup()
    from tests.aws_calls_made import watch
    from tests.quickened import quicken

    quicken()
    watch()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --fast no slow file and none of the slow layers is imported, without --long no file of long tests."""
    marks = marks_of(collection_path)
    return True if (marks if config.getoption("fast") else LONG in marks and not config.getoption("long")) else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """By layer; within a layer the order is pytest-randomly's."""
    if not config.getoption("long"):
        items[:] = [item for item in items if not item.get_closest_marker(LONG)]
    layers = {item.nodeid: layer_of(item) for item in items}
    if config.getoption("fast"):  # a file of a fast layer may have a slow test
        items[:] = [item for item in items if layers[item.nodeid] in FAST and not item.get_closest_marker("slow")]
    for item in items:
        item.user_properties.append(("layer", layers[item.nodeid]))
    rank = RANKS.__getitem__ if hasattr(config, "workerinput") else LAYERS.index
    items.sort(key=lambda item: (rank(layers[item.nodeid]), item.get_closest_marker("last") is not None))


_REPORTED: list[pytest.TestReport] = []
"""Of this process: pytest hands reports to hooks that know no session."""


def pytest_collection_finish() -> None:
    freeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what the summary counts: a test's time has that of its subtests in it."""
    if not isinstance(report, pytest.SubtestReport):
        _REPORTED.append(report)


@pytest.fixture(autouse=True)
def _usual_umask() -> None:
    """An agent's `main` in the process of tests narrows it; engines, which run as other accounts, could read no file of
    later tests."""
    os.umask(0o022)


@pytest.fixture(scope="session")
def thorough(request: pytest.FixtureRequest) -> bool:
    """Whether this is the long run, in which a test may try all of what it otherwise tries a part of."""
    return bool(request.config.getoption("long"))


@pytest.fixture(scope="session")
def django_db_keepdb(request: pytest.FixtureRequest) -> bool:
    """The database goes with this process's server; dropping it would fail while a thread of a test has it open."""
    return bool(request.config.stash[_servers].pid) or bool(request.config.getvalue("reuse_db"))


@pytest.fixture(scope="session")
def _migrated(request: pytest.FixtureRequest) -> Iterator[Any]:
    """None where the database is another server's."""
    from tests.migrated import migrated_database  # needs Django's settings

    if os.environ["DATABASE_URL"] != request.config.stash[_servers].addresses["database_url"]:
        yield None
        return
    with migrated_database() as database:
        yield database


@pytest.fixture(scope="session")
def django_db_modify_db_settings(
    django_db_modify_db_settings_parallel_suffix: None, _migrated: Any, django_db_blocker: Any
) -> None:
    """Before Django looks for the database, it may be there."""
    if _migrated:
        with django_db_blocker.unblock():
            _migrated.restore()


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None, _migrated: Any, django_db_blocker: Any) -> None:
    if _migrated:
        with django_db_blocker.unblock():
            _migrated.keep()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A session that leaves processes behind has failed."""
    config = session.config
    if _folder in config.stash:
        left = _left_behind(config)
        if hasattr(config, "workerinput"):
            config.workeroutput["left_running"] = left  # type: ignore[attr-defined]  # of xdist
        config.stash[_left_running] += left
    if config.stash[_left_running] and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist has ended; one that was killed has told nothing."""
    node.config.stash[_left_running] += getattr(node, "workeroutput", {}).get("left_running", [])


def _left_behind(config: pytest.Config) -> list[str]:
    """Returns processes that tests started and did not stop, except those that this process still needs."""
    own = {os.getpid(), config.stash[_guard].pid}
    if config.stash[_servers].pid:
        servers = psutil.Process(config.stash[_servers].pid)
        own |= {servers.pid, *(process.pid for process in servers.children(recursive=True))}

    def left() -> set[int]:
        return set(processes_of(str(config.stash[_folder]))) - own

    holds_within(lambda: not left(), GONE_WITHIN_S)
    return [described for pid in left() if (described := _command_line(pid))]


def _command_line(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return "" if process.status() == psutil.STATUS_ZOMBIE else f"{pid} {' '.join(process.cmdline())}"
    except psutil.NoSuchProcess:
        return ""


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Where the time went, and what still runs."""
    spent = config.stash[_spent]
    for report in _REPORTED:
        spent.add(str(dict(report.user_properties).get("layer", LAYERS[0])), report)
    terminalreporter.section("time by layer, set-up and tear-down included, over all workers")
    for line in spent.lines(_budget(config)):
        terminalreporter.line(line)
    if left := config.stash[_left_running]:
        terminalreporter.section("left running by tests", red=True)
        for line in left:
            terminalreporter.line(line, red=True)


def _budget(config: pytest.Config) -> dict[str, float]:
    """Returns the seconds of each layer, empty unless this was the whole default run."""
    whole = not (config.option.file_or_dir or config.option.keyword or config.option.markexpr or config.option.fast)
    budget: dict[str, float] = tomllib.loads((ROOT / "tests/budget.toml").read_text())["seconds"]
    return budget if whole and not config.getoption("long") else {}


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the servers and remove what they stored."""
    if servers := config.stash.get(_servers, None):
        servers.stop()
    if folder := config.stash.get(_folder, None):
        shutil.rmtree(folder, ignore_errors=True)
