"""Packages that only some of vLLM's engines need, each kind in a folder of its own beside the engines' environment: an
engine that needs one gets the folder on its path, and others are installed without it.

A folder counts as installed once its stamp is written, last of all; one without the right stamp is removed and made
anew. Run by the control plane's Python, with the standard library and uv alone.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from engine_agent.engines.exclusive import exclusively
from engine_agent.engines.install_command import CannotInstall, Say
from engine_agent.engines.uv_program import UvFailed

STAMP_NAME = "installed"


def packages_of(python: Path, name: str) -> Path:
    """The folder that belongs to the environment of this interpreter."""
    return python.parents[2] / name


def install_beside(cache: Path, name: str, stamp: str, fill: Callable[[Path], None], say: Say) -> Path:
    """Have `fill` make the folder unless it is there with this stamp; returns the folder.

    Raises:
        CannotInstall: a package cannot be had, or `fill` says so.
    """
    folder = cache / "engines" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusively(folder.with_suffix(".lock"), lambda: say(f"waiting for another process that installs {name} …")):
        stamped = folder / STAMP_NAME
        if stamped.exists() and stamped.read_text() == stamp:
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        try:
            fill(folder)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, UvFailed):
                raise CannotInstall(str(error)) from error
            raise
        unfinished = folder / f"{STAMP_NAME}.new"
        unfinished.write_text(stamp)
        os.replace(unfinished, stamped)
    say(f"installed {name}")
    return folder
