"""The command lines by which engines' environments are installed (`python -m … install --cache DIR`). Run by the
control plane's Python, with the standard library alone."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

Say = Callable[[str], None]


class CannotInstall(Exception):
    """Why it is not there; one sentence for a person."""


def say_on_stdout(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def install_command(
    module: str, description: str | None, title: str, install: Callable[[Path, Say], Path], argv: Sequence[str]
) -> int:
    """Exit status: 0 with what was installed on the last line of standard output, or 1 with the reason.

    Args:
        module: for the usage line.
        description: what it installs, at length.
        title: what it installs, in a word.
        install: makes it, in the cache that it is given.
        argv: the command line's words.
    """
    parser = argparse.ArgumentParser(prog=module, description=description)
    install_parser = parser.add_subparsers(required=True).add_parser("install", help=f"install {title}")
    install_parser.add_argument("--cache", type=Path, required=True, help="folder that holds engines/")
    options = parser.parse_args(argv)
    try:
        say_on_stdout(str(install(options.cache.resolve(), say_on_stdout)))
    except (CannotInstall, OSError) as error:
        sys.stderr.write(f"cannot install {title}: {error}\n")
        return 1
    return 0
