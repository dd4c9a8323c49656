"""A packed build runs without the Python that it was made from, states what it needs, and has the same bytes again."""

import fcntl
import gzip
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_agent.engines.artifacts import file_sha256, verify_folder
from engine_agent.engines.builds import __main__ as recipe_packer
from engine_agent.engines.builds.__main__ import RECIPES, check_room, least_driver, pack_recipe, recipes
from engine_agent.engines.builds.elf import CannotPack, read_elf
from engine_agent.engines.builds.pack import PackSource, pack_build, pack_python
from engine_agent.engines.builds.store import host_facts
from engine_agent.engines.uv_install import EngineEnvironment
from engine_agent.protocol.engine_builds import BUILD_FILE, parse_facts, part_names, version_key, wrong_facts
from models_registry.builds.planner import ArchiveWalk
from tests.controlplane.embedded.processes import eventually
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
    made = f"{tree}/bin/python3 -B -m venv --without-pip {tmp_path}/venv && {tmp_path}/venv/bin/python -B -c"
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
        assert len({"install", "lock", "instead"} & set(recipe)) == 1, name


@pytest.mark.parametrize(
    ("name", "cuda", "driver"),
    [
        ("vllm-cuda13", "13.0", "580"),
        ("vllm-cuda12", "12.8", "525"),
        ("sglang-cuda13", "13.0", "580"),
        ("sglang-cuda12", "12.8", "525"),
    ],
)
def test_the_driver_of_a_recipe_follows_from_the_cuda_of_its_lock(name: str, cuda: str, driver: str) -> None:
    recipe = recipes()[name]
    text = RECIPES.with_name(recipe["lock"]).read_text()
    assert (recipe["platform"], least_driver(text)) == (f"cuda{cuda}", driver)
    assert re.search(rf"^nvidia-cuda-runtime(-cu12)?=={re.escape(cuda)}\.", text, re.MULTILINE)
    assert f"\n{recipe['serves']}=={recipe['version']} " in text


def test_a_lock_of_an_unknown_cuda_has_no_driver() -> None:
    assert least_driver("numpy==2.4.6\n") == ""
    with pytest.raises(CannotPack, match="the oldest driver of CUDA 14 is unknown"):
        least_driver("nvidia-cuda-runtime==14.0.1\n")


