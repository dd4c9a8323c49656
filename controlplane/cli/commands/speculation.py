"""Speculation: how often a version's guesses are right, and how many tokens it should guess."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from controlplane.cli.completion import names_of
from controlplane.cli.errors import Failure
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.resources import Column, at, number
from controlplane.cli.session import Session, path_of, session_of

app = typer.Typer()
speculation = typer.Typer(help="Show or store calibrations of a version's speculation.", no_args_is_help=True)
app.add_typer(speculation, name="speculation")

Version = Annotated[str, typer.Argument(metavar="MODEL@VERSION", autocompletion=names_of("model-versions"))]
CHOICES = (
    Column("TASK", at("task")), Column("INSTANCE TYPE", at("instance_type")), Column("SOURCE", at("source")),
    number("GUESS", "tokens"), number("GAIN", "gain"), Column("BY BATCH", at("by_batch")), Column("WHY", at("reason")),
)  # fmt: skip
TASKS = (
    Column("TASK", at("name")), number("POSITIONS", "positions"), Column("RIGHT, BY HEAD", at("right")),
    Column("TOKENS A STEP, CHAIN", at("chains")), Column("TREE OF 7, 15, 31, 63", at("trees")),
)  # fmt: skip
ACCEPTED = (
    Column("CELL", at("cell")), number("MINUTES", "minutes"), number("DRAFTS", "drafts"),
    number("GUESSED", "guessed"), number("TOKENS A DRAFT", "tokens"),
)  # fmt: skip


@speculation.command()
def show(context: typer.Context, version: Version) -> None:
    """Show a version's newest calibration: how often guesses are right, how many to make at which batch size, and what
    its cells accepted in the last hour.

    switchyard speculation show smollm2@135m-medusa"""
    run = session_of(context)
    _show(run, run.connection.get(f"{path_of('model-versions', version)}/calibration"))
    if not run.output.is_for_programs:
        cells = run.connection.pages("cells", {"model_version": version})
        guesses = [_accepted(each["id"], each["load"]["speculation"]) for each in cells if each["load"]["speculation"]]
        run.output.rows(ACCEPTED, guesses, empty="None of its cells guessed in the last hour.")


@speculation.command()
def calibrate(
    context: typer.Context,
    version: Version,
    calibration: Annotated[Path, typer.Argument(metavar="FILE", help="The calibration.json of the heads.")],
    step_cost: Annotated[
        list[Path] | None, typer.Option("--step-cost", help="File of step costs on an instance type; may be repeated.")
    ] = None,
) -> None:
    """Store a calibration of a version's heads, and show the recommended number of guesses.

    switchyard speculation calibrate smollm2@135m-medusa heads/calibration.json --step-cost step-cost.json"""
    run = session_of(context)
    body = {"calibration": _read(calibration), "step_costs": [_read(file) for file in step_cost or []]}
    _show(run, run.connection.post(f"{path_of('model-versions', version)}/calibrate", body))


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise Failure(f"cannot read {file}: {error}", ExitCode.USAGE) from error


def _show(run: Session, found: dict[str, Any]) -> None:
    if run.output.is_for_programs:
        run.output.document(found)
        return
    run.output.plain(f"calibration {found['id']} of {found['version']} by {found['actor']}, {found['created_at']}")
    run.output.rows(TASKS, [_task(each) for each in found["figures"]], empty="The calibration has no tasks.")
    choices = [{**each, "by_batch": _ranges(each["ranges"])} for each in found["choices"]]
    run.output.rows(CHOICES, choices, empty="There is no recommendation without step costs: give --step-cost.")


def _task(found: dict[str, Any]) -> dict[str, Any]:
    tree = found["tree"]
    sizes = [tree[min(size, len(tree) - 1)] for size in (7, 15, 31, 63)]
    return {
        **found,
        "right": " ".join(f"{ranks[0]:.2f}" for ranks in found["accuracies"]),
        "chains": " ".join(f"{each:.2f}" for each in found["chain"][1:]),
        "trees": " ".join(f"{each:.2f}" for each in sizes),
    }


def _accepted(cell: str, load: dict[str, Any]) -> dict[str, Any]:
    """Tokens of a draft include the model's own token."""
    drafts = max(1, load["drafts"])
    return {
        "cell": cell,
        "minutes": f"{load['covered_s'] / 60:.0f}",
        "drafts": load["drafts"],
        "guessed": f"{load['guessed_tokens'] / drafts:.1f}",
        "tokens": f"{1 + load['accepted_tokens'] / drafts:.2f}",
    }


def _ranges(ranges: list[list[int]]) -> str:
    told = [f"{first}-{last}: {tokens}" for first, last, tokens in ranges[:-1]]
    return ", ".join([*told, f"{ranges[-1][0]}-: {ranges[-1][2]}"])
