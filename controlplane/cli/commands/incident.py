"""Incidents: acknowledge, assign, write notes, and read the report."""

from pathlib import Path
from typing import Annotated

import typer

from controlplane.cli.commands.act import Why
from controlplane.cli.errors import Failure
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.session import session_of

app = typer.Typer()
incident = typer.Typer(help="Work on an incident, and read its story.", no_args_is_help=True)
app.add_typer(incident, name="incident")

Number = Annotated[int, typer.Argument(metavar="ID", min=1)]


@incident.command()
def acknowledge(context: typer.Context, number: Number, why: Why = "") -> None:
    """Record that you have seen an incident. You become its owner unless it has one."""
    run = session_of(context)
    row = run.connection.post(f"incidents/{number}/acknowledge", {"why": why})
    run.show(row, [f"incident {number} is acknowledged by {row['acknowledged_by']}; its owner is {row['owner']}"])


@incident.command()
def assign(
    context: typer.Context,
    number: Number,
    owner: Annotated[str, typer.Argument(help='User who works on it; "" releases it.')],
    why: Why = "",
) -> None:
    """Make a user the owner of an incident.

    switchyard incident assign 12 ada"""
    run = session_of(context)
    row = run.connection.post(f"incidents/{number}/assign", {"owner": owner, "why": why})
    run.show(row, [f"the owner of incident {number} is {row['owner'] or 'nobody'}"])


@incident.command()
def note(context: typer.Context, number: Number, text: str) -> None:
    """Add a note to an incident.

    switchyard incident note 12 "power supply of rack 7 was replaced" """
    run = session_of(context)
    row = run.connection.post(f"incidents/{number}/note", {"text": text})
    run.show(row, [f"incident {number} has {len(row['notes'])} notes"])


@incident.command()
def report(
    context: typer.Context,
    number: Number,
    to: Annotated[Path | None, typer.Option(help="File to write to.", dir_okay=False)] = None,
) -> None:
    """Print the post-mortem of an incident as Markdown: summary, timeline, impact, evidence, actions, open points.

    switchyard incident report 12 --to incident-12.md"""
    run = session_of(context)
    found = run.connection.get(f"incidents/{number}/report")
    if to is None:
        run.show(found, [found["markdown"].rstrip()])
        return
    try:
        to.write_text(found["markdown"])
    except OSError as error:
        raise Failure(f"cannot write {to}: {error.strerror}", ExitCode.USAGE) from error
    run.show(found, [f"wrote {to}"])
