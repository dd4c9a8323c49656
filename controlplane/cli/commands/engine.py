"""Checks the local machine before an engine starts on it."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from controlplane.cli.errors import Failure
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.session import session_of

app = typer.Typer()
engine = typer.Typer(help="Find problems on this machine before an engine starts.", no_args_is_help=True)
app.add_typer(engine, name="engine")

ROOT = Path(__file__).resolve().parents[3]
WRONG = 1
"""Exit status of the agent's commands if they found a problem."""


@engine.command("doctor")
def doctor(
    context: typer.Context,
    which: Annotated[
        str, typer.Option("--engine", help="Engine to check. Default: the engine for the node's devices.")
    ] = "",
    target: Annotated[str, typer.Option(help="For engine neuron: build of the Neuron stack, such as nxdi-2.28.")] = "",
    nodes: Annotated[int, typer.Option(min=1, help="Nodes per cell.")] = 1,
    devices: Annotated[
        int, typer.Option(min=0, help="Expected number of accelerators. Default: number on the PCI bus.")
    ] = 0,
    cache: Annotated[Path | None, typer.Option(help="Cache of engines and weights. Default: SWITCHYARD_CACHE.")] = None,
    port_base: Annotated[int | None, typer.Option(help="First port of the node.")] = None,
) -> None:
    """Check this machine for an engine and suggest fixes: driver, devices, packages, network, memory, disk, clock,
    ports. `-o json` prints a line for each check. Same as `python -m engine_agent doctor`.

    switchyard engine doctor --engine neuron --target nxdi-2.28 --nodes 2"""
    given: dict[str, object] = {"--engine": which, "--target": target, "--nodes": nodes, "--devices": devices}
    given |= {"--cache": cache.absolute() if cache else None, "--port-base": port_base}
    argv = [word for name, value in given.items() if value for word in (name, str(value))]
    if session_of(context).output.is_for_programs:
        argv.append("--json")
    status = subprocess.run([sys.executable, "-m", "engine_agent", "doctor", *argv], cwd=ROOT, check=False).returncode
    if status == WRONG:
        raise typer.Exit(int(ExitCode.DIFFERS))
    if status:
        raise Failure("the agent's doctor failed", ExitCode.USAGE)
