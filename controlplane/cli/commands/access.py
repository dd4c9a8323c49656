"""Credentials: log in and out, profiles, API tokens, certificates for applications, webhook secrets. A private key is
read from its file and never displayed."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from controlplane.cli.commands.act import Yes
from controlplane.cli.completion import names_of
from controlplane.cli.errors import Failure
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.profiles import Profile, profiles_file, write_profiles
from controlplane.cli.resources import Column, at
from controlplane.cli.server_target import Target, checked_server
from controlplane.cli.session import Session, path_of, session_of

app = typer.Typer()
token = typer.Typer(help="Revoke API tokens.", no_args_is_help=True)
app.add_typer(token, name="token")
certificate = typer.Typer(help="Set or remove certificates for applications.", no_args_is_help=True)
app.add_typer(certificate, name="certificate")
webhook = typer.Typer(help="Manage webhooks.", no_args_is_help=True)
app.add_typer(webhook, name="webhook")
tenant_webhook = typer.Typer(help="Manage webhooks of tenants' batches.", no_args_is_help=True)
app.add_typer(tenant_webhook, name="tenant-webhook")

LONGEST_FILE = 64 * 1024
Name = Annotated[str, typer.Argument(metavar="NAME", autocompletion=names_of("certificates"))]


@app.command()
def login(
    context: typer.Context,
    server: Annotated[str, typer.Argument(help="Server address. Default: this machine's.")] = "",
    name: Annotated[str, typer.Option("--as", help="Name of the profile.")] = "default",
    token_stdin: Annotated[bool, typer.Option("--token-stdin", help="Read the token from standard input.")] = False,
) -> None:
    """Check a server and a token, and store them as a profile.

    switchyard login https://switchyard.example.com --as production"""
    run = session_of(context)
    where = checked_server(server) if server else run.target.server
    target = Target(where, _token_given(run, where, token_stdin=token_stdin), "login")
    me = run.connect(target).get("me")
    path = profiles_file(run.environ)
    write_profiles(path, run.profiles.with_profile(name, Profile(where, target.token)))
    run.show(me, [f"You are {me['username']} ({me['role']}) on {where}; profile {name} in {path}."])


def _token_given(run: Session, server: str, *, token_stdin: bool) -> str:
    """From standard input, the options, the environment, a prompt, or this machine's own fleet. Raises Failure if there
    is none."""
    if token_stdin:
        return sys.stdin.readline().strip()
    if run.options.token or run.environ.get("SWITCHYARD_TOKEN"):
        return run.options.token or run.environ["SWITCHYARD_TOKEN"]
    if run.target.server == server and run.target.token and not run.target.source.startswith("profile"):
        return run.target.token
    if run.is_interactive:
        from getpass import getpass

        return getpass(f"API token of {server}: ").strip()
    raise Failure("no token given: use --token, --token-stdin or SWITCHYARD_TOKEN", ExitCode.USAGE)


@app.command()
def logout(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Profile to delete. Default: the current one.")] = "",
) -> None:
    """Delete a profile from this machine. Its token stays valid until it is revoked."""
    run = session_of(context)
    gone = name or run.profiles.current
    if gone not in run.profiles.known:
        raise Failure(f"profile {gone!r} does not exist" if gone else "you are not logged in", ExitCode.NOT_FOUND)
    write_profiles(profiles_file(run.environ), run.profiles.without(gone))
    run.output.line(f"profile {gone} is deleted")


@app.command()
def profiles(
    context: typer.Context, use: Annotated[str, typer.Option(help="Make this the active profile.")] = ""
) -> None:
    """List the profiles that `login` stored, or choose one."""
    run = session_of(context)
    kept = run.profiles
    if use:
        if use not in kept.known:
            raise Failure(f"profile {use!r} does not exist", ExitCode.NOT_FOUND)
        kept = kept.with_profile(use, kept.known[use])
        write_profiles(profiles_file(run.environ), kept)
    rows = [{"name": name, "server": one.server, "current": name == kept.current} for name, one in kept.known.items()]
    if run.output.is_for_programs:
        run.output.document(rows)
        return
    columns = [Column("NAME", at("name")), Column("SERVER", at("server")), Column("CURRENT", at("current"))]
    run.output.rows(columns, rows, empty="No profile is stored; `switchyard login` creates one.")


