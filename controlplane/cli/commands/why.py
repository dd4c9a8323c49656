"""Why an object is as it is, and replays of the recorded passes around an incident."""

from typing import Annotated, Any

import typer

from controlplane.cli.completion import names_of, names_of_places
from controlplane.cli.errors import Failure, Problem
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.session import Session, path_of, session_of

app = typer.Typer()

KINDS = ("cell", "node", "deployment", "rollout", "share")
MARKS = {"same": "=", "gone": "-", "new": "+"}


@app.command()
def why(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="OBJECT",
            help="Cell, node, deployment, number of a rollout, or DEPLOYMENT@REGION for shares; or KIND/NAME.",
            autocompletion=names_of_places,
        ),
    ],
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=100, help="Number of decisions.")] = 10,
    alternatives: Annotated[
        bool, typer.Option("--alternatives", help="Also the other choices of the newest decision that had some.")
    ] = False,
) -> None:
    """Explain an object: what it waits for, and the newest decisions about it, with their inputs and limits.

    switchyard why sim-70b-us-east-1-1"""
    run = session_of(context)
    kind, bare = _kind_of(run, name)
    query = {"limit": lines, "alternatives": str(alternatives).lower()}
    found = run.connection.get(path_of(f"why/{kind}", bare), query)
    if run.output.is_for_programs:
        run.output.document(found)
        return
    for sentence in found["now"]:
        run.output.plain(sentence)
    if not found["decisions"]:
        run.output.plain("No decision about it is recorded.")
    for decision in found["decisions"]:
        _print_decision(run, decision)
    for note in found["notes"]:
        run.output.note(note)


def _kind_of(run: Session, name: str) -> tuple[str, str]:
    kind, slash, bare = name.partition("/")
    if slash:
        if kind.rstrip("s") not in KINDS:
            raise Failure(f"unknown kind {kind!r}; the kinds are: {', '.join(KINDS)}", ExitCode.USAGE)
        return kind.rstrip("s"), bare
    if name.isdecimal():
        return "rollout", name
    if "@" in name:
        return "share", name
    order = ("node", "cell", "deployment") if name.startswith("n-") else ("cell", "node", "deployment")
    for one in order:
        try:
            run.connection.get(path_of(f"{one}s", name))
        except Problem as problem:
            if problem.status != 404:
                raise
        else:
            return one, name
    raise Failure(
        f"there is no cell, node or deployment {name!r}; deleted ones are cell/{name} or node/{name}",
        ExitCode.NOT_FOUND,
    )


def _print_decision(run: Session, decision: dict[str, Any]) -> None:
    text = f"{decision['decision']} ({decision['rule']}): {decision['reason']}"
    run.output.plain(f"{_time(decision['at'])}  {text} [round/{decision['round']}]")
    for label in ("inputs", "limits"):
        if decision[label]:
            run.output.plain(f"    {label}: {_values(decision[label])}")
    for other in decision.get("alternatives") or ():
        run.output.plain(f"    not {other['name']}: {other['why_not']}")


def _time(stamp: str) -> str:
    return stamp[:19].replace("T", " ")


def _values(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


@app.command()
def replay(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="INCIDENT",
            help="Number of an incident, or round/NUMBER of a recorded round, as `why` prints it.",
            autocompletion=names_of("incidents"),
        ),
    ],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another setting: lost_after_s=60, autopilot.step=0.2; repeatable."),
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=200, help="Number of rounds.")] = 30,
) -> None:
    """Decide the recorded passes around an incident again, with their settings or with others.

    switchyard replay 12 --set lost_after_s=60"""
    run = session_of(context)
    query: dict[str, Any] = {"set": changes or []}
    if name.startswith("round/"):
        path = path_of("replay/rounds", name.removeprefix("round/"))
    else:
        path, query["limit"] = path_of("replay/incidents", name.removeprefix("incident/")), lines
    found = run.connection.get(path, query)
    if run.output.is_for_programs:
        run.output.document(found)
        return
    for one in found["rounds"]:
        same = "decided the same" if one["same"] else "decided differently"
        run.output.toned(
            f"{_time(one['at'])}  round {one['id']} of the {one['loop']} {same}", "ok" if one["same"] else "warn"
        )
        for decision in one["decisions"]:
            dropped = "" if decision["applied"] or decision["outcome"] == "new" else " (dropped: it was stale)"
            text = f"{decision['decision']} ({decision['rule']}): {', '.join(decision['subjects'][:2])}"
            run.output.plain(f"  {MARKS[decision['outcome']]} {text}: {decision['reason']}{dropped}")
    for note in found["notes"]:
        run.output.note(note)
    if found["rounds"]:
        run.output.plain("= decided both times, - only recorded, + only in the replay")
