"""Rollouts and models: start, watch and control a rollout; import a model; validate, release and retire a version, and
show its memory."""

import time
from typing import Annotated, Any

import typer

from controlplane.cli.completion import names_of
from controlplane.cli.errors import Failure
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.plans import forecast_lines
from controlplane.cli.resources import Column, at, number
from controlplane.cli.session import Session, path_of, session_of

app = typer.Typer()
rollout = typer.Typer(help="Move a deployment to another version in waves.", no_args_is_help=True)
app.add_typer(rollout, name="rollout")
model_app = typer.Typer()
model = typer.Typer(
    help="Import models; validate, release or retire their versions, show their memory.", no_args_is_help=True
)
model_app.add_typer(model, name="model")

ACTIVE = ("running", "paused", "baking", "rolling_back")
MOVING = ("running", "baking", "rolling_back")
WATCH_EVERY_S = 1.0
VALIDATION_POLL_S = 1.0

Deployment = Annotated[str, typer.Argument(autocompletion=names_of("deployments"))]
Subject = Annotated[
    str,
    typer.Argument(
        metavar="DEPLOYMENT|ID",
        help="Deployment with an active rollout, or number of a rollout.",
        autocompletion=names_of("deployments"),
    ),
]
Why = Annotated[str, typer.Option(help="Reason, shown in the timeline.")]
Version = Annotated[str, typer.Argument(metavar="MODEL@VERSION", autocompletion=names_of("model-versions"))]
ImportNumber = Annotated[int, typer.Argument(metavar="NUMBER", help="ID in `switchyard get model-imports`.")]
VersionWhy = Annotated[str, typer.Option(help="Required: reason, shown in the timeline.")]


@rollout.command()
def start(
    context: typer.Context,
    deployment: Deployment,
    version: Annotated[str, typer.Argument(metavar="MODEL@VERSION", autocompletion=names_of("model-versions"))],
    policy: Annotated[
        list[str] | None, typer.Option(help="Changes to its update policy: name=value, such as bake_s=60.")
    ] = None,
    allow_unreleased: Annotated[bool, typer.Option("--allow-unreleased")] = False,
    why: Why = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show only the predicted effect.")] = False,
    watch_it: Annotated[bool, typer.Option("--watch", "-w", help="Wait until it has ended.")] = False,
) -> None:
    """Start a rollout of a deployment to another version.

    switchyard rollout start sim-70b sim-70b@2 --watch"""
    run = session_of(context)
    request = {
        "deployment": deployment,
        "version": version,
        "policy": stated(policy or []),
        "allow_unreleased": allow_unreleased,
    }
    if dry_run:
        _preview(run, request)
        return
    started = run.connection.post("rollouts", {**request, "why": why})
    if "stage_label" not in started:
        run.show(started, [f"approval {started['id']} requested: {started.get('summary', '')}"])
        message = f"a second admin must approve: switchyard approve {started['id']}"
        raise Failure(message, ExitCode.WAITS_FOR_APPROVAL)
    if not watch_it:
        run.show(started, [f"rollout {started['id']} of {deployment} to {version} has started"])
        return
    _watch(run, started["id"], None)


def stated(policy: list[str]) -> dict[str, Any]:
    """`name=value` texts as a policy; values are JSON, else strings, and dots separate the keys of nested objects.
    Raises Failure if one has no `=`."""
    import json

    settings: dict[str, Any] = {}
    for one in policy:
        path, sign, text = one.partition("=")
        if not sign:
            raise Failure(f"{one!r} is invalid; use name=value", ExitCode.USAGE)
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        *folders, name = path.split(".")
        inner = settings
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = value
    return settings


def _preview(run: Session, request: dict[str, Any]) -> None:
    stages = run.connection.post("rollouts/preview", request)
    forecast = run.connection.post("plan", {"rollout": request})
    if run.output.is_for_programs:
        run.output.document({"preview": stages, "forecast": forecast})
        return
    run.output.plain(f"{request['deployment']}: {stages['from_version']} -> {stages['to_version']}")
    for stage in stages["stages"]:
        run.output.plain(f"  {stage['name']}: {stage['cells']} of {stage['of']} cells, bakes {stage['bake_s']:.0f} s")
    for text, tone in forecast_lines(request["deployment"], forecast):
        run.output.toned(text, tone)


@rollout.command()
def watch(
    context: typer.Context,
    subject: Subject,
    for_s: Annotated[float | None, typer.Option("--for", help="Timeout in seconds; the exit status is then 9.")] = None,
) -> None:
    """Wait until a rollout has ended or pauses. Exit status 0 only if it succeeded."""
    run = session_of(context)
    _watch(run, _id_of(run, subject), for_s)


@rollout.command()
def pause(context: typer.Context, subject: Subject, why: Why = "") -> None:
    """Pause a rollout: no further cell is replaced; cells in transition finish."""
    _run_rollout_action(context, subject, "pause", why)


@rollout.command()
def resume(context: typer.Context, subject: Subject, why: Why = "") -> None:
    """Resume the current stage of a rollout; a bake starts over."""
    _run_rollout_action(context, subject, "resume", why)


