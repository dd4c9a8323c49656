"""What the shell offers after a tab: kinds, and the names of things, fetched from the server once and briefly. A server
that does not answer offers nothing, and never an error."""

from collections.abc import Callable

import typer

from controlplane.cli.resources import RESOURCES, Resource
from controlplane.cli.server_target import ConnectionOptions
from controlplane.cli.session import Session, resource_named

WITHIN_S = 1.5
MOST = 500

Complete = Callable[[typer.Context, str], list[str]]


def kinds(incomplete: str) -> list[str]:
    """Names of resources."""
    return [one.name for one in RESOURCES if one.name.startswith(incomplete)]


def names_of(kind: str) -> Complete:
    """Names of the things of one kind."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        return _names(ctx, resource_named(kind), incomplete)

    return complete


def names_of_kind(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of the things of the kind that was typed before."""
    kind = str(ctx.params.get("kind") or "")
    return _names(ctx, resource_named(kind), incomplete) if kind else []


def names_of_places(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of cells and nodes."""
    return [name for kind in ("cells", "nodes") for name in _names(ctx, resource_named(kind), incomplete)]


def _names(ctx: typer.Context, resource: Resource, incomplete: str) -> list[str]:
    params = ctx.find_root().params
    options = ConnectionOptions(
        str(params.get("server") or ""), str(params.get("token") or ""), str(params.get("profile") or "")
    )
    run = Session(options=options, timeout_s=WITHIN_S)
    try:
        rows = list(run.connect(run.target, tries=1).pages(resource.path, most=MOST))
    except Exception:
        return []
    return [name for row in rows if (name := str(row.get(resource.key, ""))).startswith(incomplete)]