@app.command()
def whoami(context: typer.Context) -> None:
    """Show the server, the user and the role that commands act with."""
    run = session_of(context)
    me: dict[str, Any] = run.connection.get("me")
    by = f"token from {run.target.source}" if run.target.source else "no token"
    grants = "".join(f", {role} of {name}" for name, role in me["grants"].items())
    run.show(me, [f"{me['username']} ({me['role']}{grants}) on {run.target.server}, {by}, scope {me['scope']}"])


@token.command()
def revoke(context: typer.Context, prefix: Annotated[str, typer.Argument(autocompletion=names_of("tokens"))]) -> None:
    """Revoke an API token. It is rejected immediately."""
    run = session_of(context)
    revoked = run.connection.post(f"tokens/{prefix}/revoke")
    run.show(revoked, [f"token {prefix} is {revoked['state']}"])


@certificate.command("set")
def set_certificate(
    context: typer.Context,
    name: Name,
    chain: Annotated[
        Path, typer.Option("--certificate", help="PEM file: the certificate, followed by its issuers in order.")
    ],
    key: Annotated[Path, typer.Option("--key", help="PEM file: the private key, without a passphrase.")],
    region: Annotated[
        str,
        typer.Option(help="Region whose ingresses use it. Default: all regions.", autocompletion=names_of("regions")),
    ] = "",
) -> None:
    """Set the certificate that ingresses present for the hosts it names. To renew it, set the new one under the same
    name: open streams continue.

    switchyard certificate set api --certificate fullchain.pem --key privkey.pem"""
    run = session_of(context)
    body = {"name": name, "region": region, "certificate": _read_pem(chain), "private_key": _read_pem(key)}
    shown = run.connection.post("certificates", body)
    run.show(shown, [f"certificate {name}: {', '.join(shown['names'])}, until {shown['not_after']}"])


@certificate.command("remove")
def remove_certificate(context: typer.Context, name: Name, yes: Yes = False) -> None:
    """Remove a certificate from ingresses, and delete its key."""
    run = session_of(context)
    run.confirm(f"new connections to the hosts of {name} will get another certificate, or none.", wanted=name, yes=yes)
    run.connection.post(f"{path_of('certificates', name)}/remove")
    run.show({"name": name, "removed": True}, [f"certificate {name} is removed"])


def _read_pem(path: Path) -> str:
    """The content of a PEM file. Raises Failure if it cannot be read, is too long, or is not text."""
    try:
        with path.open("rb") as file:
            content = file.read(LONGEST_FILE + 1)
    except OSError as error:
        raise Failure(f"{path} cannot be read: {error.strerror}", ExitCode.USAGE) from None
    if len(content) > LONGEST_FILE or not content.isascii():
        raise Failure(f"{path} is not a PEM file: those are text of a few kilobytes", ExitCode.USAGE)
    return content.decode("ascii")


@webhook.command("rotate")
def rotate_webhook(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", autocompletion=names_of("webhooks"))],
) -> None:
    """Create a new secret for a webhook, and print it once. It signs all messages from then on.

    switchyard webhook rotate pager"""
    run = session_of(context)
    row = run.connection.post(f"{path_of('webhooks', name)}/rotate", {})
    run.show(row, [f"{row['name']}: {row['url']} has a new secret", row["secret"]])


@tenant_webhook.command("rotate")
def rotate_tenant_webhook(
    context: typer.Context,
    id: Annotated[int, typer.Argument(metavar="ID", min=1)],
    at_once: Annotated[
        bool, typer.Option("--at-once", help="Revoke the previous secret immediately instead of after a day.")
    ] = False,
) -> None:
    """Create a new secret for a webhook, and print it once.

    switchyard tenant-webhook rotate 4"""
    run = session_of(context)
    path = f"{path_of('tenant-webhooks', str(id))}/rotate"
    row = run.connection.post(path, {"at_once": at_once})
    until = f", the previous one is valid until {row['former_until']}" if row["former_until"] else ""
    run.show(row, [f"{row['id']}: {row['url']} has a new secret{until}", row["secret"]])