@rollout.command()
def abort(context: typer.Context, subject: Subject, why: Why = "") -> None:
    """Abort a rollout: cells keep the version that they run."""
    _run_rollout_action(context, subject, "abort", why)


@rollout.command("roll-back")
def roll_back(context: typer.Context, subject: Subject, why: Why = "") -> None:
    """Roll back: return every cell to the previous version."""
    _run_rollout_action(context, subject, "roll-back", why)


@rollout.command("skip-bake")
def skip_bake(
    context: typer.Context,
    subject: Subject,
    why: Annotated[str, typer.Option(help="Required: reason for skipping the bake.")],
) -> None:
    """Skip the bake and promote without the gate's verdict."""
    _run_rollout_action(context, subject, "skip-bake", why)


def _run_rollout_action(context: typer.Context, subject: str, action: str, why: str) -> None:
    run = session_of(context)
    row = run.connection.post(f"rollouts/{_id_of(run, subject)}/{action}", {"why": why})
    run.show(row, [_line(row)])


def _id_of(run: Session, subject: str) -> int:
    """A number is the rollout's ID; a deployment means its active rollout, else its last."""
    if subject.isdecimal():
        return int(subject)
    newest = list(run.connection.pages("rollouts", {"deployment": subject, "state": ACTIVE}, 1))
    newest = newest or list(run.connection.pages("rollouts", {"deployment": subject}, 1))
    if not newest:
        raise Failure(f"{subject!r} has no rollout", ExitCode.NOT_FOUND)
    return int(newest[0]["id"])


def _line(row: dict[str, Any]) -> str:
    stage = row["stage_label"] if row["state"] in ACTIVE else ""
    where = f" at {stage}" if stage and not row["reason"].startswith(stage) else ""
    what = f"rollout {row['id']} of {row['deployment']} to {row['to_version']}"
    return f"{what} is {row['state']}{where}: {row['reason']}"


def _watch(run: Session, rollout_id: int, for_s: float | None) -> None:
    """Print a line at every change. Raises Failure if it did not succeed, pauses, or takes longer than the timeout."""
    ends = time.monotonic() + for_s if for_s is not None else None
    last = ""
    while True:
        row = run.connection.get(f"rollouts/{rollout_id}")
        if (line := _line(row)) != last:
            run.output.toned(line, row["tone"])
            last = line
        if row["state"] not in MOVING:
            break
        if ends is not None and time.monotonic() >= ends:
            raise Failure(f"rollout {rollout_id} is still {row['state']}", ExitCode.TIMED_OUT)
        time.sleep(WATCH_EVERY_S)
    if run.output.is_for_programs:
        run.output.document(row)
    if row["state"] == "paused":
        lines = (f"switchyard rollout resume {rollout_id}", f"switchyard rollout roll-back {rollout_id}")
        raise Failure(
            f"rollout {rollout_id} is paused; continue or roll back with:", ExitCode.NOT_ACHIEVED, lines=lines
        )
    if row["state"] != "succeeded":
        raise Failure(f"rollout {rollout_id} has ended: {row['state']}", ExitCode.NOT_ACHIEVED)


@model.command()
def validate(
    context: typer.Context,
    version: Version,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the result; exit status 10 if it failed.")] = False,
) -> None:
    """Validate a draft: artifacts, digests, golden prompts, an instance type."""
    run, path = session_of(context), path_of("model-versions", version)
    row = run.connection.post(f"{path}/validate")
    while wait and row["validation"] and row["validation"]["state"] == "running":
        time.sleep(VALIDATION_POLL_S)
        row = run.connection.get(path)
    verdict = row["validation"] or {"state": "not requested", "reason": ""}
    run.show(row, [f"validation of {version} is {verdict['state']}" + _because(verdict["reason"])])
    if verdict["state"] == "failed":
        raise Failure(f"{version} is not valid", ExitCode.NOT_ACHIEVED)


@model.command()
def release(context: typer.Context, version: Version, why: VersionWhy) -> None:
    """Release a validated version, so that it can be rolled out."""
    _move_version(context, version, "release", why)


@model.command()
def retire(context: typer.Context, version: Version, why: VersionWhy) -> None:
    """Retire a version permanently."""
    _move_version(context, version, "retire", why)


@model.command("import")
def import_(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="HUB://ORG/NAME@REVISION", help="HUB is hf or modelscope.")],
    pattern: Annotated[
        str, typer.Option("--pattern", help="Glob for the weights. Default: safetensors, or the only GGUF.")
    ] = "",
    draft: Annotated[str, typer.Option(metavar="MODEL@VERSION", help="Version to draft from it.")] = "",
    engine: Annotated[str, typer.Option(help="Engine of the draft. Default: llama-cpp for a GGUF, else vllm.")] = "",
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the end.")] = False,
) -> None:
    """Fetch a model from a hub into the artifact store: each file is verified, and the commit is pinned.

    switchyard model import hf://HuggingFaceTB/SmolLM2-135M-Instruct@main --draft smollm2@1"""
    run = session_of(context)
    body = {"source": source, "pattern": pattern, "draft": draft, "engine": engine}
    row = run.connection.post("model-imports", body)
    _show_import(run, row if detach else _followed_import(run, row))


