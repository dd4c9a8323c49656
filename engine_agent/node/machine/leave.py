"""`python -m engine_agent leave --code DIR`: takes a host out again. The fleet is asked first, so that what serves here
is replaced; `--now` asks nobody."""

import argparse
import shutil
import sys
import time
from pathlib import Path

from engine_agent.node.machine import service
from engine_agent.node.machine.paths import HostPaths
from engine_agent.node.machine.tenant import Tenant
from engine_agent.node.telemetry.fingerprint import AGENT_ROOT

LEFT_WITHIN_S = 900.0
LOOK_EVERY_S = 0.5


def run(argv: list[str]) -> int:
    """Leave; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m engine_agent leave", description=__doc__)
    parser.add_argument("--code", required=True, type=Path, help="the folder that the host was installed into")
    parser.add_argument("--now", action="store_true", help="stop and wipe at once, whatever serves here")
    options = parser.parse_args(argv)
    paths = HostPaths(options.code)
    if options.now:
        left = uninstall(paths)
        if left:
            sys.stderr.write(f"switchyard: {left}\n")
        return 1 if left else 0
    return _ask(paths)


def _ask(paths: HostPaths) -> int:
    paths.leave_wish.touch()
    sys.stderr.write("switchyard: waiting until the fleet has replaced what runs here\n")
    deadline = time.monotonic() + LEFT_WITHIN_S
    while paths.current.is_symlink():
        if time.monotonic() > deadline:
            sys.stderr.write(
                "switchyard: the fleet has not let this host go; see its page Nodes, or stop what runs here at once by"
                f" {paths.python} -m engine_agent leave --now --code {paths.code}\n"
            )
            return 1
        time.sleep(LOOK_EVERY_S)
    sys.stderr.write("switchyard: this host has left\n")
    return 0


def uninstall(paths: HostPaths) -> str:
    """Stop all and remove every file. Returns what is left, "" for nothing."""
    service.stop(paths)
    left = Tenant(paths, AGENT_ROOT).wipe()
    if left:
        return left
    for folder in (paths.state, paths.code / "releases"):
        shutil.rmtree(folder, ignore_errors=True)
    for path in (paths.code / "run", *paths.of_releases):
        path.unlink(missing_ok=True)
    paths.current.unlink(missing_ok=True)
    try:
        paths.code.rmdir()
    except OSError:
        return f"{paths.code} is left: there is something in it that is not ours" if paths.code.exists() else ""
    return ""
