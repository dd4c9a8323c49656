"""Quotas: how many machines of a type each team is entitled to, who has and borrows what. A deployment names its team
and its priority in its document, or with `switchyard quota assign`."""

from typing import Annotated, Any

import typer

from controlplane.cli.completion import names_of
from controlplane.cli.session import path_of, resource_named, session_of

app = typer.Typer()
quota = typer.Typer(help="Who may have which machines, and who goes first when they are short.", no_args_is_help=True)
app.add_typer(quota, name="quota")

Where = Annotated[
    str, typer.Option("--region", "-r", help="There only; else over all.", autocompletion=names_of("regions"))
]
Type = Annotated[str, typer.Argument(metavar="TYPE", autocompletion=names_of("instance-types"))]
EMPTY = "No team has a quota; `switchyard quota set TEAM TYPE MACHINES` gives it one."


@quota.command("list")
def list_quotas(context: typer.Context, team: Annotated[str, typer.Option(help="Of this team alone.")] = "") -> None:
    """Show every quota: machines to which teams are entitled, and which they use and borrow.

    switchyard quota list
    """
    run = session_of(context)
    resource = resource_named("quotas")
    rows = list(run.connection.pages(resource.path, {"team": team} if team else {}))
    run.output.rows(resource.columns, rows, empty=EMPTY)


@quota.command("set")
def set_quota(
    context: typer.Context,
    team: str,
    instance_type: Type,
    machines: Annotated[int, typer.Argument(min=0)],
    borrow_most: Annotated[int | None, typer.Option(min=0, help="How many of others it may borrow; else any.")] = None,
    region: Where = "",
) -> None:
    """Entitle a team to so many machines of a type, over all regions or in one.

    switchyard quota set search local.cpu 4 --region us-east-1
    """
    run = session_of(context)
    body = {"team": team, "instance_type": instance_type, "machines": machines, "borrow_most": borrow_most}
    result = run.connection.post("quotas", body | {"region": region})
    what = f"{instance_type} in {region}" if region else instance_type
    run.show(result, [f"team {team} is entitled to {machines} {what}, and uses {result['used']}"])


@quota.command("remove")
def remove_quota(context: typer.Context, team: str, instance_type: Type, region: Where = "") -> None:
    """End a team's quota of a type, over all regions or in one: it is bound by that no more, and entitled to none."""
    run = session_of(context)
    name = f"{team}:{instance_type}:{region}" if region else f"{team}:{instance_type}"
    result = run.connection.delete(path_of(resource_named("quotas"), name))
    what = f"{instance_type} in {region}" if region else instance_type
    run.show(result, [f"team {team} has no quota of {what} any more"])


@quota.command()
def assign(
    context: typer.Context,
    deployment: Annotated[str, typer.Argument(autocompletion=names_of("deployments"))],
    team: Annotated[str | None, typer.Option(help="Whose quota it counts against; empty: none.")] = None,
    priority: Annotated[int | None, typer.Option(min=0, max=9, help="The higher gets machines first.")] = None,
    preemptible: Annotated[
        bool | None, typer.Option(help="Whether others may take its cells below the start of its range, too.")
    ] = None,
    preempts: Annotated[
        str | None, typer.Option(help="For which cells it takes machines of others: min, need or nothing.")
    ] = None,
) -> None:
    """Say of a deployment whose it is, and whom it goes before when machines are short. What is left out stays.

    switchyard quota assign sim-70b --team search --priority 7
    """
    run = session_of(context)
    stated = {"team": team, "priority": priority, "preemptible": preemptible, "preempts": preempts}
    body: dict[str, Any] = {name: value for name, value in stated.items() if value is not None}
    result = run.connection.patch(path_of(resource_named("deployments"), deployment), body)
    priority_text = "as its serving class" if result["priority"] is None else f"priority {result['priority']}"
    run.show(result, [f"deployment {deployment}: team {result['team'] or 'none'}, {priority_text}"])
