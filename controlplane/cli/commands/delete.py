"""`switchyard delete KIND NAME…`: removes whatever the API can remove, one request each."""

from typing import Annotated

import typer

from controlplane.cli.commands.act import Yes, require_done
from controlplane.cli.completion import kinds, names_of_kind
from controlplane.cli.session import path_of, resource_named, session_of

app = typer.Typer()


@app.command()
def delete(
    context: typer.Context,
    kind: Annotated[str, typer.Argument(help="Such as region, group or rate.", autocompletion=kinds)],
    names: Annotated[list[str], typer.Argument(metavar="NAME…", autocompletion=names_of_kind)],
    yes: Yes = False,
) -> None:
    """Remove things for good. What is in use is refused, and the refusal names what uses it.

    switchyard delete region us-east-1
    """
    run = session_of(context)
    resource = resource_named(kind)
    noun = resource.names[0]
    paths = {name: path_of(resource, name) for name in names}
    for path in paths.values():
        run.connection.get(path)  # nothing is asked or removed where one of them does not exist
    run.confirm(f"Delete {noun} {', '.join(names)} for good?", wanted=names[0] if len(names) == 1 else "yes", yes=yes)
    gone = []
    for name, path in paths.items():
        was = run.connection.delete(path)
        require_done(was)
        gone.append(was)
        run.output.line(f"{noun} {name} is deleted")
    if run.output.is_for_programs:
        run.output.document(gone if len(gone) > 1 else gone[0])
