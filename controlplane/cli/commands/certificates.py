"""Certificates that ingresses show to applications: set one, or its next one, list them, remove one. A key is read from
its file and shown nowhere."""

from pathlib import Path
from typing import Annotated, Any

import typer

from controlplane.cli.commands.act import Yes
from controlplane.cli.completion import names_of
from controlplane.cli.errors import Failure
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.resources import text_of
from controlplane.cli.session import path_of, resource_named, session_of

app = typer.Typer()
certificate = typer.Typer(help="Certificates for applications: set, list, show, remove.", no_args_is_help=True)
app.add_typer(certificate, name="certificate")

LONGEST_FILE = 64 * 1024
Name = Annotated[str, typer.Argument(metavar="NAME", autocompletion=names_of("certificates"))]


@certificate.command("set")
def set_certificate(
    context: typer.Context,
    name: Name,
    chain: Annotated[Path, typer.Option("--certificate", help="PEM: the certificate, then who signed it, in order.")],
    key: Annotated[Path, typer.Option("--key", help="PEM: its private key, without a passphrase.")],
    region: Annotated[str, typer.Option(help="Only there; else everywhere.", autocompletion=names_of("regions"))] = "",
) -> None:
    """Have ingresses show a certificate, by the hosts that it names. Set the next one by the same name: no stream ends.

    switchyard certificate set api --certificate fullchain.pem --key privkey.pem
    """
    run = session_of(context)
    body = {"name": name, "region": region, "certificate": _text(chain), "private_key": _text(key)}
    shown = run.connection.post("certificates", body)
    run.show(shown, [f"certificate {name}: {', '.join(shown['names'])}, until {shown['not_after']}"])


@certificate.command("list")
def list_certificates(
    context: typer.Context, region: Annotated[str, typer.Option(autocompletion=names_of("regions"))] = ""
) -> None:
    """List the certificates, and when they end."""
    empty = "There are no certificates; `switchyard certificate set` sets one."
    filters = {"region": region} if region else {}
    session_of(context).show_all(resource_named("certificates"), filters, empty=empty)


@certificate.command("show")
def show_certificate(context: typer.Context, name: Name) -> None:
    """Show a certificate: its hosts, its issuer, when it ends. Never its key."""
    run = session_of(context)
    row: dict[str, Any] = run.connection.get(path_of(resource_named("certificates"), name))
    run.show(row, [f"{field}: {text_of(value)}" for field, value in row.items()])


@certificate.command("remove")
def remove_certificate(context: typer.Context, name: Name, yes: Yes = False) -> None:
    """Have ingresses show a certificate no longer; its key is forgotten."""
    run = session_of(context)
    run.confirm(f"new connections to the hosts of {name} get another certificate, or none.", wanted=name, yes=yes)
    run.connection.post(f"{path_of(resource_named('certificates'), name)}/remove")
    run.show({"name": name, "removed": True}, [f"certificate {name} is removed"])


def _text(path: Path) -> str:
    """The content of a file, less what no PEM is.

    Raises:
        Failure: it cannot be read, is too long, or is no text.
    """
    try:
        with path.open("rb") as file:
            content = file.read(LONGEST_FILE + 1)
    except OSError as error:
        raise Failure(f"{path} cannot be read: {error.strerror}", ExitCode.USAGE) from None
    if len(content) > LONGEST_FILE or not content.isascii():
        raise Failure(f"{path} is no PEM: that is plain text of some kilobytes", ExitCode.USAGE)
    return content.decode("ascii")
