"""Shell completion: kinds and names of objects, fetched with a short timeout. It never prints an error."""

from collections.abc import Callable

import typer

from controlplane.cli.server_target import ConnectionOptions
from controlplane.cli.session import Session

WITHIN_S = 1.5
MOST = 500

Complete = Callable[[typer.Context, str], list[str]]


def kinds(ctx: typer.Context, incomplete: str) -> list[str]:
    try:
        return [one.name for one in run_of(ctx).resources if one.name.startswith(incomplete)]
    except Exception:
        return []


def names_of(kind: str) -> Complete:
    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        return _names(ctx, kind, incomplete)

    return complete


def names_of_kind(ctx: typer.Context, incomplete: str) -> list[str]:
    kind = str(ctx.params.get("kind") or "")
    return _names(ctx, kind, incomplete) if kind else []


def names_of_places(ctx: typer.Context, incomplete: str) -> list[str]:
    return [name for kind in ("cells", "nodes") for name in _names(ctx, kind, incomplete)]


def run_of(ctx: typer.Context) -> Session:
    """The session of a command; during completion, one with a short timeout."""
    if isinstance(given := ctx.find_root().obj, Session):
        return given
    params = ctx.find_root().params
    options = ConnectionOptions(
        str(params.get("server") or ""), str(params.get("token") or ""), str(params.get("profile") or "")
    )
    return Session(options=options, timeout_s=WITHIN_S)


def _names(ctx: typer.Context, kind: str, incomplete: str) -> list[str]:
    try:
        run = run_of(ctx)
        resource = run.resource(kind)
        rows = list(run.connect(run.target, tries=1).pages(resource.path, most=MOST))
    except Exception:
        return []
    return [name for row in rows if (name := str(row.get(resource.key, ""))).startswith(incomplete)]
