"""What one run of the command holds: the options that all commands share, the connection and the output, made when they
are needed; and its confirmations."""

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from controlplane.cli.errors import Failure
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.output import Format, Output
from controlplane.cli.server_target import ConnectionOptions, Target, find_target

if TYPE_CHECKING:
    import httpx
    import typer

    from controlplane.cli.connection import Connection
    from controlplane.cli.profiles import Profiles
    from controlplane.cli.resources import Resource


@dataclass
class Session:
    """`transport`: another way to the server than the network, for tests."""

    options: ConnectionOptions = field(default_factory=ConnectionOptions)
    form: Format = Format.TABLE
    colour: bool = True
    timeout_s: float = 60.0
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    transport: "httpx.BaseTransport | None" = None

    @cached_property
    def output(self) -> Output:
        return Output(self.form, colour=self.colour and not self.environ.get("NO_COLOR"))

    @cached_property
    def profiles(self) -> "Profiles":
        from controlplane.cli.profiles import profiles_file, read_profiles

        return read_profiles(profiles_file(self.environ))

    @cached_property
    def target(self) -> Target:
        return find_target(self.options, self.environ, self.profiles)

    @cached_property
    def connection(self) -> "Connection":
        return self.connect(self.target)

    def connect(self, target: Target, tries: int | None = None) -> "Connection":
        from controlplane.cli.connection import TRIES, Connection

        return Connection(
            target,
            timeout_s=self.timeout_s,
            tries=tries or TRIES,
            say=self.output.note,
            transport=self.transport,
        )

    @cached_property
    def resources(self) -> "tuple[Resource, ...]":
        """The lists that the server has, as far as this machine knows."""
        from controlplane.cli.schema import resources_known

        return resources_known(self)

    def resource(self, name: str) -> "Resource":
        """The resource of any of its names.

        Raises:
            Failure: there is none of that name.
        """
        if (found := self._resource_known(name)) is not None:
            return found
        from controlplane.cli.schema import resources_known

        self.resources = resources_known(self, anew=True)
        if (found := self._resource_known(name)) is not None:
            return found
        there = ", ".join(sorted(one.name for one in self.resources))
        raise Failure(f"there is no kind {name!r}; there are: {there}", ExitCode.USAGE)

    def _resource_known(self, name: str) -> "Resource | None":
        return next((one for one in self.resources if name.lower() in one.names), None)

    @property
    def is_interactive(self) -> bool:
        """Whether questions can be answered."""
        return sys.stdin.isatty() and sys.stderr.isatty()

    def confirm(self, question: str, *, wanted: str, yes: bool) -> None:
        """Returns only if the user types `wanted` or passed `--yes`.

        Raises:
            Failure: not interactive, or the answer was another.
        """
        if yes:
            return
        if not self.is_interactive:
            raise Failure(f"{question} Not interactive: pass --yes", ExitCode.USAGE)
        sys.stderr.write(f"{question} Type {wanted} to continue: ")
        sys.stderr.flush()
        if sys.stdin.readline().strip() != wanted:
            raise Failure("Nothing was done.", ExitCode.DIFFERS)

    def show(self, result: Any, lines: Iterable[str] = ()) -> None:
        """An action's result: whole for programs, a sentence or more for users."""
        if self.output.is_for_programs:
            self.output.document(result)
            return
        for line in lines:
            self.output.plain(line)


def session_of(context: "typer.Context") -> Session:
    """The run that a command belongs to."""
    result = context.find_root().obj
    if not isinstance(result, Session):
        raise TypeError("the root of the command line makes the run")
    return result


def path_of(path: str, name: str) -> str:
    """The path of one row of a list."""
    return f"{path}/{quote(name, safe='@')}"
