"""Lists of objects, and one object in full with its recent events."""

import time
from typing import Annotated, Any

import typer

from controlplane.cli.completion import kinds, names_of, names_of_kind
from controlplane.cli.errors import Failure
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.output import Format, described
from controlplane.cli.resources import Resource, columns_of
from controlplane.cli.session import Session, path_of, session_of

app = typer.Typer()

EVENTS_SHOWN = 10
INCIDENTS_SHOWN = 20
EVENTS_OF = {"cells": "cell", "nodes": "node", "regions": "region", "deployments": "deployment"}
"""Kinds that have events, and the parameter that filters them."""
WATCH_EVERY_S = 2.0


@app.command()
def get(
    context: typer.Context,
    kind: Annotated[str, typer.Argument(help="Kind: cells, nodes, deployments, rollouts, …", autocompletion=kinds)],
    names: Annotated[list[str] | None, typer.Argument(autocompletion=names_of_kind)] = None,
    region: Annotated[str, typer.Option("--region", "-r", autocompletion=names_of("regions"))] = "",
    deployment: Annotated[str, typer.Option("--deployment", "-d", autocompletion=names_of("deployments"))] = "",
    state: Annotated[list[str] | None, typer.Option(help="Only this state; may be repeated.")] = None,
    where: Annotated[list[str] | None, typer.Option(help="Other filter of the list: name=value.")] = None,
    include_ended: Annotated[bool, typer.Option("--all", "-A", help="Include ended objects.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of rows.")] = 1000,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh whenever something changes.")] = False,
) -> None:
    """List objects, or show those with the given names.

    switchyard get cells -r us-east-1 --state failed
    switchyard get deployments -o json"""
    run = session_of(context)
    resource = run.resource(kind)
    filters: dict[str, Any] = {"region": region, "deployment": deployment, "state": state or ()}
    if include_ended and resource.ends:
        filters["include"] = "all"
    filters = {name: value for name, value in filters.items() if value} | pairs(where or [])
    shown: Any = None
    while True:
        rows = _fetch(run, resource, names or [], filters, limit)
        if rows != shown:
            _print(run, resource, rows, single=bool(names) and len(rows) == 1)
            shown = rows
        if not watch:
            return
        time.sleep(WATCH_EVERY_S)


def pairs(where: list[str]) -> dict[str, str]:
    """`name=value` texts as a mapping. Raises Failure if one has no `=`."""
    split = [one.partition("=") for one in where]
    if wrong := [name for name, sign, _ in split if not sign]:
        raise Failure(f"{wrong[0]!r} is invalid; use name=value", ExitCode.USAGE)
    return {name: value for name, _, value in split}


def _fetch(
    run: Session, resource: Resource, names: list[str], filters: dict[str, Any], limit: int
) -> list[dict[str, Any]]:
    if names:
        return [run.connection.get(path_of(resource.path, name)) for name in names]
    rows = list(run.connection.pages(resource.path, filters, limit + 1))
    if len(rows) > limit:
        run.output.note(f"only the first {limit}; there are more (--limit)")
    return rows[:limit]


def _print(run: Session, resource: Resource, rows: list[dict[str, Any]], *, single: bool) -> None:
    if run.output.is_for_programs:
        run.output.document(rows[0] if single else rows)
    elif run.output.form is Format.NAME:
        for row in rows:
            run.output.plain(str(row.get(resource.key, "")))
    else:
        run.output.rows(columns_of(resource, rows), rows, empty=_nothing(resource))


def _nothing(resource: Resource) -> str:
    more = f" `switchyard create {resource.noun}` creates one." if resource.fields else ""
    return f"No {resource.name} found.{more}"


@app.command()
def describe(
    context: typer.Context,
    kind: Annotated[str, typer.Argument(autocompletion=kinds)],
    name: Annotated[str, typer.Argument(autocompletion=names_of_kind)],
) -> None:
    """Show one object in full, with its last events.

    switchyard describe cell sim-70b-us-east-1-1"""
    run = session_of(context)
    resource = run.resource(kind)
    row = run.connection.get(path_of(resource.path, name))
    if run.output.is_for_programs:
        run.output.document(row)
        return
    for line in described(row):
        run.output.plain(line)
    if resource.name in EVENTS_OF:
        filters = {EVENTS_OF[resource.name]: name}
        events = list(run.connection.pages("events", filters, EVENTS_SHOWN))
        run.output.plain("events:")
        run.output.rows(run.resource("events").columns, events, empty="  none in the last 30 days")


@app.command()
def status(context: typer.Context) -> None:
    """Show the delay of the control loops, what waits for a person, what is under way, and open incidents.

    switchyard status"""
    run = session_of(context)
    health = run.connection.get("/healthz")
    operations = run.connection.get("operations")
    incidents = list(run.connection.pages("incidents", {"state": "open"}, INCIDENTS_SHOWN))
    if run.output.is_for_programs:
        run.output.document({**health, **operations, "incidents": incidents})
        return
    run.output.toned(f"control loops: {health['summary']}", "ok" if health["status"] == "ok" else "bad")
    if health.get("hosts_summary"):
        run.output.toned(f"control hosts: {health['hosts_summary']}", "ok" if health["hosts_are_well"] else "bad")
    for name, title, tone in (("waiting", "needs a person", "warn"), ("in_progress", "in progress", "moving")):
        for row in operations[name]:
            why = f" ({row['why']})" if row["why"] else ""
            run.output.toned(f"{title}: {row['kind']}: {row['what']}, {row['text']}{why}", tone)
    run.output.rows(run.resource("incidents").columns, incidents, empty="There are no open incidents.")