def test_a_recipe_that_cannot_be_made_here_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CannotPack, match=r"cannot be packed\. PyPI has only sources .* Leave engine_build .* empty"):
        pack_recipe("tensorrt-llm", tmp_path, tmp_path / "to")
    with pytest.raises(CannotPack, match=r"there is no recipe 'vlm'; there are .*vllm-cpu"):
        pack_recipe("vlm", tmp_path, tmp_path / "to")
    monkeypatch.setattr(recipe_packer, "sys", SimpleNamespace(version_info=SimpleNamespace(major=3, minor=14)))
    with pytest.raises(CannotPack, match=r"has wheels for Python 3\.11 or 3\.12, and this is Python 3\.14"):
        pack_recipe("vllm-cuda13", tmp_path, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_room_is_checked_for_each_disk_before_anything_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 20 * 10**9
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    check_room({tmp_path / "not/yet": 10 * 10**9, tmp_path: 8 * 10**9}, "packing x")
    wanted = rf"packing x needs 19\.0 GB and a reserve of 1\.1 GB on the disk of {tmp_path}, which has 20\.0 GB free"
    with pytest.raises(CannotPack, match=wanted):
        check_room({tmp_path / "not/yet": 10 * 10**9, tmp_path: 9 * 10**9}, "packing x")
    monkeypatch.setattr(EngineEnvironment, "unsuitable", lambda *_: None)
    free = 5 * 10**9
    with pytest.raises(CannotPack, match=r"vllm 0\.33\.0 for cuda13\.0 \(4\.3 GB of wheels, .* needs .* 5\.0 GB free"):
        pack_recipe("vllm-cuda13", tmp_path, tmp_path / "to")
    assert not (tmp_path / "to").exists()
    assert not (tmp_path / "engines/recipe-vllm-cuda13").exists()


@pytest.fixture
def script(tmp_path: Path) -> PackSource:
    """What is packed without a Python, and so fast."""
    (tmp_path / "serve").write_text("#!/bin/sh\n")
    files = {"serve": tmp_path / "serve", "noise": tmp_path / "noise"}
    files["noise"].write_bytes(os.urandom(3 * 1024**2))
    return PackSource("generic/tool", "1", "cpu", program="serve", files=files, host_python="3.11")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("at", ["copying", "packing"])
def test_a_stopped_build_leaves_nothing(
    tmp_path: Path, script: PackSource, number: signal.Signals, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(line: str) -> None:
        if line.startswith(at):
            os.kill(os.getpid(), number)

    monkeypatch.setattr(recipe_packer, "pack_build", lambda _, to, __: pack_build(script, to, stop, part_bytes=10**6))
    monkeypatch.setattr(recipe_packer, "_installed", lambda *_: tmp_path)
    folder, before = tmp_path / "builds", signal.getsignal(number)
    with pytest.raises(SystemExit, match=str(128 + number)):
        recipe_packer.main(["pack", "llama-cpp", "--cache", str(tmp_path), "--to", str(folder / "to")])
    assert not (folder / "to").exists()
    assert eventually(lambda: not list(folder.iterdir())), "another process removes what was packed"
    assert signal.getsignal(number) is before


def test_threads_of_a_stopped_build_leave_their_parts_unfinished(
    tmp_path: Path, script: PackSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a stop would wait for a whole part of each thread."""
    stopped_at: list[int] = []

    class Stopped(BaseException):
        pass

    def submit(parts: Any) -> None:
        parts._stopped.set()
        begun = parts._write_part(tmp_path / "part", [b"x"])
        stopped_at.append(begun.bytes)
        raise Stopped

    monkeypatch.setattr("engine_agent.engines.builds.pack._Parts._submit", submit)
    with pytest.raises(Stopped):
        pack_build(script, tmp_path / "to", lambda _: None, part_bytes=10**6)
    assert stopped_at == [0]


def test_what_a_killed_packer_left_is_removed_and_a_running_one_is_not_disturbed(
    tmp_path: Path, script: PackSource
) -> None:
    left = tmp_path / ".to.unfinished"
    (left / "tree").mkdir(parents=True)
    (left / "tree/other").write_bytes(b"x")
    descriptor = os.open(left, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(CannotPack, match="another process packs into"):
        pack_build(script, tmp_path / "to", lambda _: None)
    assert (left / "tree/other").exists()
    os.close(descriptor)
    digest = pack_build(script, tmp_path / "to", lambda _: None)
    assert verify_folder(tmp_path / "to", digest).files.keys() == {BUILD_FILE, "part-0000"}
    assert not left.exists()
    with pytest.raises(OSError, match="not empty"):
        pack_build(script, tmp_path / "to", lambda _: None)
    verify_folder(tmp_path / "to", digest)


def test_the_check_of_uploads_accepts_what_is_packed(tmp_path: Path, script: PackSource) -> None:
    names = ("lib/a", "lib-x", "lib.py", "lib/a-b", "Lib", "lib/z/ü", "d" * 120 + "/" + "f" * 120)
    files = {**(script.files or {}), **dict.fromkeys(names, tmp_path / "serve")}
    pack_build(replace(script, files=files), tmp_path / "to", lambda _: None, part_bytes=10_000)
    stated = parse_facts((tmp_path / "to" / BUILD_FILE).read_bytes(), "test")
    walk = ArchiveWalk.start(stated)
    for name in part_names(stated):
        walk.read_part([(tmp_path / "to" / name).read_bytes()])
    walk.finish()
    assert walk.left == 0


def wheel(folder: Path, name: str) -> str:
    """Writes a wheel of one module; returns its line in a lock."""
    path, metadata = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr(f"{name}.py", "version = 1\n")
        packed.writestr(f"{metadata}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        packed.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        packed.writestr(f"{metadata}/RECORD", "")
    return f"{name}==1.0 \\\n    --hash=sha256:{file_sha256(path)}\n"


@pytest.mark.long
def test_a_recipe_with_a_lock_is_installed_with_its_hashes_and_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    runtime = "nvidia-cuda-runtime==13.0.1 ; python_version < '3'\n"
    lock = "# downloads 1 MB\n" + wheel(tmp_path, "torch") + runtime.replace("\n", " \\\n    --hash=sha256:" + "0" * 64)
    (tmp_path / "tiny.lock").write_text(lock + "\n")
    (tmp_path / "recipes.toml").write_text(
        f'[tiny]\nserves = "vllm"\nversion = "1"\nplatform = "cuda13.0"\nlock = "tiny.lock"\npythons = ["{here}"]\n'
        'wheels = "x86_64-manylinux_2_17"\n'
    )
    monkeypatch.setattr(recipe_packer, "RECIPES", tmp_path / "recipes.toml")
    for variable, value in (("UV_FIND_LINKS", str(tmp_path)), ("UV_OFFLINE", "1"), ("UV_NO_INDEX", "1")):
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    digest = pack_recipe("tiny", tmp_path / "cache", tmp_path / "to")
    stated = parse_facts((tmp_path / "to" / BUILD_FILE).read_bytes(), "test")
    assert (stated.serves, stated.platform, stated.least_driver) == ("vllm", "cuda13.0", "580")
    assert verify_folder(tmp_path / "to").digest == digest
    (tmp_path / "tiny.lock").write_text(lock.replace("sha256:", "sha256:0", 1)[:-1] + "\n")
    with pytest.raises(CannotPack):
        pack_recipe("tiny", tmp_path / "cache", tmp_path / "again")
    assert not (tmp_path / "again").exists()
