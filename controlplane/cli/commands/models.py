"""The life of model versions: have one validated, release it, retire it. What they state is described in documents."""

import time
from typing import Annotated, Any

import typer

from controlplane.cli.completion import names_of
from controlplane.cli.errors import Failure
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.session import path_of, resource_named, session_of

app = typer.Typer()
model = typer.Typer(help="Move a model version from draft to released to retired.", no_args_is_help=True)
app.add_typer(model, name="model")

Version = Annotated[str, typer.Argument(metavar="MODEL@VERSION", autocompletion=names_of("model-versions"))]
Why = Annotated[str, typer.Option(help="Required: your reason, for the timeline.")]
POLL_EVERY_S = 1.0


@model.command()
def validate(
    context: typer.Context,
    version: Version,
    wait: Annotated[bool, typer.Option("--wait", help="Until there is a verdict; exit status 10: it failed.")] = False,
) -> None:
    """Have a draft read and checked: artifacts, digests, golden prompts, an instance type."""
    run, path = session_of(context), path_of(resource_named("model-versions"), version)
    row = run.connection.post(f"{path}/validate")
    while wait and row["validation"] and row["validation"]["state"] == "running":
        time.sleep(POLL_EVERY_S)
        row = run.connection.get(path)
    verdict = row["validation"] or {"state": "not requested", "reason": ""}
    run.show(row, [f"validation of {version} is {verdict['state']}" + _because(verdict["reason"])])
    if verdict["state"] == "failed":
        raise Failure(f"{version} is not fit to be served", ExitCode.NOT_ACHIEVED)


@model.command()
def release(context: typer.Context, version: Version, why: Why) -> None:
    """Promote a validated version: it may be rolled out."""
    _move(context, version, "release", why)


@model.command()
def retire(context: typer.Context, version: Version, why: Why) -> None:
    """Take a version out of service for good."""
    _move(context, version, "retire", why)


def _move(context: typer.Context, version: str, action: str, why: str) -> None:
    run = session_of(context)
    row: dict[str, Any] = run.connection.post(
        f"{path_of(resource_named('model-versions'), version)}/{action}", {"why": why}
    )
    run.show(row, [f"{version} is {row['state']}" + _because(row["reason"])])


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""
