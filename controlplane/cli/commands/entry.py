"""The common DNS entry: the region that clients reach, the planned change, and what blocks it."""

import re
from typing import Annotated, Any

import typer

from controlplane.cli.commands.act import Yes
from controlplane.cli.completion import names_of
from controlplane.cli.errors import Failure
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.session import Session, path_of, session_of

app = typer.Typer()
entry = typer.Typer(help="The common DNS entry: which region clients reach.", no_args_is_help=True)
app.add_typer(entry, name="entry")

_SHARE = re.compile(r"([-\w]+)=([0-9]{1,7}(?:\.[0-9]{1,6})?)")


@entry.command()
def show(context: typer.Context) -> None:
    """Show which share of all clients each region's entry gets, and why that is not as wanted."""
    run = session_of(context)
    row = _entry(run)
    run.show(row, list(_lines(row)))


@entry.command()
def shares(
    context: typer.Context,
    planned: Annotated[list[str], typer.Argument(metavar="REGION=SHARE…", autocompletion=names_of("regions"))],
) -> None:
    """Plan the shares of regions, in any measure; those that are not named have 1. Clients move within minutes.

    switchyard entry shares us-east-1=3 eu-west-1=1
    """
    run = session_of(context)
    matches = [_SHARE.fullmatch(one) for one in planned]
    if wrong := [one for one, match in zip(planned, matches, strict=True) if match is None]:
        raise Failure(f"{wrong[0]!r} must read REGION=SHARE, such as us-east-1=3", ExitCode.USAGE)
    wanted = {match.group(1): float(match.group(2)) for match in matches if match is not None}
    row = run.connection.patch(_path(_entry(run)), {"shares": wanted})
    run.show(row, list(_lines(row)))


@entry.command()
def adopt(context: typer.Context, yes: Yes = False) -> None:
    """Replace what stands at the entry by ours, though another control plane or a person wrote it."""
    run = session_of(context)
    row = _entry(run)
    for line in _lines(row):
        run.output.toned(line, "warn")
    run.confirm(f"What stands at {row['name']} will be replaced.", wanted=row["name"], yes=yes)
    row = run.connection.post(f"{_path(row)}/adopt", {"seen": row["seen"]})
    run.show(row, [f"{row['name']} gets our records within seconds"])


def _entry(run: Session) -> dict[str, Any]:
    rows = list(run.connection.pages("entry", {}))
    if not rows:
        raise Failure("no region's stack names an entry: its parameters hosted_zone and entry_name", ExitCode.NOT_FOUND)
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