@model.command("retry-import")
def retry_import(
    context: typer.Context,
    number: ImportNumber,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the end.")] = False,
) -> None:
    """Continue a failed or cancelled import; verified files are kept."""
    run = session_of(context)
    row = run.connection.post(f"model-imports/{number}/retry", {})
    _show_import(run, row if detach else _followed_import(run, row))


@model.command("cancel-import")
def cancel_import(context: typer.Context, number: ImportNumber) -> None:
    """Cancel an import and drop its unfinished files."""
    run = session_of(context)
    row = run.connection.post(f"model-imports/{number}/cancel", {})
    run.show(row, [f"import {number} is {row['state']}"])


def _followed_import(run: Session, row: dict[str, Any]) -> dict[str, Any]:
    """Prints progress until it has ended."""
    said = ""
    while row["state"] in ("queued", "running"):
        line = f"{row['state']}: {row['reason']}"
        if row["bytes_total"]:
            share = 100 * row["bytes_done"] / row["bytes_total"]
            line += f", {row['files_done']} of {row['files_total']} files, {share:.0f} %"
            line += f", {row['bytes_per_s'] / 1e6:.1f} MB/s" if row["bytes_per_s"] else ""
        if line != said:
            run.output.note(line)
            said = line
        time.sleep(WATCH_EVERY_S)
        row = run.connection.get(f"model-imports/{row['id']}")
    return row


def _show_import(run: Session, row: dict[str, Any]) -> None:
    run.show(row, [f"import {row['id']} is {row['state']}" + _because(row["reason"])])
    if row["state"] == "done" and not run.output.is_for_programs:
        run.output.plain(f"{row['artifact_uri']}  {row['artifact_digest']}")
        run.output.plain(f"commit {row['revision']}, licence {row['license'] or 'not stated'}")
    if row["state"] in ("failed", "cancelled"):
        raise Failure(f"{row['source']} was not imported", ExitCode.NOT_ACHIEVED)


def _move_version(context: typer.Context, version: str, action: str, why: str) -> None:
    run = session_of(context)
    row: dict[str, Any] = run.connection.post(f"{path_of('model-versions', version)}/{action}", {"why": why})
    run.show(row, [f"{version} is {row['state']}" + _because(row["reason"])])


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


LINES = (
    Column("INSTANCE TYPE", at("instance_type")), Column("LINE", at("name")), number("VALUE", "shown"),
    Column("SOURCE", at("source")), Column("HOW", at("how")),
)  # fmt: skip
PROPOSALS = (
    Column("INSTANCE TYPE", at("instance_type")), Column("ENGINE", at("engine")), number("NODES", "degrees.nodes"),
    number("TP", "degrees.tp"), Column("QUANTIZATION", at("quantization")), number("TOKENS", "tokens"),
    number("$/H", "price_per_hour"), number("$/H PER M TOKENS", "price"), Column("PROBLEM", at("problem")),
)  # fmt: skip
GIB = 1024**3


@model.command()
def memory(context: typer.Context, version: Version) -> None:
    """Show what a version needs per device, line by line, and on which instance types it fits, cheapest first.

    switchyard model memory smollm2@1"""
    run = session_of(context)
    found = run.connection.get(f"{path_of('model-versions', version)}/memory")
    if run.output.is_for_programs:
        run.output.document(found)
        return
    if found["problem"]:
        run.output.plain(f"no arithmetic: {found['problem']}")
        return
    with_lines = [cell for cell in found["cells"] if cell["memory"]]
    lines = [_memory_line(cell, line) for cell in with_lines for line in cell["memory"]["lines"]]
    run.output.rows(LINES, lines, empty="None of its instance types has arithmetic.")
    for cell in found["cells"]:
        if problem := cell["problem"] or (cell["memory"] or {}).get("shortfall"):
            run.output.plain(f"{cell['instance_type']}: {problem}")
    run.output.rows(PROPOSALS, [_proposal(each) for each in found["proposals"]], empty="No instance type is known.")


def _memory_line(cell: dict[str, Any], line: dict[str, Any]) -> dict[str, Any]:
    value, unit = line["value"], line["unit"]
    large = unit == "bytes" and value >= GIB / 100
    shown = f"{value / GIB:.2f} GiB" if large else f"{value:,.1f}" if unit == "requests" else f"{value:,.0f} {unit}"
    return {**line, "instance_type": cell["instance_type"], "shown": shown}


def _proposal(found: dict[str, Any]) -> dict[str, Any]:
    fits = found["memory"] and not found["problem"]
    return {
        **found,
        "tokens": f"{found['memory']['tokens']:,}" if fits else "",
        "price_per_hour": f"{found['price_per_hour']:.2f}" if found["price_per_hour"] else "",
        "price": f"{found['price']:.2f}" if found["price"] else "",
    }
