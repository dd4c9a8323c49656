"""Who one is: log in and out, profiles, and API tokens. A token is printed once, where it is made, and nowhere else."""

import sys
from typing import Annotated, Any

import typer

from controlplane.cli.completion import names_of
from controlplane.cli.errors import Failure
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.profiles import Profile, profiles_file, write_profiles
from controlplane.cli.resources import Column, at
from controlplane.cli.server_target import Target, checked_server
from controlplane.cli.session import Session, resource_named, session_of

app = typer.Typer()
token = typer.Typer(help="API tokens: list them, make one, revoke one.", no_args_is_help=True)
app.add_typer(token, name="token")


@app.command()
def login(
    context: typer.Context,
    server: Annotated[str, typer.Argument(help="Its address; this machine's, if left out.")] = "",
    name: Annotated[str, typer.Option("--as", help="Name of the profile.")] = "default",
    token_stdin: Annotated[bool, typer.Option("--token-stdin", help="Read the token from standard input.")] = False,
) -> None:
    """Check a server and a token, and remember both as a profile.

    switchyard login https://switchyard.example.com --as production
    """
    run = session_of(context)
    where = checked_server(server) if server else run.target.server
    target = Target(where, _token_given(run, where, token_stdin=token_stdin), "login")
    me = run.connect(target).get("me")
    path = profiles_file(run.environ)
    write_profiles(path, run.profiles.with_profile(name, Profile(where, target.token)))
    run.show(me, [f"You are {me['username']} ({me['role']}) on {where}; profile {name} in {path}."])


def _token_given(run: Session, server: str, *, token_stdin: bool) -> str:
    """From standard input, the options or the environment; else a person types it, or this machine's own is taken.

    Raises:
        Failure: there is none.
    """
    if token_stdin:
        return sys.stdin.readline().strip()
    if run.options.token or run.environ.get("SWITCHYARD_TOKEN"):
        return run.options.token or run.environ["SWITCHYARD_TOKEN"]
    if run.target.server == server and run.target.token and not run.target.source.startswith("profile"):
        return run.target.token
    if run.is_interactive:
        from getpass import getpass

        return getpass(f"API token of {server}: ").strip()
    raise Failure("there is no token: --token, --token-stdin or SWITCHYARD_TOKEN", ExitCode.USAGE)


@app.command()
def logout(
    context: typer.Context, name: Annotated[str, typer.Argument(help="The profile; the current one.")] = ""
) -> None:
    """Forget a profile. Its token goes on opening the server until it is revoked."""
    run = session_of(context)
    gone = name or run.profiles.current
    if gone not in run.profiles.known:
        raise Failure(f"there is no profile {gone!r}" if gone else "you are not logged in", ExitCode.NOT_FOUND)
    write_profiles(profiles_file(run.environ), run.profiles.without(gone))
    run.output.line(f"profile {gone} is forgotten")


@app.command()
def profiles(
    context: typer.Context, use: Annotated[str, typer.Option(help="Make this the one that counts.")] = ""
) -> None:
    """List the profiles that `login` stored, or choose one."""
    run = session_of(context)
    kept = run.profiles
    if use:
        if use not in kept.known:
            raise Failure(f"there is no profile {use!r}", ExitCode.NOT_FOUND)
        kept = kept.with_profile(use, kept.known[use])
        write_profiles(profiles_file(run.environ), kept)
    rows = [{"name": name, "server": one.server, "current": name == kept.current} for name, one in kept.known.items()]
    if run.output.is_for_programs:
        run.output.document(rows)
        return
    columns = [Column("NAME", at("name")), Column("SERVER", at("server")), Column("CURRENT", at("current"))]
    run.output.rows(columns, rows, empty="No profile is stored; `switchyard login` makes one.")


@app.command()
def whoami(context: typer.Context) -> None:
    """Show the server, the user and the role that commands act with."""
    run = session_of(context)
    me: dict[str, Any] = run.connection.get("me")
    by = f"token from {run.target.source}" if run.target.source else "no token"
    grants = "".join(f", {role} of {name}" for name, role in me["grants"].items())
    run.show(me, [f"{me['username']} ({me['role']}{grants}) on {run.target.server}, {by}, scope {me['scope']}"])


@token.command("list")
def list_tokens(context: typer.Context) -> None:
    """List your tokens; admins see everybody's."""
    session_of(context).show_all(resource_named("tokens"), {}, empty="There are no tokens.")


@token.command()
def create(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="What it is for.")],
    scope: Annotated[str, typer.Option(help="read, write or admin.")] = "read",
    days: Annotated[int, typer.Option(min=1, help="Until it expires.")] = 90,
    service_account: Annotated[str, typer.Option(autocompletion=names_of("service-accounts"))] = "",
) -> None:
    """Make a token and print it: it cannot be read again.

    switchyard token create ci --scope write --days 30
    """
    run = session_of(context)
    body: dict[str, Any] = {"name": name, "scope": scope, "expires_in_days": days}
    if service_account:
        body["service_account"] = service_account
    created = run.connection.post("tokens", body)
    run.show(created, [created["token"]])
    run.output.note(
        f"token {created['prefix']} ({created['scope']}) of {created['user']}, until {created['expires_at']}"
    )


@token.command()
def revoke(context: typer.Context, prefix: Annotated[str, typer.Argument(autocompletion=names_of("tokens"))]) -> None:
    """Refuse a token from now on."""
    run = session_of(context)
    revoked = run.connection.post(f"tokens/{prefix}/revoke")
    run.show(revoked, [f"token {prefix} is {revoked['state']}"])
