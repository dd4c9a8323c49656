"""Sampled requests: what slow ones have in common, failed ones, and one request by its id."""

from typing import Annotated, Any

import typer

from controlplane.cli.completion import names_of
from controlplane.cli.errors import Failure
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.resources import Column, at, number
from controlplane.cli.session import session_of

app = typer.Typer()

FINDINGS = (
    Column("MORE FREQUENT AMONG SLOW", at("text")), number("SLOW %", "slow"), number("ORDINARY %", "other"),
    number("LIFT", "lift"),
)  # fmt: skip
STAGES = (Column("STAGE, MEDIAN MS", at("name")), number("SLOW", "slow_ms"), number("ORDINARY", "other_ms"))
LISTED = (
    Column("REQUEST", at("request")), Column("AT", at("at")), Column("ANSWER", at("outcome")),
    Column("TENANT", at("tenant")), Column("CELL", at("cell")), number("PROMPT", "prompt_tokens"),
    number("OUTPUT", "completion_tokens"), number("FIRST MS", "first_ms"), number("TOTAL MS", "total_ms"),
)  # fmt: skip


@app.command()
def requests(
    context: typer.Context,
    request: Annotated[str, typer.Argument(metavar="[ID]", help="The beginning of a request id.")] = "",
    cell: Annotated[str, typer.Option(autocompletion=names_of("cells"))] = "",
    deployment: Annotated[str, typer.Option("-d", "--deployment", autocompletion=names_of("deployments"))] = "",
    region: Annotated[str, typer.Option("-r", "--region", autocompletion=names_of("regions"))] = "",
    key: Annotated[str, typer.Option(help="Only this key, by its prefix.")] = "",
    failed: Annotated[bool, typer.Option("--failed", help="List failed requests.")] = False,
    during: Annotated[str, typer.Option("--range", help="Of the comparison: 1h, 6h or 1d.")] = "1h",
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=1000, help="Maximum rows of a list.")] = 20,
) -> None:
    """Show what the slow requests of a cell or deployment have in common; with an id, --key or --failed, list samples.

    switchyard requests --cell sim-70b-us-east-1-1"""
    run = session_of(context)
    place = {"cell": cell, "deployment": deployment, "region": region}
    query = {name: value for name, value in place.items() if value}
    if request or failed or key:
        listed = {"request": request, "key": key, "failed": "true" if failed else ""}
        query |= {name: value for name, value in listed.items() if value}
        rows = list(run.connection.pages("requests", query, lines))[:lines]
        if request and not rows:
            raise Failure(f"no sample has a request id that begins with {request}", ExitCode.NOT_FOUND)
        run.output.rows(LISTED, rows, empty="No sampled request matches.")
        return
    answer = run.connection.get("requests/comparison", query | {"range": during})
    if run.output.is_for_programs:
        run.output.document(answer)
        return
    run.output.plain(answer["verdict"])
    if answer["findings"]:
        run.output.rows(FINDINGS, [_in_percent(finding, answer["others"]) for finding in answer["findings"]], empty="")
    if answer["slow"]:
        run.output.rows(STAGES, answer["stages"], empty="")
    run.output.note(f"{answer['slow']} slow and {answer['others']} ordinary requests were compared.")


def _in_percent(finding: dict[str, Any], others: int) -> dict[str, Any]:
    return {
        "text": ", ".join((finding["text"], *finding["also"])),
        "slow": round(100 * finding["support"]),
        "other": round(100 * finding["other_hits"] / others),
        "lift": round(finding["lift"], 1),
    }
