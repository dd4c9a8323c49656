"""Grants of tenants (hosts, places in S3), and webhooks that notify them of their batches."""

from enum import StrEnum
from typing import Annotated

import typer

from controlplane.cli.commands.act import Yes
from controlplane.cli.session import path_of, resource_named, session_of

app = typer.Typer()
grant = typer.Typer(
    help="Hosts and places in S3 that a tenant may use; the list: switchyard get tenant-grants.", no_args_is_help=True
)
webhook = typer.Typer(help="Addresses of tenants that are told of their batches.", no_args_is_help=True)
app.add_typer(grant, name="tenant-grant")
app.add_typer(webhook, name="tenant-webhook")

Tenant = Annotated[str, typer.Option("--tenant", help="Of this tenant alone.")]
Id = Annotated[int, typer.Argument(metavar="ID", min=1)]
NO_WEBHOOK = "No tenant is told of its batches; `switchyard tenant-webhook add TENANT https://…` adds an address."


class Use(StrEnum):
    CALLBACK = "callback"
    READ = "read"
    WRITE = "write"


@grant.command("add")
def add_grant(
    context: typer.Context,
    tenant: Annotated[str, typer.Argument(help="As its keys name it; '' for what comes without a key.")],
    use: Annotated[Use, typer.Argument(help="callback: of a host; read, write: batches' input and results in S3.")],
    target: Annotated[str, typer.Argument(help="app.example.com, or s3://bucket/prefix: everything below it.")],
    region: Annotated[str, typer.Option(help="Of the bucket; else AWS_REGION of the control plane.")] = "",
) -> None:
    """Let callbacks of a tenant go to a host, or its batches read or write a place in S3.

    switchyard tenant-grant add acme write s3://acme-batches/out
    """
    run = session_of(context)
    body = {"tenant": tenant, "use": use.value, "target": target, "region": region}
    row = run.connection.post("tenant-grants", body)
    run.show(row, [f"{row['id']}: {tenant or 'without a key'} {row['use']} {row['target']}"])


@webhook.command("list")
def list_webhooks(context: typer.Context, tenant: Tenant = "") -> None:
    """Show which addresses are told of tenants' batches.

    switchyard tenant-webhook list
    """
    run = session_of(context)
    known = resource_named("tenant-webhooks")
    rows = list(run.connection.pages(known.path, {"tenant": tenant} if tenant else {}))
    run.output.rows(known.columns, rows, empty=NO_WEBHOOK)


@webhook.command("add")
def add_webhook(
    context: typer.Context,
    tenant: Annotated[str, typer.Argument(help="As its keys name it; '' for batches without a key.")],
    url: Annotated[str, typer.Argument(help="At a host that the tenant has a callback grant for.")],
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
    run = session_of(context)
    run.confirm("What waits to be sent there is given up.", wanted=str(id), yes=yes)
    row = run.connection.delete(path_of(resource_named("tenant-webhooks"), str(id)))
    run.show(row, [f"{row['url']} is told of batches of {row['tenant'] or 'nobody'} no more"])
