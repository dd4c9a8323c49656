"""The common DNS entry: shares of regions, planned changes, and what blocks them."""

import re
from typing import Annotated, Any

import typer

from controlplane.cli.commands.act import Yes
from controlplane.cli.completion import names_of
from controlplane.cli.errors import Failure
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.session import Session, path_of, session_of

app = typer.Typer()
entry = typer.Typer(help="Manage the common DNS entry, which directs clients to regions.", no_args_is_help=True)
app.add_typer(entry, name="entry")

_SHARE = re.compile(r"([-\w]+)=([0-9]{1,7}(?:\.[0-9]{1,6})?)")


@entry.command()
def show(context: typer.Context) -> None:
    """Show the share of clients per region, and why it differs from the plan."""
    run = session_of(context)
    row = _entry(run)
    run.show(row, list(_lines(row)))


@entry.command()
def shares(
    context: typer.Context,
    planned: Annotated[list[str], typer.Argument(metavar="REGION=SHARE…", autocompletion=names_of("regions"))],
) -> None:
    """Plan the shares of regions, as relative weights; omitted regions have 1. Clients move within minutes.

    switchyard entry shares us-east-1=3 eu-west-1=1"""
    run = session_of(context)
    matches = [_SHARE.fullmatch(one) for one in planned]
    if wrong := [one for one, match in zip(planned, matches, strict=True) if match is None]:
        raise Failure(f"{wrong[0]!r} is invalid; use REGION=SHARE, such as us-east-1=3", ExitCode.USAGE)
    wanted = {match.group(1): float(match.group(2)) for match in matches if match is not None}
    row = run.connection.patch(_path(_entry(run)), {"shares": wanted})
    run.show(row, list(_lines(row)))


@entry.command()
def adopt(context: typer.Context, yes: Yes = False) -> None:
    """Replace existing DNS records at the entry, even if another control plane or a person wrote them."""
    run = session_of(context)
    row = _entry(run)
    for line in _lines(row):
        run.output.toned(line, "warn")
    run.confirm(f"Existing records at {row['name']} will be replaced.", wanted=row["name"], yes=yes)
    row = run.connection.post(f"{_path(row)}/adopt", {"seen": row["seen"]})
    run.show(row, [f"{row['name']} will have Switchyard's records within seconds"])


def _entry(run: Session) -> dict[str, Any]:
    rows = list(run.connection.pages("entry", {}))
    if not rows:
        raise Failure(
            "no region's stack has an entry: set its parameters hosted_zone and entry_name", ExitCode.NOT_FOUND
        )
    return dict(rows[0])


def _path(row: dict[str, Any]) -> str:
    return path_of("entry", row["name"])


def _lines(row: dict[str, Any]) -> list[str]:
    whole = sum(row["weights"].values()) or 1
    state = (
        f"revision {row['published']}, {row['state'].replace('_', ' ')}" if row["published"] else "not published yet"
    )
    return [
        f"{row['name']}: {state}",
        *(f"  {region}  {100 * weight / whole:.0f} %" for region, weight in sorted(row["weights"].items())),
        *([f"held: {row['held']}"] if row["held"] else []),
    ]
