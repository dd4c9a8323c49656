"""A packed build runs without the Python that it was made from, states what it needs, and has the same bytes again."""

import gzip
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from engine_agent.engines.artifacts import verify_folder
from engine_agent.engines.builds.__main__ import pack_recipe, recipes
from engine_agent.engines.builds.elf import read_elf
from engine_agent.engines.builds.pack import CannotPack, pack_python
from engine_agent.engines.builds.store import host_facts
from engine_agent.protocol.engine_builds import BUILD_FILE, parse_facts, part_names, version_key, wrong_facts
from tests.engine_agent.engines.builds.packed import facts, pack_tiny, tiny_build

pytestmark = [pytest.mark.processes, pytest.mark.slow]

USES_ITS_LIBRARIES = """
import bz2, ctypes, hashlib, lzma, multiprocessing, readline, sqlite3, ssl, sys, uuid, zlib
sqlite3.connect(":memory:"); ssl.create_default_context(); ctypes.CDLL(None)
print(sys.prefix)
print(open("/proc/self/maps").read())
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, to = tiny_build(), tmp_path_factory.mktemp("moved")
    stated = parse_facts((folder / BUILD_FILE).read_bytes(), "test")
    content = b"".join(gzip.decompress((folder / name).read_bytes()) for name in part_names(stated))
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        tar.extractall(to, filter="data")
    return to


def hidden(folder: str, command: list[str]) -> list[str]:
    """The command in a mount namespace where this folder is empty, as after the source was renamed."""
    script = 'mount -t tmpfs none "$0" && exec "$@"'
    return ["unshare", "--map-root-user", "--mount", "sh", "-c", script, folder, *command]


def test_it_runs_elsewhere_without_its_source_and_loads_nothing_of_it(tree: Path) -> None:
    command = hidden(sys.base_prefix, [str(tree / "bin/python"), "-I", "-B", "-c", USES_ITS_LIBRARIES])
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]})
    assert done.returncode == 0, done.stderr
    prefix, _, maps = done.stdout.partition("\n")
    assert prefix == str(tree)
    assert f"{tree}/lib/libcrypto" in maps
    assert sys.base_prefix not in maps


def test_an_agent_can_be_installed_with_a_carried_python(tree: Path, tmp_path: Path) -> None:
    """As the join script does: an environment over the packed Python, without the one that it was made from."""
    made = f"{tree}/bin/python3 -m venv --without-pip {tmp_path}/venv && {tmp_path}/venv/bin/python -c"
    script = f"{made} 'import ssl, sqlite3, sys; print(sys.prefix, sys.base_prefix, sys._base_executable)'"
    command = hidden(sys.base_prefix, ["sh", "-c", script])
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]})
    assert done.returncode == 0, done.stderr
    prefix, base, executable = done.stdout.split()
    assert (prefix, base) == (f"{tmp_path}/venv", str(tree))
    assert executable.startswith(f"{tree}/bin/"), "the next release could make no environment"


@pytest.mark.long
def test_a_python_alone_is_packed_with_its_floor(tmp_path: Path) -> None:
    floor = pack_python(tmp_path / "python.tgz")
    with tarfile.open(tmp_path / "python.tgz") as tar:
        tar.extractall(tmp_path / "made", filter="data")
    assert version_key(floor) <= version_key(os.confstr("CS_GNU_LIBC_VERSION").partition(" ")[2])  # type: ignore[union-attr]
    done = subprocess.run([tmp_path / "made/bin/python3", "-I", "-c", USES_ITS_LIBRARIES], check=False)
    assert done.returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "python.tgz"]


def test_it_states_what_it_needs_and_this_host_has_it(tree: Path) -> None:
    stated = parse_facts((tiny_build() / BUILD_FILE).read_bytes(), "test")
    verify_folder(tiny_build())
    assert (stated.serves, stated.program, stated.cpu_arch) == ("generic/llama-cpp", "serve", os.uname().machine)
    assert stated.python == ".".join(map(str, sys.version_info[:3]))
    assert version_key("2.17") <= version_key(stated.least_glibc) <= version_key(host_facts().glibc)
    assert stated.unpacked_bytes == sum(
        p.lstat().st_size for p in tree.rglob("*") if p.is_file() and not p.is_symlink()
    )
    interpreter = read_elf(tree / "bin" / os.readlink(tree / "bin/python"))
    assert interpreter is not None
    assert interpreter.paths == ("$ORIGIN/../lib",)


@pytest.mark.long
def test_packed_again_it_is_the_same(tmp_path: Path) -> None:
    first, second = (pack_tiny(tmp_path / name, compiled=True) for name in ("first", "second"))
    assert first == second


def test_every_recipe_describes_a_valid_build() -> None:
    for name, recipe in recipes().items():
        wanted = {key: recipe[key] for key in ("version", "platform", "program", "least_driver") if key in recipe}
        assert not wrong_facts(facts(serves=recipe["serves"], **wanted)), name
        assert ("install" in recipe) != ("needs" in recipe), name


def test_a_recipe_that_cannot_be_made_here_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(CannotPack, match=r"sglang==0\.5\.23 with torch 2\.14\.1"):
        pack_recipe("sglang-cuda13", tmp_path, tmp_path / "to")
    with pytest.raises(CannotPack, match=r"there is no recipe 'vlm'; there are .*vllm-cpu"):
        pack_recipe("vlm", tmp_path, tmp_path / "to")
    assert not (tmp_path / "to").exists()
