"""Says which version this is, and prints what shells need to complete commands."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from controlplane.cli.errors import Failure
from controlplane.cli.session import session_of

app = typer.Typer()


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def own_version() -> str:
    """As pyproject.toml of this checkout has it."""
    import tomllib

    project = Path(__file__).resolve().parents[3] / "pyproject.toml"
    try:
        return str(tomllib.loads(project.read_text())["project"]["version"])
    except (OSError, ValueError, KeyError):
        return "unknown: pyproject.toml of its checkout cannot be read"


@app.command()
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


@app.command()
def completion(shell: Annotated[Shell, typer.Argument()]) -> None:
    """Print a script that makes a shell complete commands and names of things.

    switchyard completion bash > ~/.local/share/bash-completion/completions/switchyard
    """
    from typer._completion_shared import get_completion_script

    typer.echo(get_completion_script(prog_name="switchyard", complete_var="_SWITCHYARD_COMPLETE", shell=shell.value))
