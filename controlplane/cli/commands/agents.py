"""Releases of the agent: list them, upgrade all agents, follow an upgrade, cancel it."""

import time
from typing import Annotated, Any

import typer

from controlplane.cli.commands.act import Why, seconds
from controlplane.cli.completion import names_of
from controlplane.cli.errors import Failure
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.session import Session, path_of, session_of

app = typer.Typer()
agents = typer.Typer(help="Upgrade agents to another release.", no_args_is_help=True)
app.add_typer(agents, name="agents")

ACTIVE = ("running", "rolling_back")
STATE_TEXT = {
    "running": "is in progress",
    "rolling_back": "goes back",
    "succeeded": "has succeeded",
    "rolled_back": "was rolled back",
}
WATCH_EVERY_S = 1.0


@agents.command()
def upgrade(
    context: typer.Context,
    to: Annotated[
        str,
        typer.Option(
            help="Default: the release that the control plane ships.", autocompletion=names_of("agent-releases")
        ),
    ] = "",
    soak: Annotated[str, typer.Option(help="How long a ring must stay healthy: 30s, 10m.")] = "15s",
    why: Why = "",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Wait until it has ended.")] = False,
) -> None:
    """Upgrade all agents to another release in rings: one, a tenth, all. Engines and streams keep running.

    switchyard agents upgrade --watch"""
    run = session_of(context)
    begun = run.connection.post("agents/rollouts", {"release": to, "soak_s": seconds(soak), "why": why})
    if not watch:
        run.show(begun, [_line(begun)])
        return
    _watch(run, begun)


@agents.command()
def status(
    context: typer.Context,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Wait until it has ended.")] = False,
) -> None:
    """Show the newest upgrade: its ring, the agents in it, and why it was rolled back. Exit status 10 if it was rolled
    back."""
    run = session_of(context)
    newest = _newest(run)
    if watch:
        _watch(run, newest)
        return
    run.show(newest, [_line(newest), *_rings(newest)])
    _require_success(newest)


@agents.command()
def cancel(context: typer.Context, why: Why = "") -> None:
    """Cancel the upgrade: agents that were upgraded return to the previous release."""
    run = session_of(context)
    newest = _newest(run)
    result = run.connection.post(f"agents/rollouts/{newest['id']}/cancel", {"why": why})
    run.show(result, [_line(result)])


def _newest(run: Session) -> dict[str, Any]:
    rows: list[dict[str, Any]] = run.connection.get("agents/rollouts", {"page_size": 1})["results"]
    if not rows:
        raise Failure("there has been no upgrade of agents; `switchyard agents upgrade` starts one", ExitCode.NOT_FOUND)
    return rows[0]


def _watch(run: Session, rollout: dict[str, Any]) -> None:
    said = ""
    while True:
        if (line := _line(rollout)) != said and not run.output.is_for_programs:
            run.output.plain(line)
            said = line
        if rollout["state"] not in ACTIVE:
            break
        time.sleep(WATCH_EVERY_S)
        rollout = run.connection.get(path_of("agents/rollouts", str(rollout["id"])))
    if run.output.is_for_programs:
        run.output.document(rollout)
    _require_success(rollout)


def _require_success(rollout: dict[str, Any]) -> None:
    if rollout["state"] == "rolled_back":
        raise Failure(f"the upgrade was rolled back: {rollout['reason']}", ExitCode.NOT_ACHIEVED)


def _line(rollout: dict[str, Any]) -> str:
    moves = rollout["moves"]
    well = sum(move["settled_at"] is not None for move in moves)
    reason = f": {rollout['reason']}" if rollout["reason"] else ""
    return (
        f"upgrade {rollout['id']} to {rollout['to_release']} {STATE_TEXT[rollout['state']]}, ring"
        f" {rollout['ring'] + 1} of {rollout['rings']}, {well} of {len(moves)} agent{'' if len(moves) == 1 else 's'}"
        f" well{reason}"
    )


def _rings(rollout: dict[str, Any]) -> list[str]:
    lines = []
    for ring in range(rollout["rings"]):
        names = [move["agent"] for move in rollout["moves"] if move["ring"] == ring]
        lines.append(f"  ring {ring + 1}: {', '.join(names) or '-'}")
    troubles = [f"  {move['agent']}: {move['trouble']}" for move in rollout["moves"] if move["trouble"]]
    return lines + troubles
