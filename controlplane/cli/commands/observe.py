"""Live views: events, load of cells, engine logs."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import count
from typing import Annotated, Any

import typer

from controlplane.cli.commands.act import place_named
from controlplane.cli.completion import names_of, names_of_places
from controlplane.cli.errors import Failure
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.resources import Column, at, number
from controlplane.cli.session import Session, path_of, session_of

app = typer.Typer()

FOLLOW_EVERY_S = 1.0
BATCH = 1000
POLLS_MOST = 6
"""Time until agents send lines to a new reader."""


@app.command()
def events(
    context: typer.Context,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new events.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Number of past entries to show first.")] = 20,
    region: Annotated[str, typer.Option("--region", "-r", autocompletion=names_of("regions"))] = "",
    deployment: Annotated[str, typer.Option("--deployment", "-d", autocompletion=names_of("deployments"))] = "",
    cell: Annotated[str, typer.Option(autocompletion=names_of("cells"))] = "",
    node: Annotated[str, typer.Option(autocompletion=names_of("nodes"))] = "",
    kind: Annotated[str, typer.Option(help="Kind of event, such as cell.ready.")] = "",
    tone: Annotated[list[str] | None, typer.Option(help="warn, bad, …; may be repeated.")] = None,
) -> None:
    """Show events, oldest first. With -o json, one object per line.

    switchyard events -f -d sim-70b"""
    run = session_of(context)
    options = {"region": region, "deployment": deployment, "cell": cell, "node": node, "kind": kind, "tone": tone}
    filters = {name: value for name, value in options.items() if value}
    last = 0
    newest = list(run.connection.pages("events", filters, max(lines, 1)))
    if newest:
        last = int(newest[0]["id"])
    for event in reversed(newest[:lines]):
        _print_event(run, event)
    while follow:
        time.sleep(FOLLOW_EVERY_S)
        fresh = list(run.connection.pages("events", {**filters, "since_id": last}, BATCH))
        for event in reversed(fresh):
            _print_event(run, event)
            last = max(last, int(event["id"]))


def _print_event(run: Session, event: dict[str, Any]) -> None:
    if run.output.is_for_programs:
        import json

        run.output.plain(json.dumps(event, ensure_ascii=False))
        return
    run.output.toned(f"{event['at'][:19].replace('T', ' ')}  {event['kind']:<22} {event['message']}", event["tone"])


@app.command()
def logs(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="CELL|NODE", autocompletion=names_of_places)],
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=1000)] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines.")] = False,
    source: Annotated[str, typer.Option(help="Which log: engine, proxy or agent.")] = "engine",
) -> None:
    """Show the last log lines of a cell or node.

    switchyard logs sim-70b-us-east-1-1 -f"""
    run = session_of(context)
    cell, node = _cell_and_node(run, name)
    path = f"{path_of('cells', cell)}/logs"
    shown: list[str] = []
    for polls in count(1):
        response = run.connection.get(path, {"lines": lines, "source": source})
        written = log_lines(response, node, source)
        if run.output.is_for_programs and (written or polls == POLLS_MOST):
            run.output.document(response)
        elif not run.output.is_for_programs:
            for line in fresh_lines(shown, written):
                run.output.plain(line)
        shown = written
        if not follow and (written or polls == POLLS_MOST):
            break
        time.sleep(FOLLOW_EVERY_S)
    if not shown:
        run.output.note(f"{name} has no log lines of its {source}.")


def _cell_and_node(run: Session, name: str) -> tuple[str, str]:
    """The cell of the requested logs, and the node if a node was named. Raises Failure if the node is in no cell."""
    bare = name.rpartition("/")[2]
    resource = place_named(run, name)
    if resource.name == "cells":
        return bare, ""
    cell = run.connection.get(path_of(resource.path, bare))["cell"]
    if cell is None:
        raise Failure(f"{bare} is in no cell; a spare's agent writes only a local log", ExitCode.CONFLICT)
    return str(cell), bare


def log_lines(response: dict[str, Any], node: str, source: str) -> list[str]:
    """The requested lines: of a node, or of the first node that has any."""
    if not node:
        return [str(line) for line in response["lines"]]
    logs = (log for one in response["nodes"] if one["node"] == node for log in one["logs"] if log["name"] == source)
    return [str(line) for log in logs for line in log["lines"]]


def fresh_lines(before: list[str], now: list[str]) -> list[str]:
    """The lines after `before`, for two reads of the end of one log: the longest overlap is old."""
    for size in range(min(len(before), len(now)), 0, -1):
        if before[-size:] == now[:size]:
            return now[size:]
    return now


@app.command()
def top(
    context: typer.Context,
    by: Annotated[str, typer.Argument(help="Group by cells, deployments or regions.")] = "cells",
    interval: Annotated[float, typer.Option("--interval", "-i", min=0.2, help="Seconds between samples.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one sample. Piped output always does.")] = False,
    deployment: Annotated[str, typer.Option("--deployment", "-d", autocompletion=names_of("deployments"))] = "",
    region: Annotated[str, typer.Option("--region", "-r", autocompletion=names_of("regions"))] = "",
) -> None:
    """Show the load of the last 30 seconds, busiest first, and refresh it until Ctrl-C."""
    run = session_of(context)
    filters = {name: value for name, value in (("deployment", deployment), ("region", region)) if value}

    def sample() -> list[dict[str, Any]]:
        return summed(list(run.connection.pages("cells", filters)), by)

    if run.output.is_for_programs:
        run.output.document(sample())
    elif once or not run.output.colour:
        run.output.rows(_columns(by), sample(), empty="There are no cells.")
    else:
        _live(run, sample, by, interval)


def summed(cells: list[dict[str, Any]], by: str) -> list[dict[str, Any]]:
    """A row for each cell, deployment or region: sums of requests and tokens, maximum of latencies."""
    fields = {"deployments": "deployment", "regions": "region"}
    if by not in fields:
        rows = [{"name": cell["id"], "cells": 1, "ready": int(cell["state"] == "ready"), **cell} for cell in cells]
        return sorted(rows, key=lambda row: (-row["load"]["tokens_per_s"], row["name"]))
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for cell in cells:
        groups[cell[fields[by]]].append(cell)
    return sorted(
        (_sum(name, group) for name, group in groups.items()),
        key=lambda row: (-row["load"]["tokens_per_s"], row["name"]),
    )


def _sum(name: str, cells: list[dict[str, Any]]) -> dict[str, Any]:
    total: Counter[str] = Counter()
    for cell in cells:
        total.update({field: cell["load"][field] for field in ("in_flight", "queued", "tokens_per_s")})
    worst = {
        field: max((cell["load"][field] for cell in cells if cell["load"][field] is not None), default=None)
        for field in ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms")
    }
    ready = sum(cell["state"] == "ready" for cell in cells)
    tone = "ok" if ready == len(cells) else "warn"
    return {"name": name, "cells": len(cells), "ready": ready, "tone": tone, "load": {**total, **worst}}


def _columns(by: str) -> list[Column]:
    summed_up = [number("READY", "ready"), number("CELLS", "cells")]
    counted = [Column("STATE", at("state"), toned=True)] if by == "cells" else summed_up
    return [
        Column(by.rstrip("s").upper(), at("name")),
        *counted,
        number("BUSY", "load.in_flight"),
        number("QUEUED", "load.queued"),
        number("TOK/S", "load.tokens_per_s"),
        number("TTFT P50 MS", "load.ttft_p50_ms"),
        number("P99 MS", "load.ttft_p99_ms"),
        number("ITL P50 MS", "load.itl_p50_ms"),
    ]


def _live(run: Session, sample: Callable[[], list[dict[str, Any]]], by: str, interval_s: float) -> None:
    from rich.live import Live

    from controlplane.cli.output import rich_table

    with Live(console=run.output.console(), screen=True, auto_refresh=False) as live:
        while True:
            rows = sample()
            live.update(rich_table(_columns(by), rows, run.output.now), refresh=True)
            time.sleep(interval_s)
