"""Commands that act on single objects: drain, cordon, restart, replace, scale, evacuate, dismiss, approve. Each is one
request to the API. Commands that can affect users show the predicted effect and ask for confirmation."""

from typing import Annotated, Any

import typer

from controlplane.cli.completion import names_of, names_of_places
from controlplane.cli.errors import Failure, Problem
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.plans import effect_lines, forecast_lines
from controlplane.cli.resources import Resource
from controlplane.cli.session import Session, path_of, session_of

app = typer.Typer()
quota = typer.Typer(help="Team and priority of a deployment, for when machines are short.", no_args_is_help=True)
app.add_typer(quota, name="quota")

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Why = Annotated[str, typer.Option(help="Reason, shown in the timeline.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Nodes = Annotated[list[str], typer.Argument(metavar="NODE…", autocompletion=names_of("nodes"))]
Cells = Annotated[list[str], typer.Argument(metavar="CELL…", autocompletion=names_of("cells"))]
Places = Annotated[list[str], typer.Argument(metavar="CELL|NODE…", autocompletion=names_of_places)]


def seconds(text: str) -> int:
    """`90`, `90s`, `15m`, `2h`, `1d` in seconds. Raises Failure if it has another form."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in UNITS_S else (text, "s")
    if not number.isdecimal():
        raise Failure(f"{text!r} is not a duration; use the form 90s, 15m, 2h or 1d", ExitCode.USAGE)
    return int(number) * UNITS_S[unit]


def place_named(run: Session, name: str) -> Resource:
    """Whether a name is a cell's or a node's; `cell/…` and `node/…` are explicit. Raises Problem if neither exists."""
    cells, nodes = run.resource("cells"), run.resource("nodes")
    kind, slash, _ = name.partition("/")
    if slash:
        return run.resource(kind)
    first, second = (nodes, cells) if name.startswith("n-") else (cells, nodes)
    try:
        run.connection.get(path_of(first.path, name))
    except Problem as problem:
        if problem.status != 404:
            raise
        run.connection.get(path_of(second.path, name))
        return second
    return first


def _run_action(run: Session, resource: Resource, names: list[str], action: str, why: str) -> None:
    results = []
    for name in names:
        result = run.connection.post(f"{path_of(resource.path, name)}/{action}", {"why": why})
        results.append(result)
        reason = f": {result['reason']}" if result.get("reason") else ""
        state = result.get("state", "revoked")
        run.output.line(f"{resource.noun} {name} is {state}{_cordoned(result)}{reason}")
    if run.output.is_for_programs:
        run.output.document(results if len(results) > 1 else results[0])


def _cordoned(result: dict[str, Any]) -> str:
    return ", cordoned" if result.get("cordoned") else ""


@app.command()
def drain(context: typer.Context, names: Places, why: Why = "") -> None:
    """Take cells out of service: they get no new requests, running requests finish, and other cells replace them.

    For a node: cordon it and drain its cell.

    switchyard drain sim-70b-us-east-1-1 --why "new driver"
    """
    run = session_of(context)
    for name in names:
        resource = place_named(run, name)
        _run_action(run, resource, [name.rpartition("/")[2]], "drain", why)


@app.command()
def cordon(context: typer.Context, names: Nodes, why: Why = "") -> None:
    """Exclude nodes from new placements. Running cells stay."""
    run = session_of(context)
    _run_action(run, run.resource("nodes"), names, "cordon", why)


@app.command()
def uncordon(context: typer.Context, names: Nodes, why: Why = "") -> None:
    """Allow nodes to be used for cells again. This overrides failed checks."""
    run = session_of(context)
    _run_action(run, run.resource("nodes"), names, "uncordon", why)


@app.command("check")
def check(
    context: typer.Context,
    names: Nodes,
    why: Why = "",
    links: Annotated[
        bool, typer.Option("--links", help="Also check the links between the nodes (spares only).")
    ] = False,
) -> None:
    """Check memory, disk and arithmetic of nodes and, with --links, the links between them.

    Results are on the nodes' pages and in `switchyard describe node`. A failed check cordons the node.

    switchyard check n-1a0a1784 n-9f31c2aa --links"""
    run = session_of(context)
    if not links:
        _run_action(run, run.resource("nodes"), names, "check", why)
        return
    first, *others = names
    run.connection.post(f"{path_of('nodes', first)}/check", {"why": why, "with_nodes": others})
    run.output.line(f"check of {', '.join(names)} and their links started")


@app.command()
def reset(context: typer.Context, names: Nodes, why: Why = "") -> None:
    """Reset the accelerators of nodes that are in no cell. Deep checks follow; a node that fails them is replaced."""
    run = session_of(context)
    _run_action(run, run.resource("nodes"), names, "reset", why)


@app.command()
def reboot(context: typer.Context, names: Nodes, why: Why = "") -> None:
    """Reboot the machines of nodes that are in no cell. Deep checks follow; a node that fails them is replaced."""
    run = session_of(context)
    _run_action(run, run.resource("nodes"), names, "reboot", why)


@app.command()
def replace(context: typer.Context, names: Nodes, why: Why = "", yes: Yes = False) -> None:
    """Replace nodes with others and terminate their machines."""
    run = session_of(context)
    run.confirm(f"{', '.join(names)} will be terminated.", wanted=names[0], yes=yes)
    _run_action(run, run.resource("nodes"), names, "replace", why)


@app.command()
def revoke(
    context: typer.Context,
    names: Annotated[list[str], typer.Argument(metavar="NODE|INGRESS|MACHINE…")],
    why: Why = "",
    yes: Yes = False,
) -> None:
    """Revoke nodes, ingresses or machines: their connections are closed within 5 s, and their cells move elsewhere.

    switchyard revoke n-1a0a1784 --why "its disk was stolen"
    """
    run = session_of(context)
    for name in names:
        resource = _agent_named(run, name)
        run.confirm(f"{name} will be rejected everywhere.", wanted=name, yes=yes)
        _run_action(run, resource, [name.rpartition("/")[2]], "revoke", why)


def _agent_named(run: Session, name: str) -> Resource:
    """Returns the kind of object from the prefix of its name or from `ingress/…`. Raises Failure if it is not a node,
    an ingress or a machine."""
    kind, slash, _ = name.partition("/")
    kind = kind if slash else {"n-": "nodes", "i-": "ingresses", "m-": "machines"}.get(name[:2], "")
    if not kind:
        raise Failure(f"{name!r} is not a node (n-…), an ingress (i-…) or a machine (m-…)", ExitCode.USAGE)
    return run.resource(kind)


@app.command()
def restart(context: typer.Context, names: Cells, why: Why = "", yes: Yes = False) -> None:
    """Restart whole cells. Running requests are interrupted; use `switchyard drain` to let them finish."""
    run = session_of(context)
    run.confirm(f"Running requests on {', '.join(names)} will be interrupted.", wanted=names[0], yes=yes)
    _run_action(run, run.resource("cells"), names, "restart", why)


ROLES = {"p": "prefill", "d": "decode", "m": "mixed"}
"""Letters of roles after a number of cells."""


def wanted_cells(text: str) -> dict[str, Any]:
    """`us-west-2=3`, `us-west-2=2..8` or `us-west-2=1p+3d` in the form of the API. Raises Failure if it has another
    form."""
    region, _, count = text.partition("=")
    least, dots, most = count.partition("..")
    if region and least.isdecimal() and (most.isdecimal() if dots else not most):
        return {"region": region, "cells": {"min": int(least), "max": int(most)} if dots else int(least)}
    if region and (pools := pools_of(count)):
        return {"region": region, "cells": pools}
    rule = "REGION=CELLS, REGION=MIN..MAX or, by role, REGION=1p+3d (prefill, decode; 2m adds 2 mixed cells)"
    raise Failure(f"{text!r} is invalid; use the form {rule}", ExitCode.USAGE)


def pools_of(text: str) -> dict[str, int]:
    """Cells by role from `1p+3d+2m`; empty for another form."""
    parts = text.split("+")
    roles = [ROLES.get(part[-1:], "") for part in parts]
    if len(set(roles)) < len(roles) or not all(roles) or not all(part[:-1].isdecimal() for part in parts):
        return {}
    return {"prefill": 0, "decode": 0, **{role: int(part[:-1]) for role, part in zip(roles, parts, strict=True)}}


@app.command()
def scale(
    context: typer.Context,
    deployment: Annotated[str, typer.Argument(autocompletion=names_of("deployments"))],
    cells: Annotated[list[str], typer.Argument(metavar="REGION=CELLS|MIN..MAX|1p+3d…")],
    on: Annotated[
        str,
        typer.Option(
            "--on",
            metavar="TYPE=CELLS,…",
            help="Cells per instance type: TYPE=CELLS. The planner places the rest. `any` clears the setting.",
        ),
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show only the predicted effect.")] = False,
) -> None:
    """Set the number of cells of a deployment in regions, the range for the autoscaler, or the number per role. Other
    regions stay unchanged. A plain number replaces a range or roles.

    switchyard scale sim-70b us-west-2=3 --dry-run

    switchyard scale sim-70b us-west-2=2..8

    switchyard scale sim-70b us-west-2=1p+3d

    switchyard scale sim-70b us-west-2=4 --on trn1.32xlarge=3,inf2.48xlarge=1"""
    run = session_of(context)
    regions = [wanted_cells(one) for one in cells]
    by_type = {"by_type": {place["region"]: wanted_types(on) for place in regions}} if on else {}
    if dry_run:
        result = run.connection.post("plan", {"scale": {"deployment": deployment, "regions": regions, **by_type}})
        run.show(result, [text for text, _ in forecast_lines(deployment, result)])
        return
    result = run.connection.patch(path_of("deployments", deployment), {"regions": regions, **by_type})
    require_done(result)
    ready = ", ".join(
        f"{place['region']} {place['ready']}/{place['cells']}{_types(place)}" for place in result["regions"]
    )
    run.show(result, [f"deployment {deployment}: {ready} cells ready"])


def wanted_types(text: str) -> dict[str, int]:
    """`trn1.32xlarge=3,inf2.48xlarge=1` as instance type -> cells; `any`: empty. Raises Failure if it has another
    form."""
    if text == "any":
        return {}
    wanted: dict[str, int] = {}
    for part in text.split(","):
        kind, _, count = part.strip().partition("=")
        if not kind or not count.isdecimal() or kind in wanted:
            message = (
                f"--on {text!r}: give TYPE=CELLS once for each type, such as trn1.32xlarge=3,inf2.48xlarge=1, or any"
            )
            raise Failure(message, ExitCode.USAGE)
        wanted[kind] = int(count)
    return wanted


def _types(place: dict[str, Any]) -> str:
    """Cells per instance type, if there are several types."""
    there = place["types"]
    return f" ({', '.join(f'{count} on {kind}' for kind, count in there.items())})" if len(there) > 1 else ""


@app.command()
def evacuate(
    context: typer.Context,
    region: Annotated[str, typer.Argument(autocompletion=names_of("regions"))],
    duration: Annotated[str, typer.Option("--for", help="How long it lasts: 90s, 15m, 2h, 1d.")] = "1h",
    why: Annotated[str, typer.Option(help="Reason, shown while the evacuation lasts.")] = "",
    deployment: Annotated[str, typer.Option("--deployment", "-d", autocompletion=names_of("deployments"))] = "",
    drill: Annotated[
        bool, typer.Option("--drill", help="Move load in steps, and only load that fits in other regions.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show only the predicted effect.")] = False,
    end: Annotated[bool, typer.Option("--end", help="End the region's evacuation.")] = False,
    yes: Yes = False,
) -> None:
    """Move a region's requests to other regions until the evacuation expires.

    Shows which regions would receive them, and asks for the region's name.

    switchyard evacuate us-east-1 --for 2h --why "power maintenance"
    """
    run = session_of(context)
    if end:
        _end_evacuation(run, region, deployment, why)
        return
    order = {
        "region": region,
        "mode": "drill" if drill else "real",
        "deployment": deployment,
        "duration_s": seconds(duration),
        "why": why or "requested on the command line",
    }
    effects = run.connection.post("traffic/evacuations/preview", order)
    if dry_run:
        run.show(effects, [])
    for text, tone in effect_lines(effects):
        run.output.toned(text, tone)
    if dry_run:
        return
    run.confirm(f"Requests of {region} will move to other regions for {duration}.", wanted=region, yes=yes)
    _start_evacuation(run, order)


def _start_evacuation(run: Session, order: dict[str, Any]) -> None:
    result = run.connection.post("traffic/evacuations", {**order, "confirm": order["region"]})
    require_done(result)
    run.show(result, [f"evacuation {result['id']} of {order['region']} lasts until {result['expires_at']}"])


def require_done(result: dict[str, Any]) -> None:
    """Returns if the action was done. Raises Failure if it needs an approval."""
    if "summary" in result:
        message = f"a second admin must approve: switchyard approve {result['id']}"
        raise Failure(message, ExitCode.WAITS_FOR_APPROVAL, document=result)


def _end_evacuation(run: Session, region: str, deployment: str, why: str) -> None:
    filters = {"region": region, "ended": "false", **({"deployment": deployment} if deployment else {})}
    orders = [order for order in run.connection.pages("traffic/evacuations", filters) if order["active"]]
    if not orders:
        raise Failure(f"{region} has no active evacuation", ExitCode.NOT_FOUND)
    ended = [run.connection.post(f"traffic/overrides/{order['id']}/end", {"why": why}) for order in orders]
    run.show(ended, [f"evacuation {order['id']} of {region} has ended; requests return in steps" for order in ended])


@app.command()
def dismiss(context: typer.Context, incident: int, why: Why = "") -> None:
    """Close an incident that needs no healing."""
    run = session_of(context)
    result = run.connection.post(f"incidents/{incident}/dismiss", {"why": why})
    run.show(result, [f"incident {incident} is {result['state']}: {result['resolution']}"])


@app.command()
def approve(context: typer.Context, approval: int) -> None:
    """Approve an action that another user requested. It runs immediately."""
    run = session_of(context)
    result = run.connection.post(f"approvals/{approval}/approve")
    run.show(result, [f"approval {approval} is {result['state']}: {result['outcome']}"])


@app.command()
def reject(context: typer.Context, approval: int, why: Why = "") -> None:
    """Reject a requested action, or withdraw your own request."""
    run = session_of(context)
    result = run.connection.post(f"approvals/{approval}/reject", {"why": why})
    run.show(result, [f"approval {approval} is {result['state']}"])


@quota.command()
def assign(
    context: typer.Context,
    deployment: Annotated[str, typer.Argument(autocompletion=names_of("deployments"))],
    team: Annotated[str | None, typer.Option(help="Team whose quota applies; empty: none.")] = None,
    priority: Annotated[int | None, typer.Option(min=0, max=9, help="A higher priority gets machines first.")] = None,
    preemptible: Annotated[
        bool | None, typer.Option(help="Whether higher priorities may take its cells below the start of its range.")
    ] = None,
    preempts: Annotated[
        str | None, typer.Option(help="Cells for which it preempts lower priorities: min, need or nothing.")
    ] = None,
) -> None:
    """Set the team of a deployment, and its priority when machines are short. Omitted options stay unchanged.

    switchyard quota assign sim-70b --team search --priority 7"""
    run = session_of(context)
    stated = {"team": team, "priority": priority, "preemptible": preemptible, "preempts": preempts}
    body: dict[str, Any] = {name: value for name, value in stated.items() if value is not None}
    result = run.connection.patch(path_of("deployments", deployment), body)
    priority_text = "from its serving class" if result["priority"] is None else f"priority {result['priority']}"
    run.show(result, [f"deployment {deployment}: team {result['team'] or 'none'}, {priority_text}"])
