"""Regions: create one. Those in a cloud are read from a stack, for which nobody waits here."""

from typing import Annotated

import typer

from controlplane.cli.session import session_of

app = typer.Typer()
region = typer.Typer(help="Regions: create one.", no_args_is_help=True)
app.add_typer(region, name="region")


@region.callback()
def about() -> None:
    """Without this, the only command would stand for the group."""


@region.command()
def create(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Such as us-east-1.")],
    provider: Annotated[str, typer.Option(help="Who launches machines there: local, machines, aws.")] = "local",
    stack: Annotated[str, typer.Option(help="Of provider aws: the stack made from deploy/aws/region.yaml.")] = "",
    aws_region: Annotated[str, typer.Option(help="Of provider aws: where the stack is, if NAME is another.")] = "",
    position: Annotated[int, typer.Option(min=0, help="Orders regions.")] = 0,
) -> None:
    """Create a region. One of provider aws is usable once its stack is read: see `switchyard get region NAME`.

    switchyard region create us-east-1 --provider aws --stack switchyard-us-east-1
    """
    run = session_of(context)
    body = {
        "name": name,
        "provider": provider,
        "position": position,
        **({"stack": stack} if stack else {}),
        **({"aws_region": aws_region} if aws_region else {}),
    }
    created = run.connection.post("regions", body)
    cloud = created.get("cloud")
    run.show(created, [f"region {name} is {cloud['state'] if cloud else 'created'}"])
    if cloud:
        run.output.note(
            f"its stack {cloud['stack']} is read within a minute; then it is ready, or refused with a reason"
        )
