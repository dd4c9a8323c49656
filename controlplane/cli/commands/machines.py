"""Machines: print the command that joins hosts (once), withdraw it, divide or remove a machine."""

from enum import StrEnum
from typing import Annotated, Any

import typer

from controlplane.cli.commands.act import Why, Yes, seconds
from controlplane.cli.completion import names_of
from controlplane.cli.session import path_of, session_of

app = typer.Typer()
machine = typer.Typer(help="Add hosts, divide one into nodes, or remove one.", no_args_is_help=True)
app.add_typer(machine, name="machine")


class Role(StrEnum):
    NODE = "node"
    INGRESS = "ingress"


@machine.command()
def add(
    context: typer.Context,
    region: Annotated[str, typer.Option(help="Region that they join.", autocompletion=names_of("regions"))],
    count: Annotated[int, typer.Option(min=1, help="Number of hosts that may use the command.")] = 1,
    expires: Annotated[str, typer.Option(help="How long the command is valid: 10m, 1h, 2d.")] = "1h",
    role: Annotated[Role, typer.Option(help="Role of the hosts.")] = Role.NODE,
    instance_type: Annotated[
        str,
        typer.Option(
            help="Of each host, or of each node of its layout. Default: detected.",
            autocompletion=names_of("instance-types"),
        ),
    ] = "",
    layout: Annotated[str, typer.Option(help="Divide each host into nodes, as 8x1 or 1x4+2x2.")] = "",
) -> None:
    """Print the command that joins hosts. Run it on each of them, as root or as a user with a home.

    switchyard machine add --region eu-west-1 --count 3 --expires 1h"""
    run = session_of(context)
    body: dict[str, Any] = {
        "region": region,
        "count": count,
        "expires_in_s": seconds(expires),
        "role": role.value,
        "instance_type": instance_type,
        "layout": layout,
    }
    invitation = run.connection.post("machines/invitations", body)
    run.show(invitation, [invitation["line"]])
    for notice in invitation["notices"]:
        run.output.note(notice)
    run.output.note(
        f"for {invitation['count']} x {invitation['role']} in {invitation['region']}, until {invitation['expires_at']}"
    )


@machine.command()
def remove(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="MACHINE", autocompletion=names_of("machines"))],
    why: Why = "",
    yes: Yes = False,
) -> None:
    """Remove a machine: its cell gets another node, then the machine stops, wipes and uninstalls itself."""
    run = session_of(context)
    run.confirm(f"{name} will be emptied, wiped and uninstalled.", wanted=name, yes=yes)
    result = run.connection.post(f"{path_of('machines', name)}/remove", {"why": why})
    run.show(result, [f"machine {name} is {result['state']}: {result['reason']}"])


@machine.command()
def layout(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="MACHINE", autocompletion=names_of("machines"))],
    layout: Annotated[str, typer.Argument(metavar="LAYOUT", help="NODESxDEVICES, as 8x1 or 1x4+2x2; '' for one node.")],
    instance_type: Annotated[
        str, typer.Option(help="Of each node. Default: detected.", autocompletion=names_of("instance-types"))
    ] = "",
    pin: Annotated[bool, typer.Option("--pin", help="Keep it, even if cells wait for nodes of another size.")] = False,
    why: Why = "",
) -> None:
    """Divide the devices of a joined host into nodes, each with its own CPUs, memory share and ports. Its spare nodes
    are retired and wiped first. Without --pin, the layout changes when cells wait for nodes of another size and all of
    the host's nodes are spare.

    switchyard machine layout m-7c1d9e02 4x2"""
    run = session_of(context)
    body = {"layout": layout, "instance_type": instance_type, "pinned": pin, "why": why}
    result = run.connection.post(f"{path_of('machines', name)}/layout", body)
    nodes = [
        f"node {one['number']}: {one['kind']} {','.join(map(str, one['devices']))}, {one['instance_type'] or 'no type'}"
        for one in result["nodes"]
    ]
    pending = f"machine {name} gets layout {layout or 'one node'} when its nodes are wiped"
    run.show(result, [pending] if result["layout"] != layout else nodes or [f"machine {name} is one node"])


@machine.command()
def repaired(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="MACHINE", autocompletion=names_of("machines"))],
    why: Why = "",
) -> None:
    """Return to use what a fault put out of use on a joined host: devices, or the whole machine."""
    run = session_of(context)
    result = run.connection.post(f"{path_of('machines', name)}/repaired", {"why": why})
    run.show(result, [f"machine {name} is in use again"])


@machine.command()
def withdraw(
    context: typer.Context,
    prefix: Annotated[str, typer.Argument(metavar="INVITATION", autocompletion=names_of("invitations"))],
    why: Why = "",
) -> None:
    """Withdraw an invitation, so that no more hosts can join with it. INVITATION: the digits between `sw_` and the
    next `_` in its token."""
    run = session_of(context)
    result = run.connection.post(f"{path_of('machines/invitations', prefix)}/withdraw", {"why": why})
    run.show(result, [f"invitation {prefix} is {result['state']}"])
