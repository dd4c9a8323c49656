"""What tenants' batches may reach: places in S3, and addresses that are told when one of them ends."""

from typing import Annotated, Any

import typer

from controlplane.cli.commands.act import Yes
from controlplane.cli.session import path_of, resource_named, session_of

app = typer.Typer()
grant = typer.Typer(help="Places in S3 that tenants' batches may read and write.", no_args_is_help=True)
webhook = typer.Typer(help="Addresses of tenants that are told of their batches.", no_args_is_help=True)
app.add_typer(grant, name="bucket-grant")
app.add_typer(webhook, name="tenant-webhook")

Tenant = Annotated[str, typer.Option("--tenant", help="Of this tenant alone.")]
Id = Annotated[int, typer.Argument(metavar="ID", min=1)]
NO_PLACE = "No tenant has a place in S3; `switchyard bucket-grant add TENANT s3://bucket/prefix` grants one."
NO_WEBHOOK = "No tenant is told of its batches; `switchyard tenant-webhook add TENANT https://…` adds an address."


@grant.command("list")
def list_grants(context: typer.Context, tenant: Tenant = "") -> None:
    """Show which places in S3 tenants' batches may use.

    switchyard bucket-grant list --tenant acme
    """
    _list(context, "bucket-grants", tenant, NO_PLACE)


@grant.command("add")
def add_grant(
    context: typer.Context,
    tenant: Annotated[str, typer.Argument(help="As its keys name it; '' for batches without a key.")],
    uri: Annotated[str, typer.Argument(help="s3://bucket, s3://bucket/prefix: everything below it.")],
    read: Annotated[bool, typer.Option(help="As a batch's input.")] = True,
    write: Annotated[bool, typer.Option(help="For its results.")] = False,
    region: Annotated[str, typer.Option(help="Of the bucket; else AWS_REGION of the control plane.")] = "",
) -> None:
    """Let a tenant's batches read a place in S3, or write their results there.

    switchyard bucket-grant add acme s3://acme-batches/out --no-read --write
    """
    run = session_of(context)
    body = {"tenant": tenant, "uri": uri, "region": region, "may_read": read, "may_write": write}
    row = run.connection.post("bucket-grants", body)
    may = " and ".join(name for name, holds in (("read", row["may_read"]), ("write", row["may_write"])) if holds)
    run.show(row, [f"{row['id']}: batches of {_whose(row)} may {may} {row['uri']}"])


@grant.command("remove")
def remove_grant(context: typer.Context, id: Id, yes: Yes = False) -> None:
    """Take a place from a tenant. Batches that are under way with results to go there end with an error.

    switchyard bucket-grant remove 3
    """
    row = _remove(context, "bucket-grants", id, "A batch that reads or writes there fails.", yes=yes)
    session_of(context).show(row, [f"batches of {_whose(row)} may use {row['uri']} no more"])


@webhook.command("list")
def list_webhooks(context: typer.Context, tenant: Tenant = "") -> None:
    """Show which addresses are told of tenants' batches.

    switchyard tenant-webhook list
    """
    _list(context, "tenant-webhooks", tenant, NO_WEBHOOK)


@webhook.command("add")
def add_webhook(
    context: typer.Context,
    tenant: Annotated[str, typer.Argument(help="As its keys name it; '' for batches without a key.")],
    url: Annotated[str, typer.Argument(help="At one of the tenant's callback hosts.")],
    event: Annotated[list[str] | None, typer.Option(help="batch.completed, …; several times; else all.")] = None,
) -> None:
    """Tell an address when a tenant's batches end, and show its secret, once.

    switchyard tenant-webhook add acme https://app.acme.example/batches --event batch.completed
    """
    run = session_of(context)
    row = run.connection.post("tenant-webhooks", {"tenant": tenant, "url": url, "events": event or []})
    run.show(row, [f"{row['id']}: {row['url']} is told of {', '.join(row['events']) or 'every end'}", row["secret"]])


@webhook.command("rotate")
def rotate_webhook(
    context: typer.Context,
    id: Id,
    at_once: Annotated[
        bool, typer.Option("--at-once", help="The former secret counts no more; else for a day.")
    ] = False,
) -> None:
    """Give an address another secret, and show it, once.

    switchyard tenant-webhook rotate 4
    """
    run = session_of(context)
    path = f"{path_of(resource_named('tenant-webhooks'), str(id))}/rotate"
    row = run.connection.post(path, {"at_once": at_once})
    until = f", the former one counts until {row['former_until']}" if row["former_until"] else ""
    run.show(row, [f"{row['id']}: {row['url']} has a new secret{until}", row["secret"]])


@webhook.command("remove")
def remove_webhook(context: typer.Context, id: Id, yes: Yes = False) -> None:
    """Tell an address no more.

    switchyard tenant-webhook remove 4
    """
    row = _remove(context, "tenant-webhooks", id, "What waits to be sent there is given up.", yes=yes)
    session_of(context).show(row, [f"{row['url']} is told of batches of {_whose(row)} no more"])


def _list(context: typer.Context, resource: str, tenant: str, empty: str) -> None:
    run = session_of(context)
    known = resource_named(resource)
    rows = list(run.connection.pages(known.path, {"tenant": tenant} if tenant else {}))
    run.output.rows(known.columns, rows, empty=empty)


def _remove(context: typer.Context, resource: str, number: int, effect: str, *, yes: bool) -> dict[str, Any]:
    run = session_of(context)
    run.confirm(effect, wanted=str(number), yes=yes)
    row: dict[str, Any] = run.connection.delete(path_of(resource_named(resource), str(number)))
    return row


def _whose(row: dict[str, Any]) -> str:
    return str(row["tenant"] or "nobody")
