"""Machine images in a cloud: the images of a region, and moves to other ones."""

from typing import Annotated, Any

import typer

from controlplane.cli.commands.act import Why
from controlplane.cli.commands.regions import region
from controlplane.cli.completion import names_of
from controlplane.cli.errors import Failure
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.resources import Column, at
from controlplane.cli.session import Session, path_of, session_of

app = typer.Typer()
image = typer.Typer(help="Move machines to another image, and back.", no_args_is_help=True)
app.add_typer(image, name="image")

OPEN = ("asked", "canary", "rolling", "back")
COLUMNS = (
    Column("TYPE", at("instance_type")),
    Column("IMAGE", at("image")),
    Column("TO", at("move.image")),
    Column("STATE", at("move.state")),
    Column("REASON", at("move.reason")),
    Column("BY", at("move.asked_by")),
)
RegionName = Annotated[str, typer.Argument(metavar="REGION", autocompletion=names_of("regions"))]
Type = Annotated[str, typer.Argument(metavar="TYPE", autocompletion=names_of("instance-types"))]


@region.command("images")
def images(context: typer.Context, name: RegionName) -> None:
    """List the image of each instance type of a region, and the state of its newest move.

    switchyard region images us-east-1"""
    run = session_of(context)
    moves: dict[str, Any] = {}
    for move in run.connection.pages("image-moves", {"region": name}):
        moves.setdefault(move["instance_type"], move)
    found = {
        (pool["instance_type"], pool["image"]) for pool in run.connection.pages("capacity-pools", {"region": name})
    }
    rows = [{"instance_type": kind, "image": of, "move": moves.get(kind)} for kind, of in sorted(found)]
    if run.output.is_for_programs:
        run.output.document(rows)
        return
    run.output.rows(COLUMNS, rows, empty=f"{name} has no capacity pools, and so no images.")


@image.command()
def move(
    context: typer.Context,
    name: RegionName,
    instance_type: Type,
    to: Annotated[str, typer.Argument(metavar="[AMI]", help="AMI. Default: the image of the region's stack.")] = "",
    why: Why = "",
) -> None:
    """Move the machines of an instance type to another image: first one unit, then one spare or cell at a time.

    switchyard image move us-east-1 trn1.32xlarge ami-0f9e8d7c6b5a43210"""
    run = session_of(context)
    body = {"region": name, "instance_type": instance_type, "image": to, "why": why}
    _show(run, run.connection.post("image-moves", body))
    run.output.note(f"it starts once the cloud confirms the image: switchyard region images {name}")


@image.command()
def back(context: typer.Context, name: RegionName, instance_type: Type, why: Why = "") -> None:
    """Reverse the active move of an instance type.

    switchyard image back us-east-1 trn1.32xlarge --why "its driver is slow"
    """
    run = session_of(context)
    resource = run.resource("image-moves")
    moves = run.connection.pages(resource.path, {"region": name, "instance_type": instance_type})
    under_way = next((row for row in moves if row["state"] in OPEN), None)
    if under_way is None:
        raise Failure(f"no active move of {instance_type} in {name}", ExitCode.CONFLICT)
    _show(run, run.connection.post(f"{path_of(resource.path, str(under_way['id']))}/back", {"why": why}))


def _show(run: Session, row: dict[str, Any]) -> None:
    to = row["image"] or "the image of its stack"
    where = f"move {row['id']} of {row['instance_type']} in {row['region']} to {to}"
    run.show(row, [f"{where} is {row['state']}" + (f": {row['reason']}" if row["reason"] else "")])
