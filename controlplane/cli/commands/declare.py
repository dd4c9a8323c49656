"""Declarative documents: plan, diff, export and, after confirmation, apply."""

from typing import Annotated, Any

import typer

from controlplane.cli.completion import kinds, names_of, names_of_kind
from controlplane.cli.documents import DESCRIBED, Written, document_of, read_documents
from controlplane.cli.errors import Failure, Problem
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.output import Format, as_yaml
from controlplane.cli.plans import diff_lines, plan_lines, sum_line
from controlplane.cli.resources import text_of
from controlplane.cli.session import Session, path_of, session_of

app = typer.Typer()

SHIPPED = "shipped"
"""The origin of instance types that come with the product."""
Files = Annotated[
    list[str], typer.Option("-f", "--filename", help="A file, a folder, or - for standard input; may be repeated.")
]


@app.command()
def plan(context: typer.Context, filename: Files) -> None:
    """Show what applying documents would change, with predicted effects. Changes nothing.

    switchyard plan -f fleet.yaml"""
    run = session_of(context)
    _show(run, _planned(run, read_documents(filename)))


@app.command()
def apply(
    context: typer.Context,
    filename: Files,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan only.")] = False,
    why: Annotated[str, typer.Option(help="Reason, shown in the timeline.")] = "",
) -> None:
    """Apply documents: shows the plan, asks for confirmation, and applies all changes or none.

    Fields and objects that are not in the documents stay unchanged.

    switchyard apply -f fleet.yaml --yes"""
    run, written = session_of(context), read_documents(filename)
    planned = _planned(run, written)
    if dry_run or not planned["steps"]:
        _show(run, planned)
        return
    if not yes or not run.output.is_for_programs:
        _show(run, planned)
    run.confirm(f"{sum_line(planned)}.", wanted="yes", yes=yes)
    body = {"documents": written.documents, "revision": planned["revision"], "why": why}
    done = _send_documents(run, "apply", body, written)
    run.show(done, [sum_line(done)])
    if done["waiting"]:
        raise _waits(done)


def _waits(done: dict[str, Any]) -> Failure:
    lines = tuple(f"switchyard approve {one['approval']}: {one['summary']}" for one in done["waiting"])
    return Failure("some changes wait for two-person approval", ExitCode.WAITS_FOR_APPROVAL, lines=lines, document=done)


@app.command()
def export(
    context: typer.Context,
    kind: Annotated[str, typer.Argument(help="Only this kind.", autocompletion=kinds)] = "",
    names: Annotated[list[str] | None, typer.Argument(autocompletion=names_of_kind)] = None,
) -> None:
    """Print existing objects as documents. Applying them changes nothing. Instance types with their shipped values are
    printed only by name.

    switchyard export > fleet.yaml
    switchyard export deployments sim-70b"""
    run = session_of(context)
    chosen = run.resource(kind).name if kind else ""
    if chosen and chosen not in DESCRIBED:
        raise Failure(f"documents do not describe {chosen}; they describe {', '.join(DESCRIBED)}", ExitCode.USAGE)
    documents = []
    for resource in [run.resource(chosen)] if chosen else [run.resource(name) for name in DESCRIBED]:
        rows = (
            [run.connection.get(path_of(resource.path, name)) for name in names]
            if names
            else [row for row in run.connection.pages(resource.path) if row.get("origin") != SHIPPED]
        )
        documents += [document_of(resource.name, str(row[resource.key]), row) for row in rows]
    if run.output.form is Format.JSON:
        run.output.document(documents)
        return
    run.output.plain("---\n".join(as_yaml(document) for document in documents).rstrip())


@app.command()
def diff(
    context: typer.Context,
    versions: Annotated[
        list[str] | None,
        typer.Argument(help="Compare two model versions instead.", autocompletion=names_of("model-versions")),
    ] = None,
    filename: Annotated[
        list[str] | None,
        typer.Option("-f", "--filename", help="A file, a folder, or - for standard input; may be repeated."),
    ] = None,
) -> None:
    """Show differences between documents and the fleet, or between two model versions. Exit status 1 if there are any.

    switchyard diff -f fleet.yaml
    switchyard diff sim-70b@1 sim-70b@2"""
    run = session_of(context)
    if bool(filename) == bool(versions) or (versions and len(versions) != 2):
        raise Failure("give documents with -f, or two model versions", ExitCode.USAGE)
    if versions:
        _diff_versions(run, *versions)
        return
    planned = _planned(run, read_documents(filename or []))
    if run.output.is_for_programs:
        run.output.document(planned["steps"])
    for text, tone in diff_lines(planned):
        run.output.toned(text, tone)
    if planned["steps"]:
        raise typer.Exit(ExitCode.DIFFERS)


def _diff_versions(run: Session, before: str, after: str) -> None:
    difference = run.connection.get(f"model-versions/{after}/diff", {"against": before})
    if run.output.is_for_programs:
        run.output.document(difference)
    lines = [("", line) for line in difference["fields"]]
    lines += [
        (f"{kind['instance_type']}: ", line)
        for kind in difference["instance_types"]
        for line in (*kind["degrees"], *kind["arguments"])
    ]
    for where, line in lines:
        if line["change"] != "same" and line["before"] != line["after"]:
            run.output.toned(f"- {where}{line['name']}: {text_of(line['before'])}", "bad")
            run.output.toned(f"+ {where}{line['name']}: {text_of(line['after'])}", "ok")
    if not difference["same"]:
        raise typer.Exit(ExitCode.DIFFERS)


def _planned(run: Session, written: Written) -> dict[str, Any]:
    return _send_documents(run, "apply/preview", {"documents": written.documents}, written)


def _send_documents(run: Session, path: str, body: dict[str, Any], written: Written) -> dict[str, Any]:
    """The server's response; errors are printed with the lines of the files."""
    try:
        response: dict[str, Any] = run.connection.post(path, body)
    except Problem as problem:
        raise Problem(problem.status, problem.document, dict(written.places)) from None
    return response


def _show(run: Session, planned: dict[str, Any]) -> None:
    if run.output.is_for_programs:
        run.output.document(planned)
    for text, tone in plan_lines(planned):
        run.output.toned(text, tone)
