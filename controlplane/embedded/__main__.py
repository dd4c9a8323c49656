"""`python -m controlplane.embedded up|down|status|servers|backup|restore`: what `make` calls."""

import argparse
import asyncio
import os
import sys
from pathlib import Path

from controlplane.embedded.backup import back_up, restore
from controlplane.embedded.configuration import CannotStart, Configuration, read_configuration
from controlplane.embedded.console import Console, RotatingLog
from controlplane.embedded.follower import (
    BACKGROUND_OPTION,
    OWN_LOG,
    Follower,
    require_same_settings,
    start_in_background,
)
from controlplane.embedded.launcher import Launcher
from controlplane.embedded.process_ownership import teardown
from controlplane.embedded.servers import run_servers
from controlplane.embedded.state_directory import StateDirectory
from controlplane.embedded.status import print_final_block, show_status, wait_for_cells


def main(arguments: list[str]) -> int:
    """Run one command. Returns the exit status. Only this account can read the files that it writes."""
    os.umask(0o077)
    options = _parser().parse_args(arguments)
    try:
        configuration = read_configuration(os.environ)
        home = StateDirectory(configuration.home)
        return _run(configuration, home, options)
    except CannotStart as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _run(configuration: Configuration, home: StateDirectory, options: argparse.Namespace) -> int:
    match options.command:
        case "backup":
            console = Console(progress_only=True)
            asyncio.run(back_up(configuration, home, options.file.resolve(), console))
            return 0
        case "down":
            return teardown(home, Console())
        case "status":
            return show_status(configuration, home, Console())
        case "servers":
            home.prepare()
            return asyncio.run(run_servers(configuration, home, durable=not options.not_durable))
    home.prepare()
    if options.command == "restore":
        return _restore(configuration, home, options.file.resolve())
    if options.detach:
        return _detach(configuration, home)
    return _launch(configuration, home, foreground=not options.background)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="controlplane.embedded", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start everything, or wait until what runs is ready")
    up.add_argument("--detach", action="store_true", help="return once every cell is ready, leaving it running")
    up.add_argument(BACKGROUND_OPTION, action="store_true", help=argparse.SUPPRESS)
    commands.add_parser("down", help="stop everything")
    commands.add_parser("status", help="show what runs")
    backup = commands.add_parser("backup", help="write the database and the secrets of this home to one file")
    backup.add_argument("file", type=Path)
    restored = commands.add_parser("restore", help="make a new home of such a file")
    restored.add_argument("file", type=Path)
    servers = commands.add_parser("servers", help="run PostgreSQL and Valkey alone")
    servers.add_argument("--not-durable", action="store_true", help="trade the data for speed: for tests")
    return parser


def _restore(configuration: Configuration, home: StateDirectory, source: Path) -> int:
    with home.locked() as ours:
        if not ours:
            raise CannotStart(
                f"Switchyard runs in {home.path}: set SWITCHYARD_HOME to a folder that does not exist yet."
            )
        asyncio.run(restore(configuration, home, source, Console()))
    return 0


def _launch(configuration: Configuration, home: StateDirectory, *, foreground: bool) -> int:
    with home.locked() as ours:
        if not ours:
            return _follow_the_other(configuration, home)
        # In the background the standard output is that log.
        progress_log = RotatingLog(home.logs / OWN_LOG) if foreground else None
        console = Console(progress_log=progress_log, progress_only=not foreground)
        return asyncio.run(Launcher(configuration, home, console, foreground=foreground).run())


def _detach(configuration: Configuration, home: StateDirectory) -> int:
    if home.is_locked():
        return _follow_the_other(configuration, home)
    console = Console()
    follower = Follower(configuration, home, console)
    status = follower.wait_until_ready(start_in_background(home))
    if status == 0:
        print_final_block(configuration, home, console, took_s=console.elapsed_s, foreground=False)
    return status


def _follow_the_other(configuration: Configuration, home: StateDirectory) -> int:
    console = Console()
    if state := home.read_state():
        require_same_settings(configuration, state)
    console.own(f"Switchyard already runs in {home.path}; waiting until every cell is ready")
    status = Follower(configuration, home, console).wait_until_ready(lambda: None if home.is_locked() else 0)
    # That the launcher once saw every cell ready does not say that all are now.
    status = status or wait_for_cells(configuration, home, configuration.wait_s - console.elapsed_s)
    if status == 0:
        print_final_block(configuration, home, console, took_s=None, foreground=False)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
