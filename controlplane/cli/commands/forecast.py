"""The forecast load of a deployment over the next day, past forecast errors, and what the fleet would carry of more."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer

from controlplane.cli.completion import names_of
from controlplane.cli.documents import read_documents
from controlplane.cli.errors import Failure, Problem
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.plans import stress_lines
from controlplane.cli.resources import Column, Row, at, number
from controlplane.cli.session import session_of

app = typer.Typer()

EMPTY = (
    "No forecast yet: it needs the process `controller` and a quarter of an hour of requests; `switchyard "
    "chat` sends one."
)
COLUMNS = (
    Column("ORIGIN", at("origin")),
    Column("CLASS", at("serving_class")),
    Column("UNTIL", at("until")),
    number("P50", "p50"),
    number("P90", "p90"),
    Column("METHOD", at("method")),
    number("WAPE %", "wape"),
    number("P90 HELD %", "held"),
)


@app.command()
def forecast(
    context: typer.Context,
    deployment: Annotated[str, typer.Argument(autocompletion=names_of("deployments"))],
) -> None:
    """Show the expected load in concurrent requests, by origin region and class, with past errors.

    switchyard forecast sim-70b"""
    run = session_of(context)
    found = list(run.connection.pages("forecasts", {"deployment": deployment}))
    if run.output.is_for_programs:
        run.output.document(found)
        return
    run.output.rows(COLUMNS, [row for one in found for row in _rows(one)], empty=EMPTY)


@app.command("what-if")
def what_if(
    context: typer.Context,
    factor: Annotated[float, typer.Option(min=0, max=16, help="Multiple of the load forecast for the next day.")] = 1.0,
    lost: Annotated[
        list[str] | None,
        typer.Option(help="A lost region; may be repeated.", autocompletion=names_of("regions")),
    ] = None,
    simulate: Annotated[
        str,
        typer.Option(help="Also simulate the loss of this region step by step.", autocompletion=names_of("regions")),
    ] = "",
    filename: Annotated[
        list[str] | None,
        typer.Option("-f", "--filename", help="Documents to apply first: a file, a folder, or - for standard input."),
    ] = None,
    draft: Annotated[str, typer.Option(help="Key of a plan draft to apply first, from its link.")] = "",
) -> None:
    """Show what breaks first, where and when, at a higher load or without regions. Changes nothing.

    switchyard what-if --factor 1.5 --lost us-east-1
    switchyard what-if -f fleet.yaml --simulate us-east-1"""
    run = session_of(context)
    if filename and draft:
        raise Failure("give documents with -f, or a draft", ExitCode.USAGE)
    written = read_documents(filename) if filename else None
    body: dict[str, Any] = {"factor": factor, "lost": lost or []}
    body |= {"simulate": simulate} if simulate else {}
    body |= {"draft": draft} if draft else {"documents": written.documents} if written else {}
    try:
        answer = run.connection.post("what-if", body)
    except Problem as problem:
        raise Problem(problem.status, problem.document, dict(written.places) if written else {}) from None
    if run.output.is_for_programs:
        run.output.document(answer)
        return
    for text, tone in stress_lines(answer, simulate):
        run.output.toned(text, tone)


def _rows(one: dict[str, Any]) -> Iterator[Row]:
    """A row for each horizon with known errors; without any, for the next slot."""
    chosen = {row["horizon_s"]: row for row in one["horizons"] if row["chosen"]}
    for horizon_s in sorted(chosen) or [one["slot_s"]]:
        slot = min(horizon_s // one["slot_s"], len(one["p50"])) - 1
        errors = chosen.get(horizon_s, {})
        until = datetime.fromisoformat(one["made_at"]) + timedelta(seconds=(slot + 1) * one["slot_s"])
        yield {
            "origin": one["origin"],
            "serving_class": one["serving_class"],
            "until": f"{until:%m-%d %H:%M}",
            "p50": round(one["p50"][slot], 1),
            "p90": round(one["p90"][slot], 1),
            "method": one["methods"][slot],
            "wape": _percent(errors.get("wape")),
            "held": _percent(errors.get("p90_held")),
        }


def _percent(share: float | None) -> float | None:
    return None if share is None else round(100 * share, 1)
