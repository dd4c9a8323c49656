"""The autoscaler: its ranges with the wanted number of cells, its policy, and the pause for the whole fleet.
`switchyard scale` sets ranges."""

import json
from typing import Annotated, Any

import typer

from controlplane.cli.commands.act import Why
from controlplane.cli.commands.rollouts import stated
from controlplane.cli.completion import names_of
from controlplane.cli.plans import forecast_lines
from controlplane.cli.session import Session, path_of, session_of

app = typer.Typer()
autoscale = typer.Typer(help="Show autoscaling, set its policy, pause it.", no_args_is_help=True)
app.add_typer(autoscale, name="autoscale")

LAST_DECISIONS = 5
Named = Annotated[str, typer.Argument(metavar="[DEPLOYMENT]", autocompletion=names_of("deployments"))]


@autoscale.command()
def status(context: typer.Context, deployment: Named = "") -> None:
    """Show the deployments and regions with a range of cells, the wanted number and its reason; for one deployment also
    the last decisions.

    switchyard autoscale status sim-70b"""
    run = session_of(context)
    filters = {"deployment": deployment} if deployment else {}
    switch = run.connection.get("autoscaling")
    places, decisions = run.resource("scaling-places"), run.resource("scaling-decisions")
    rows = list(run.connection.pages(places.path, filters))
    last: list[dict[str, Any]] = []
    roles: list[dict[str, Any]] = []
    if deployment:
        regions = run.connection.get(path_of("deployments", deployment))["regions"]
        roles = [{"region": one["region"], **one["role_plan"]} for one in regions if one["role_plan"]]
        last = run.connection.get(decisions.path, {**filters, "page_size": LAST_DECISIONS})["results"]
    if run.output.is_for_programs:
        run.output.document({"switch": switch, "places": rows, "decisions": last, "roles": roles})
        return
    if switch["paused"]:
        run.output.toned(_line(switch), "warn")
    empty = "No deployment has a range of cells; `switchyard scale DEPLOYMENT REGION=2..8` sets one."
    run.output.rows(places.columns, rows, empty=empty)
    for one in roles:
        run.output.plain(_roles_line(one))
    if last:
        run.output.plain("")
        run.output.rows(decisions.columns, last, empty="")


def _roles_line(plan: dict[str, Any]) -> str:
    split = ", ".join(f"{plan[role]} {role}" for role in ("prefill", "decode", "mixed") if plan[role])
    shadow = "" if plan["acting"] else " (shadow)"
    return f"roles in {plan['region']}: {split or 'no cells'}{shadow}: {plan['reason']}"


@autoscale.command()
def policy(
    context: typer.Context,
    deployment: Annotated[str, typer.Argument(autocompletion=names_of("deployments"))],
    settings: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=VALUE…", help="name=value, such as mode=act, target_utilisation=0.6, schedule='[…]'."
        ),
    ],
) -> None:
    """Change parts of a deployment's scaling policy. The default mode is shadow: decisions are only recorded.
    `mode=act` carries them out.

    switchyard autoscale policy sim-70b mode=act target_utilisation=0.6"""
    run = session_of(context)
    result = run.connection.patch(path_of("deployments", deployment), {"scaling": stated(settings)})
    differing = ", ".join(f"{name}={json.dumps(value)}" for name, value in result["scaling"].items())
    run.show(result, [f"scaling policy of deployment {deployment}: {differing or 'the defaults'}"])


@autoscale.command("what-if")
def what_if(
    context: typer.Context,
    deployment: Annotated[str, typer.Argument(autocompletion=names_of("deployments"))],
    factor: Annotated[float, typer.Option(min=0, max=1000, help="Multiple of the current load.")] = 1.0,
) -> None:
    """Predict the autoscaler's decision and the fleet at another load. Changes nothing.

    switchyard autoscale what-if sim-70b --factor 1.5"""
    run = session_of(context)
    result = run.connection.post("plan", {"load": {"deployment": deployment, "factor": factor}})
    run.show(result, [text for text, _ in forecast_lines(deployment, result)])


@autoscale.command()
def pause(context: typer.Context, why: Why = "") -> None:
    """Pause autoscaling for the whole fleet. Cells stay, and decisions are recorded as in shadow mode."""
    _switch(session_of(context), "pause", why)


@autoscale.command()
def resume(context: typer.Context, why: Why = "") -> None:
    """Resume autoscaling for deployments whose policy has mode=act."""
    _switch(session_of(context), "resume", why)


def _switch(run: Session, action: str, why: str) -> None:
    result = run.connection.post(f"autoscaling/{action}", {"why": why})
    run.show(result, [_line(result)])


def _line(switch: dict[str, Any]) -> str:
    why = f": {switch['why']}" if switch["why"] else ""
    by = f" by {switch['actor']} at {switch['changed_at']}" if switch["actor"] else ""
    return f"autoscaling is {'paused' if switch['paused'] else 'on'}{by}{why}"


@autoscale.command()
def plan(context: typer.Context, deployment: Named = "") -> None:
    """Show the plan for the next day: cells and batch capacity per hour, unmet demand, dollars.

    switchyard autoscale plan sim-70b"""
    run = session_of(context)
    found = run.connection.get("capacity-plan")
    if run.output.is_for_programs:
        run.output.document(found)
        return
    if found["at"] is None:
        run.output.plain("No plan yet: it needs forecasts with at least half a day of known errors.")
        return
    run.output.plain(
        f"from {found['at']}: ${found['total']:,.2f} per day, {found['shifts']} starts, found by {found['solver']}"
    )
    for place in found["places"]:
        if deployment in ("", place["deployment"]):
            run.output.plain(f"\n{place['deployment']} in {place['region']}, maximum per hour:")
            run.output.plain(f"  cells      {_hours(place['cells'], found['slot_s'])}")
            run.output.plain(f"  to cover   {_hours(place['cover'], found['slot_s'])}")
            run.output.plain(f"  batches    {_hours(place['budget'], found['slot_s']) or 'no forecast of its load'}")
    for warm in found["warm"]:
        where = f"{warm['region']}, {warm['instance_type']}"
        run.output.plain(f"\n{where}: {warm['machines']} kept warm for {warm['reason']}")
    for lack in found["lacks"]:
        if deployment in ("", lack["deployment"]):
            where = f"{lack['deployment']} in {lack['region']}"
            run.output.toned(f"{where} lacks {lack['requests']:g} ({lack['what']}): {lack['reason']}", "warn")


def _hours(values: list[float], slot_s: int) -> str:
    step = max(1, 3600 // slot_s)
    return " ".join(f"{max(values[at : at + step]):.0f}" for at in range(0, len(values), step))
