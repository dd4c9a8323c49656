import io
import subprocess
import sys
from pathlib import Path

import pytest

from controlplane import bootstrap

pytestmark = pytest.mark.processes

HASH = f"--hash=sha256:{64 * '0'}"
BOOTSTRAP = Path(bootstrap.__file__).resolve()


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with locks and nothing else."""
    production = (
        f"django==5.2.19 \\\n    {HASH}\nuv==0.13.9 \\\n    {HASH} \\\n    {HASH}\nwhitenoise==6.12.0 \\\n    {HASH}\n"
    )
    (tmp_path / "requirements.lock").write_text(production)
    (tmp_path / "requirements-dev.lock").write_text(f"{production}zope==1 \\\n    {HASH}\n")
    monkeypatch.setattr(bootstrap, "CHECKOUT", tmp_path)
    monkeypatch.setattr(bootstrap, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(bootstrap, "PYTHON", tmp_path / ".venv" / "bin" / "python")
    monkeypatch.setattr(bootstrap, "LOG", tmp_path / ".cache" / "bootstrap.log")
    return tmp_path


@pytest.fixture
def installed(checkout: Path) -> Path:
    """As after `bootstrap.py --dev`."""
    (checkout / ".venv" / "bin").mkdir(parents=True)
    bootstrap.PYTHON.symlink_to(sys.executable)
    for dev in (False, True):
        bootstrap.stamp(dev=dev).write_text(bootstrap.digest(dev=dev))
    return checkout


def test_there_is_nothing_to_do_while_the_locks_stay(installed: Path) -> None:
    assert bootstrap.main(["--dev"]) == 0
    assert bootstrap.main([]) == 0
    assert not (installed / ".cache").exists()


@pytest.mark.parametrize(
    ("changed", "current"),
    [
        ("requirements.lock", {False: False, True: True}),
        ("requirements-dev.lock", {False: True, True: False}),
    ],
)
def test_a_changed_lock_is_installed_again(installed: Path, changed: str, current: dict[bool, bool]) -> None:
    with (installed / changed).open("a") as file:
        file.write("httpx==0.28.1\n")
    assert {dev: bootstrap.is_current(dev=dev) for dev in current} == current


def test_an_environment_whose_python_is_gone_is_made_again(installed: Path) -> None:
    bootstrap.PYTHON.unlink()
    bootstrap.PYTHON.symlink_to(installed / "no-such-python")
    assert not bootstrap.is_current(dev=False)


def test_a_package_that_cannot_be_had_is_one_sentence_with_the_log(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(command: list[str], log: io.TextIOBase, environment: dict[str, str] | None = None) -> bool:
        if "-r" in command:
            log.write("ERROR: No matching distribution found for Django==5.2.19\n")
            log.flush()
            return False
        return True

    monkeypatch.setattr(bootstrap, "_succeeds", fails)
    monkeypatch.setattr(bootstrap, "_uv_environment", lambda _: {})
    monkeypatch.setattr(bootstrap, "_pip", lambda: ["pip"])
    assert bootstrap.main([]) == 1
    sentence = f"the whole story is in {bootstrap.LOG}.\n"
    assert capsys.readouterr().err == (
        f"Cannot install requirements.lock: No matching distribution found for Django==5.2.19; {sentence}"
    )
    assert not bootstrap.is_current(dev=False)


def test_it_installs_the_uv_that_the_lock_names() -> None:
    assert bootstrap._uv_pin() == f"uv==0.13.9 \\\n    {HASH} \\\n    {HASH}\n"


@pytest.mark.parametrize(
    ("name", "module", "options"),
    [("switchyard", "controlplane/cli/main.py", []), ("lab", "lab/hosts/cli.py", ["--dev"])],
)
def test_a_command_is_there_after_it_and_works_from_anywhere(
    installed: Path, tmp_path_factory: pytest.TempPathFactory, name: str, module: str, options: list[str]
) -> None:
    (installed / module).parent.mkdir(parents=True)
    (installed / module).write_text("def main(arguments):\n    print('ran', *arguments)\n    return 7\n")
    assert bootstrap.main(options) == 0
    elsewhere = tmp_path_factory.mktemp("else where")
    (elsewhere / "sw").symlink_to(installed / ".venv" / "bin" / name)
    ended = subprocess.run(
        [elsewhere / "sw", "get", "cells"], cwd=elsewhere, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (7, "ran get cells\n"), ended.stderr


def test_an_old_python_is_told_what_is_needed(tmp_path: Path) -> None:
    source = Path(bootstrap.__file__).read_text().replace("OLDEST = (3, 11)", "OLDEST = (3, 99)")
    old = tmp_path / "bootstrap.py"
    old.write_text(source)
    ended = subprocess.run([sys.executable, str(old)], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("Switchyard needs Python 3.11 or newer and this is 3.")


def test_before_anything_is_installed_the_file_alone_knows_the_environment_of_uv() -> None:
    load = (
        "import importlib.util, io; "
        f"spec = importlib.util.spec_from_file_location('bootstrap', {str(BOOTSTRAP)!r}); "
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module); "
        "print(module._uv_environment(io.StringIO())['PATH'])"
    )
    bare = [sys.executable, "-I", "-S", "-c", load]
    done = subprocess.run(bare, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "/usr/bin:/bin\n"), done.stderr
