"""Assembles and runs the command line: shared options may stand anywhere, and failures become one sentence and an exit
code. It imports no heavy module, so that help and completion are fast."""

import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from controlplane.cli.commands import (
    access,
    act,
    agents,
    autoscale,
    batch,
    bench,
    bench_search,
    chat,
    declare,
    engine,
    entry,
    forecast,
    images,
    incident,
    machines,
    observe,
    regions,
    requests,
    rollouts,
    rows,
    show,
    speculation,
    usage,
    why,
)
from controlplane.cli.errors import Failure
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.output import Format
from controlplane.cli.server_target import ConnectionOptions
from controlplane.cli.session import Session, session_of

app = typer.Typer(
    name="switchyard",
    help="Operate a Switchyard fleet: inspect, change, roll out, drain, evacuate.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help takes half the time
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
about = typer.Typer()
bench.bench.add_typer(bench_search.app)

SHARED = {"--server", "--token", "--profile", "--timeout", "-o", "--output"}
"""Shared options that take a value."""
SHARED_FLAGS = {"--no-color"}


@app.callback()
def shared(
    context: typer.Context,
    server: Annotated[
        str, typer.Option(help="Server address. Default: SWITCHYARD_SERVER, a profile, or this machine's.")
    ] = "",
    token: Annotated[str, typer.Option(help="API token. Default: SWITCHYARD_TOKEN, or the profile's.")] = "",
    profile: Annotated[str, typer.Option(help="Profile stored by `login`. Default: SWITCHYARD_PROFILE.")] = "",
    output: Annotated[
        Format, typer.Option("-o", "--output", help="Output format: table for people, others for programs.")
    ] = (Format.TABLE),
    timeout: Annotated[float, typer.Option(min=0.1, max=600, help="Response timeout in seconds.")] = 60.0,
    no_color: Annotated[bool, typer.Option("--no-color", help="Disable colours; same as NO_COLOR.")] = False,
) -> None:
    """Operate a Switchyard fleet: inspect, change, roll out, drain, evacuate."""
    given = context.obj if isinstance(context.obj, Session) else Session()
    given.options, given.form = ConnectionOptions(server, token, profile), output
    given.colour, given.timeout_s = not no_color, timeout
    context.obj = given


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def own_version() -> str:
    import tomllib

    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    try:
        return str(tomllib.loads(project.read_text())["project"]["version"])
    except (OSError, ValueError, KeyError):
        return "unknown: cannot read pyproject.toml of its checkout"


@about.command()
def version(context: typer.Context) -> None:
    """Show the version of this command and whether its server answers."""
    run = session_of(context)
    report = {"version": own_version(), "server": run.target.server}
    try:
        me = run.connect(run.target, tries=1).get("me")
        report |= {"user": me["username"], "role": me["role"]}
    except Failure as failure:
        report["trouble"] = str(failure)
    known = f"{report['user']} ({report['role']})" if "user" in report else report["trouble"]
    run.show(report, [f"switchyard {report['version']}", f"server {report['server']}: {known}"])


@about.command()
def completion(shell: Annotated[Shell, typer.Argument()]) -> None:
    """Print a completion script for commands and names of objects.

    switchyard completion bash > ~/.local/share/bash-completion/completions/switchyard"""
    from typer._completion_shared import get_completion_script

    typer.echo(get_completion_script(prog_name="switchyard", complete_var="_SWITCHYARD_COMPLETE", shell=shell.value))


for part in (
    *(access.app, show.app, declare.app, rollouts.app),
    *(
        act.app,
        rows.app,
        autoscale.app,
        forecast.app,
        agents.app,
        machines.app,
        engine.app,
        entry.app,
        observe.app,
        why.app,
        chat.app,
        batch.app,
    ),
    *(
        rollouts.model_app,
        bench.app,
        speculation.app,
        usage.app,
        requests.app,
        regions.app,
        images.app,
        incident.app,
        about,
    ),
):  # order in the help
    app.add_typer(part)


def shared_first(arguments: Sequence[str]) -> list[str]:
    """Moves shared options before the command; arguments after `--` stay."""
    shared_ones: list[str] = []
    rest: list[str] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if argument == "--":
            return [*shared_ones, *rest, argument, *waiting]
        if argument in SHARED:
            shared_ones += [argument, *waiting[:1]]
            waiting = waiting[1:]
        elif argument in SHARED_FLAGS or (argument.startswith("--") and argument.partition("=")[0] in SHARED):
            shared_ones.append(argument)
        else:
            rest.append(argument)
    return [*shared_ones, *rest]


def main(arguments: Sequence[str], run: Session | None = None) -> int:
    """Run the command and return its exit status (docs/cli.md). `run`: a session for tests."""
    run = run or Session()
    try:
        app(shared_first(arguments), prog_name="switchyard", obj=run)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Failure as failure:
        print_failure(failure, run)
        return failure.code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return ExitCode.DONE


def print_failure(failure: Failure, run: Session) -> None:
    if run.form is Format.JSON:
        sys.stderr.write(json.dumps({**failure.document, "exit_code": int(failure.code)}, ensure_ascii=False) + "\n")
        return
    sys.stderr.write(f"switchyard: {failure}\n")
    for line in failure.lines:
        sys.stderr.write(f"  {line}\n")
