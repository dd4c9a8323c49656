"""One run of the command: shared options, the connection and output, created on first use, and confirmations."""

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
    """`transport`: replaces the network in tests."""

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
        from controlplane.cli.schema import resources_known

        return resources_known(self)

    def resource(self, name: str) -> "Resource":
        """The resource with any of its names. Raises Failure if it does not exist."""
        if (found := self._resource_known(name)) is not None:
            return found
        from controlplane.cli.schema import resources_known

        self.resources = resources_known(self, anew=True)
        if (found := self._resource_known(name)) is not None:
            return found
        there = ", ".join(sorted(one.name for one in self.resources))
        raise Failure(f"unknown kind {name!r}; the kinds are: {there}", ExitCode.USAGE)

    def _resource_known(self, name: str) -> "Resource | None":
        return next((one for one in self.resources if name.lower() in one.names), None)

    @property
    def is_interactive(self) -> bool:
        """Whether the user can answer questions."""
        return sys.stdin.isatty() and sys.stderr.isatty()

    def confirm(self, question: str, *, wanted: str, yes: bool) -> None:
        """Returns only if the user types `wanted` or passed `--yes`. Raises Failure if it is not interactive, or for
        another answer."""
        if yes:
            return
        if not self.is_interactive:
            raise Failure(f"{question} Not interactive: pass --yes", ExitCode.USAGE)
        sys.stderr.write(f"{question} Type {wanted} to continue: ")
        sys.stderr.flush()
        if sys.stdin.readline().strip() != wanted:
            raise Failure("Nothing was done.", ExitCode.DIFFERS)

    def show(self, result: Any, lines: Iterable[str] = ()) -> None:
        """An action's result: JSON for programs, text for people."""
        if self.output.is_for_programs:
            self.output.document(result)
            return
        for line in lines:
            self.output.plain(line)


def session_of(context: "typer.Context") -> Session:
    result = context.find_root().obj
    if not isinstance(result, Session):
        raise TypeError("only the root command creates the session")
    return result


def path_of(path: str, name: str) -> str:
    return f"{path}/{quote(name, safe='@')}"
