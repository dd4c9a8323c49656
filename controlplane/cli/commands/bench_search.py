"""Searches for the best configuration of a version: start, follow, cancel."""

import json
import time
from typing import Annotated, Any

import typer

from controlplane.cli.commands.act import Yes, pools_of
from controlplane.cli.commands.bench import LOOK_EVERY_S, OPEN, Slo, Workload
from controlplane.cli.commands.rollouts import stated
from controlplane.cli.commands.rows import json_or_text
from controlplane.cli.completion import names_of
from controlplane.cli.errors import Failure
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.resources import Column, at, number
from controlplane.cli.session import Session, session_of

app = typer.Typer()

CONFIGURATIONS = (
    number("NO", "number"), Column("CONFIGURATION", at("choice")), Column("STANDING", at("standing")),
    number("PREDICTED", "predicted"), number("25 %", "scores.25%"), number("50 %", "scores.50%"),
    number("100 %", "scores.100%"), Column("REASON", at("reason")),
)  # fmt: skip


@app.command()
def search(
    context: typer.Context,
    version: Annotated[str, typer.Argument(metavar="MODEL@VERSION", help="Version that the deployment serves.")],
    vary: Annotated[list[str], typer.Option("--vary", help="NAME=VALUE,VALUE; may be repeated. See below.")],
    workload: Workload,
    slo: Slo,
    deployment: Annotated[
        str,
        typer.Option(
            "-d",
            "--deployment",
            help="Deployment that serves it. Default: the model's name.",
            autocompletion=names_of("deployments"),
        ),
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Random seed; the same seed gives the same requests.")] = 0,
    rules: Annotated[
        list[str] | None, typer.Option("--rule", help="Length of full points: min_s=20, min_requests=100.")
    ] = None,
    most_trials: Annotated[int, typer.Option(min=1, help="Maximum number of measurements.")] = 40,
    most_hours: Annotated[float, typer.Option(min=0.01)] = 12.0,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the end.")] = False,
    yes: Yes = False,
) -> None:
    """Find the configuration of a version with the highest goodput per chip. Its deployment is rolled out to one
    configuration after the other and must have no other users; finally it returns to the current version.

    NAME is engine_options.OPTION, parallelism.DEGREE, max_concurrency, speculation, quantization or roles (JSON values;
    {} for none), or cells (number of cells per role). Every combination is one configuration. One of each shape is
    measured, the others are predicted from it, and the best candidates are halved at 25, 50 and 100 % of a point's
    length.

    switchyard bench search sim-70b@1 --vary engine_options.max_num_seqs=8,32,64 -w 1000+150 --slo ttft=1000,itl=60

    switchyard bench search sim-70b@1 --vary cells=4,1p+3d,2p+2d,3p+1d -w 3000+200 --slo ttft=1500,itl=50"""
    run = session_of(context)
    served = deployment or version.partition("@")[0]
    run.confirm(f"All cells of {served} will serve one configuration after the other.", wanted=served, yes=yes)
    body: dict[str, Any] = {
        "version": version, "deployment": served, "varied": dict(_varied(one) for one in vary), "workload": workload,
        "slo": slo, "seed": seed, "rules": stated(rules or []), "most_trials": most_trials, "most_hours": most_hours,
    }  # fmt: skip
    found = run.connection.post("configuration-searches", body)
    _show_search(run, found if detach else _search_followed(run, found))


@app.command("search-show")
def search_show(
    context: typer.Context,
    search: Annotated[int, typer.Argument(metavar="NUMBER", help="ID in `switchyard get searches`.")],
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it has ended.")] = False,
) -> None:
    """Show a search: its configurations with predictions and measurements, and why some were left out.

    switchyard bench search-show 3"""
    run = session_of(context)
    found = run.connection.get(f"configuration-searches/{search}")
    _show_search(run, _search_followed(run, found) if wait else found)


@app.command("search-cancel")
def search_cancel(
    context: typer.Context, search: Annotated[int, typer.Argument(metavar="NUMBER")], yes: Yes = False
) -> None:
    """Cancel a search; its deployment returns to the original version.

    switchyard bench search-cancel 3"""
    run = session_of(context)
    run.confirm(f"Search {search} will stop before its end.", wanted=str(search), yes=yes)
    _show_search(run, run.connection.post(f"configuration-searches/{search}/cancel", {}))


def _varied(text: str) -> tuple[str, list[Any]]:
    """`max_num_seqs=8,16` or `speculation=[{}, {"method": "ngram"}]`."""
    name, equals, values = text.partition("=")
    if not equals or not values:
        raise Failure(
            f"--vary {text!r} is invalid; use NAME=VALUE,VALUE, such as engine_options.max_num_seqs=32,64",
            ExitCode.USAGE,
        )
    if values.startswith("["):
        try:
            read = json.loads(values)
        except ValueError:
            raise Failure(f"--vary {name}: {values[:60]!r} is not a JSON list", ExitCode.USAGE) from None
        return name, read
    return name, [(name == "cells" and pools_of(value)) or json_or_text(value) for value in values.split(",")]


def _show_search(run: Session, found: dict[str, Any]) -> None:
    if run.output.is_for_programs:
        run.output.document(found)
        return
    run.output.plain(f"search {found['id']} around {found['version']} on {found['deployment']}: {found['state']}")
    run.output.plain(f"{found['workload']} within {found['slo']}: {found['reason']}")
    if found["best"]:
        run.output.plain(f"best: {found['best']}; `switchyard rollout start` rolls it out once it is released")
    run.output.rows(CONFIGURATIONS, found["configurations"], empty="It has no configurations.")


def _search_followed(run: Session, found: dict[str, Any]) -> dict[str, Any]:
    shown = ""
    while found["state"] in OPEN:
        if not run.output.is_for_programs and found["reason"] != shown:
            shown = found["reason"]
            run.output.note(shown)
        time.sleep(LOOK_EVERY_S)
        found = run.connection.get(f"configuration-searches/{found['id']}")
    return found
