"""Creates regions and sets their capacity pools. The stack of a cloud region is read in the background."""

from enum import StrEnum
from typing import Annotated, Any

import typer

from controlplane.cli.commands.act import Why
from controlplane.cli.completion import names_of
from controlplane.cli.session import Session, path_of, session_of

app = typer.Typer()
region = typer.Typer(help="Create a region, list its capacity pools.", no_args_is_help=True)
pool = typer.Typer(help="Change a capacity pool: add, enable, disable, reorder or remove it.", no_args_is_help=True)
app.add_typer(region, name="region")
app.add_typer(pool, name="pool")

Pool = Annotated[int, typer.Argument(help="ID in `switchyard region pools`.")]


class Declarable(StrEnum):
    SPOT = "spot"
    OPEN = "open"


@region.command()
def create(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Region name, such as us-east-1.")],
    provider: Annotated[str, typer.Option(help="Source of its machines: local, machines, aws.")] = "local",
    stack: Annotated[str, typer.Option(help="For provider aws: the stack made from deploy/aws/region.yaml.")] = "",
    aws_region: Annotated[str, typer.Option(help="For provider aws: the AWS region, if it differs from NAME.")] = "",
    position: Annotated[int, typer.Option(min=0, help="Position of the region in lists.")] = 0,
) -> None:
    """Create a region. A region of provider aws is ready once its stack has been read: see `switchyard get region
    NAME`.

    switchyard region create us-east-1 --provider aws --stack switchyard-us-east-1"""
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
            f"its stack {cloud['stack']} is read within a minute; then it is ready, or failed with a reason"
        )


@region.command()
def pools(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="REGION", autocompletion=names_of("regions"))],
    instance_type: Annotated[str, typer.Option("--type", help="Only this instance type.")] = "",
    market: Annotated[str, typer.Option(help="Only this market.")] = "",
    state: Annotated[str, typer.Option(help="usable, resting, full, ended or off.")] = "",
) -> None:
    """List the capacity pools of a region, in launch order. FROM: the region's stack, or the person who added the pool.

    switchyard region pools us-east-1 --type trn1.32xlarge"""
    run = session_of(context)
    wanted = {"region": name, "instance_type": instance_type, "market": market, "state": state}
    filters = {key: value for key, value in wanted.items() if value}
    resource = run.resource("capacity-pools")
    rows = sorted(run.connection.pages(resource.path, filters), key=lambda row: (row["instance_type"], row["position"]))
    if run.output.is_for_programs:
        run.output.document(rows)
        return
    empty = f"{name} has no such pool; for provider aws the region's stack defines them."
    run.output.rows(resource.columns, rows, empty=empty)


@pool.command()
def add(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="REGION", autocompletion=names_of("regions"))],
    instance_type: Annotated[str, typer.Argument(metavar="TYPE", autocompletion=names_of("instance-types"))],
    zone: Annotated[str, typer.Argument(help="Availability zone, such as us-east-1a.")],
    market: Annotated[Declarable, typer.Option(help="open: matching open reservations.")] = Declarable.SPOT,
    max_price: Annotated[
        float | None, typer.Option(help="Maximum spot price in $/h. Default: the on-demand price.")
    ] = None,
    position: Annotated[int | None, typer.Option(min=0, help="Launch order, from 0. Default: last.")] = None,
    why: Why = "",
) -> None:
    """Add a pool that the region's stack does not define.

    switchyard pool add us-east-1 trn1.32xlarge us-east-1a --max-price 9.50"""
    run = session_of(context)
    body: dict[str, Any] = {"region": name, "instance_type": instance_type, "zone": zone, "market": market.value}
    body |= {} if max_price is None else {"max_price": max_price}
    body |= {} if position is None else {"position": position}
    _show(run, run.connection.post("capacity-pools", {**body, "why": why}))


@pool.command()
def enable(context: typer.Context, pool_id: Pool, why: Why = "") -> None:
    """Enable launches from a pool."""
    _change(context, pool_id, {"enabled": True, "why": why})


@pool.command()
def disable(context: typer.Context, pool_id: Pool, why: Why = "") -> None:
    """Disable launches from a pool. Running machines stay."""
    _change(context, pool_id, {"enabled": False, "why": why})


@pool.command()
def move(
    context: typer.Context,
    pool_id: Pool,
    position: Annotated[int, typer.Argument(min=0, help="Launch order among pools of its type, from 0.")],
    why: Why = "",
) -> None:
    """Change the launch order of a pool among those of its type."""
    _change(context, pool_id, {"position": position, "why": why})


@pool.command()
def price(
    context: typer.Context,
    pool_id: Pool,
    max_price: Annotated[
        float | None, typer.Argument(help="Maximum price per machine in $/h. Default: the on-demand price.")
    ] = None,
    why: Why = "",
) -> None:
    """Set the maximum price of a spot pool."""
    _change(context, pool_id, {"max_price": max_price, "why": why})


@pool.command()
def resume(context: typer.Context, pool_id: Pool, why: Why = "") -> None:
    """Retry a resting pool now."""
    run = session_of(context)
    _show(run, run.connection.post(f"{_path(pool_id)}/resume", {"why": why}))


@pool.command()
def remove(context: typer.Context, pool_id: Pool, why: Why = "") -> None:
    """Remove a pool that a person added. Its machines stay."""
    run = session_of(context)
    gone = run.connection.post(f"{_path(pool_id)}/remove", {"why": why})
    run.show(gone, [f"{_name(gone)} is removed"])


def _change(context: typer.Context, pool_id: int, body: dict[str, Any]) -> None:
    run = session_of(context)
    _show(run, run.connection.patch(_path(pool_id), body))


def _path(pool_id: int) -> str:
    return path_of("capacity-pools", str(pool_id))


def _name(row: dict[str, Any]) -> str:
    return f"pool {row['id']}, {row['instance_type']} {row['market']} in {row['zone']},"


def _show(run: Session, row: dict[str, Any]) -> None:
    run.show(row, [f"{_name(row)} is {row['state']}, position {row['position']}"])
