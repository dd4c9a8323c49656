"""`switchyard create KIND …` and `switchyard delete KIND NAME…`: create and delete any object that the API allows, one
request each. Arguments and options of `create` are the fields of the request in the server's OpenAPI document."""

import inspect
import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from controlplane.cli.commands.act import Yes, require_done
from controlplane.cli.commands.show import pairs
from controlplane.cli.completion import kinds, names_of, names_of_kind, run_of
from controlplane.cli.errors import Failure
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.output import Format
from controlplane.cli.resources import Field, Resource
from controlplane.cli.session import Session, path_of, session_of

TYPES: dict[str, type] = {"integer": int, "number": float, "boolean": bool}
"""JSON type of a field -> type of its argument; others are texts."""

CHOICES: Any = StrEnum
"""Makes the type of a field with choices, which are known only at run time."""


class Kinds(TyperGroup):
    """One command for each kind that can be created."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(one.noun for one in run_of(ctx).resources if one.fields)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        resource = run_of(ctx).resource(cmd_name)
        if not resource.fields:
            raise Failure(
                f"{resource.name} cannot be created; `switchyard create` lists the kinds that can", ExitCode.USAGE
            )
        return command_of(resource, {one.noun: one.name for one in run_of(ctx).resources})


app = typer.Typer()
create = typer.Typer(
    cls=Kinds,
    no_args_is_help=True,
    help="Create an object: required fields are arguments, others options. @FILE is replaced by the file's content.",
)
app.add_typer(create, name="create")


def command_of(resource: Resource, nouns: dict[str, str]) -> Any:
    """The command that creates one. `nouns`: plural -> singular name of a resource, to complete such fields."""

    def call(context: typer.Context, **given: Any) -> None:
        create_row(session_of(context), resource, given)

    parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for field in sorted(resource.fields, key=lambda one: not one.required):
        default = inspect.Parameter.empty if field.required else None
        annotation = _annotation(field, nouns)
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(field.name, kind, default=default, annotation=annotation))
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # read by typer
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    alone = typer.Typer(rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})
    alone.command(resource.noun, help=f"{resource.summary}.")(call)
    return typer.main.get_command(alone)


def _annotation(field: Field, nouns: dict[str, str]) -> Any:
    """Required scalars are arguments, other fields are options."""
    usual = f" (default: {field.default})" if field.default not in (None, "", [], {}) else ""
    more: dict[str, Any] = {"help": f"{field.help}{usual}"}
    of: Any = TYPES.get(field.kind, str)
    if field.choices:
        of = CHOICES(field.name, [(choice, choice) for choice in field.choices])
    if field.kind == "object":
        more["metavar"] = "JSON" if field.many else "NAME=VALUE"
    if field.name in nouns:
        more["autocompletion"] = names_of(nouns[field.name])
    if field.many or field.kind == "object":
        return Annotated[list[of] if field.required else list[of] | None, typer.Option(**more)]
    if field.required:
        return Annotated[of, typer.Argument(**{"metavar": field.name.upper(), **more})]
    return Annotated[of | None, typer.Option(**more)]


def create_row(run: Session, resource: Resource, given: dict[str, Any]) -> None:
    """Send one request and print the result. A secret is printed alone, so that programs can read it."""
    known = {field.name: field for field in resource.fields}
    body = {name: _value(known[name], value) for name, value in given.items() if value not in (None, [], ())}
    row = run.connection.post(resource.path, body)
    require_done(row)
    name, secrets = row.get(resource.key), [row[name] for name in resource.secrets if row.get(name)]
    if run.output.is_for_programs:
        run.output.document(row)
    elif run.output.form is Format.NAME:
        run.output.plain(str(name))
    else:
        for secret in secrets:
            run.output.plain("\n".join(secret) if isinstance(secret, list) else str(secret))
        (run.output.note if secrets else run.output.plain)(f"{resource.noun} {name} is created")


def _value(field: Field, value: Any) -> Any:
    if field.kind == "object":
        return [_json(one) for one in value] if field.many else _object(value)
    if field.many:
        return [_value_of(one) for one in value]
    return _value_of(value)


def _value_of(value: Any) -> Any:
    return _content(value) if isinstance(value, str) else value


def _object(given: list[str]) -> Any:
    """One JSON object, or `name=value` texts whose values are JSON, else strings."""
    if len(given) == 1 and given[0][:1] in {"{", "@"}:
        return _json(given[0])
    return {name: json_or_text(value) for name, value in pairs(given).items()}


def json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _json(text: str) -> Any:
    try:
        return json.loads(_content(text))
    except ValueError:
        raise Failure(f"{text!r} is not JSON", ExitCode.USAGE) from None


def _content(text: str) -> str:
    """A value, or the content of the file that it names."""
    if not text.startswith("@"):
        return str(text)
    try:
        return Path(text[1:]).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"cannot read {text[1:]}: {getattr(error, 'strerror', None) or error}", ExitCode.USAGE) from None


@app.command()
def delete(
    context: typer.Context,
    kind: Annotated[str, typer.Argument(help="Kind, such as region, group or rate.", autocompletion=kinds)],
    names: Annotated[list[str], typer.Argument(metavar="NAME…", autocompletion=names_of_kind)],
    yes: Yes = False,
) -> None:
    """Delete objects permanently. The server rejects the deletion of an object in use and names its users.

    switchyard delete region us-east-1"""
    run = session_of(context)
    resource = run.resource(kind)
    noun = resource.noun
    paths = {name: path_of(resource.path, name) for name in names}
    for path in paths.values():
        run.connection.get(path)  # checks all names before anything is deleted
    run.confirm(
        f"Delete {noun} {', '.join(names)} permanently?", wanted=names[0] if len(names) == 1 else "yes", yes=yes
    )
    gone = []
    for name, path in paths.items():
        was = run.connection.delete(path)
        require_done(was)
        gone.append(was)
        run.output.line(f"{noun} {name} is deleted")
    if run.output.is_for_programs:
        run.output.document(gone if len(gone) > 1 else gone[0])
